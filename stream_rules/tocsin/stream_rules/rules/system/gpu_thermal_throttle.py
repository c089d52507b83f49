"""`gpu_thermal_throttle`: a GPU is throttled because it is too hot or lacks power.

In more than `share` percent of its last `window` samples the driver reports that the clocks are
throttled. It resolves when less than half as many were, for a whole window. Branches:

- thermal: the GPU or its memory is too hot (NVML's software and hardware thermal slowdown);
- power_brake: the power supply or the rack requests it.

If its clock is less than 15 % below its unthrottled clock, it is an info: small machines run like
that all day. A GPU at its configured power limit is not an issue. NVML's documentation defines the
two reasons and their bits in the driver; a share of 20 % of a minute ignores the moment in which a
fan starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, system
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT, Gpu, gpus_with
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.sliding_window import SlidingWindow

Why = Literal["thermal", "power_brake"]

_WHYS: Final[tuple[Why, ...]] = ("thermal", "power_brake")
_MHZ: Final = 1e6
_SLOWER: Final = 0.85


class GpuThermalThrottleParams(Params):
    """Parameters of `gpu_thermal_throttle`."""

    share: float = Field(default=20.0, ge=0, lt=100)
    """Share of the samples with throttled clocks. Unit: percent."""
    window: int = Field(default=120, ge=10, le=10_000)
    """Number of samples that are checked. Unit: samples of 0.5 s."""


@dataclass(slots=True)
class _Gpu:
    recent: SlidingWindow = field(default_factory=SlidingWindow)
    hystereses: dict[Why, Hysteresis] = field(
        default_factory=lambda: {why: Hysteresis() for why in _WHYS}
    )
    fastest: float = 0.0


@dataclass(slots=True)
class _State:
    gpus: dict[str, _Gpu] = field(default_factory=dict)


class GpuThermalThrottle(Rule[GpuThermalThrottleParams, _State]):
    """One episode for each GPU and branch."""

    meta = RuleMeta(
        name="gpu_thermal_throttle",
        version=1,
        family="system",
        meaning="The clocks of a GPU are throttled, because it is too hot or lacks power.",
        severity="warning",
        available="later",
        inputs=(
            system("gpu.*.throttled_thermal"),
            system("gpu.*.throttled_power_brake"),
            system("gpu.*.temperature_celsius", optional=True),
            system("gpu.*.sm_clock_hertz", optional=True),
            system("gpu.*.of_job", optional=True),
        ),
        capture_hint=CAPTURE_HINT,
        remedy="Check fans, dust, air flow and the neighbouring GPUs; for a power brake, the power "
        "supply and the rack's power budget. All ranks of a job run as slowly as this one.",
        params=GpuThermalThrottleParams,
        branches={
            "thermal": "the GPU or its memory is too hot",
            "power_brake": "the power supply or the rack requests it",
        },
        does_not_see="A power limit that was set low on purpose, and GPUs of other makers.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        for gpu in gpus_with(frame, *(f"throttled_{why}" for why in _WHYS)):
            if not gpu.is_jobs:
                if self.state.gpus.pop(gpu.name, None) is not None:
                    yield from (Clear(about=f"{why} {gpu.name}") for why in _WHYS)
                continue
            known = self.state.gpus.setdefault(gpu.name, _Gpu())
            columns = [_or_zero(gpu.column(f"throttled_{why}"), frame) for why in _WHYS]
            clock = gpu.column("sm_clock_hertz")
            columns.append(_or_zero(clock, frame))
            if clock is not None:
                free = clock[np.isfinite(clock) & (columns[0] == 0) & (columns[1] == 0)]
                known.fastest = max(known.fastest, float(free.max(initial=0.0)))
            columns.append(_or_zero(gpu.column("temperature_celsius"), frame))
            if not known.recent.add(frame.at_us, columns, window=self.params.window):
                continue
            if len(known.recent.rows) >= self.params.window:
                for place, why in enumerate(_WHYS):
                    yield from self._evaluate(gpu, known, why, known.recent.rows[:, place] > 0, at)

    def _evaluate(
        self, gpu: Gpu, known: _Gpu, why: Why, held: np.ndarray[tuple[int], np.dtype[np.bool_]],
        at: Moment,
    ) -> Outcomes:  # fmt: skip
        params, hysteresis = self.params, known.hystereses[why]
        share = 100 * float(held.mean())
        if share > params.share:
            hysteresis.holds(at)
            yield self._finding(gpu, known, why, share, held)
        elif share > params.share / 2:
            hysteresis.doubtful()
        elif hysteresis.gone(known.recent.seen, least=params.window):
            yield Clear(about=f"{why} {gpu.name}")

    def _finding(
        self, gpu: Gpu, known: _Gpu, why: Why, share: float,
        held: np.ndarray[tuple[int], np.dtype[np.bool_]],
    ) -> Finding:  # fmt: skip
        recent = known.recent
        clock, celsius = (float(x) for x in np.median(recent.rows[held, 2:], axis=0))
        facts = [fact("share", share, limit=self.params.share, unit="percent")]
        slower = ""
        if clock > 0:
            of_all = f" of {known.fastest / _MHZ:,.0f}" if known.fastest else ""
            slower = f", at {clock / _MHZ:,.0f}{of_all} MHz"
            most = known.fastest / _MHZ if known.fastest else None
            facts.append(fact("sm_clock", clock / _MHZ, limit=most, unit="MHz"))
        if celsius > 0:
            facts.append(fact("temperature", celsius, unit="celsius"))
        cause = "it is too hot" if why == "thermal" else "its power is limited from outside"
        at_heat = f" ({celsius:.0f} °C)" if why == "thermal" and celsius > 0 else ""
        return Finding(
            about=f"{why} {gpu.name}",
            branch=why,
            subject=Subject(kind="device", name=gpu.name),
            reason=f"{gpu.name} was throttled for {share:.0f} % of the last {recent.span_s:,.0f} "
            f"s{slower}, because {cause}{at_heat}",
            episode=known.hystereses[why].episode,
            onset_ms=known.hystereses[why].first_ms,
            severity="info" if 0 < _SLOWER * known.fastest < clock else None,
            facts=tuple(facts),
            series=recent.series(f"SM clock of {gpu.name}", "Hz", 2)
            if clock > 0
            else recent.series(f"held down, {gpu.name}", "0 or 1", _WHYS.index(why)),
        )


def _or_zero(column: Doubles | None, frame: SystemFrame) -> Doubles:
    return np.zeros(len(frame.at_us)) if column is None else np.nan_to_num(column)
