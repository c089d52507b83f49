"""`low_gpu_utilization`: a GPU of the job has a low utilisation.

It checks each GPU of the job, or of the node if it is unknown which ones belong to the job, over
its last `window` samples, once there are `patience` samples; p5 and p95 are percentiles of its
utilisation, the share of time in which a kernel ran:

- unused: never above zero. Only for a GPU with memory in use: an empty one may belong to another
  job.
- underused: p95 below `threshold_p95`.
- fluctuating: p95 at or above it, and p5 below `threshold_p5`: an info.

A reason must be true for a tenth of a window, because a GPU passes through all of them on its way
from busy to idle. At most one is open per GPU; a warning replaces the info at once. It resolves
when the GPU has clearly left the condition for another whole window: p95 a tenth above
`threshold_p95`, or the 2.5th percentile at or above `threshold_p5`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, system
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT, gpus_with
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.sliding_window import SlidingWindow

Why = Literal["unused", "underused", "fluctuating"]

_SETTLED: Final = 0.1


class LowGpuUtilizationParams(Params):
    """Parameters of `low_gpu_utilization`."""

    threshold_p95: float = Field(default=70.0, gt=0, le=100)
    """Utilisation (p95) below which the GPU is underused. Unit: percent."""
    threshold_p5: float = Field(default=10.0, ge=0, le=100)
    """Utilisation (p5) below which the GPU is fluctuating. Unit: percent."""
    window: int = Field(default=500, ge=10, le=10_000)
    """Number of samples that are checked. Unit: samples of 0.5 s."""
    patience: int = Field(default=1000, ge=0)
    """Number of samples before the first check. Unit: samples of 0.5 s."""


@dataclass(slots=True)
class _Gpu:
    samples: SlidingWindow = field(default_factory=SlidingWindow)
    taken: bool = False
    leaning: str = ""
    leaning_since: int = 0
    why: str = ""
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


@dataclass(slots=True)
class _State:
    gpus: dict[str, _Gpu] = field(default_factory=dict)


class LowGpuUtilization(Rule[LowGpuUtilizationParams, _State]):
    """One episode for each GPU and reason."""

    meta = RuleMeta(
        name="low_gpu_utilization",
        version=1,
        family="system",
        meaning="A GPU of the job is idle, or busy for only a part of the time.",
        severity="warning",
        available="later",
        inputs=(
            system("gpu.*.utilization_percent"),
            system("gpu.*.memory_used_bytes", optional=True),
            system("gpu.*.memory_total_bytes", optional=True),
            system("gpu.*.of_job", optional=True),
        ),
        capture_hint=CAPTURE_HINT,
        remedy="Give the data loader more workers, pin its memory, use larger batches; give an "
        "idle GPU to another job with CUDA_VISIBLE_DEVICES.",
        alias="LowGPUUtilization",
        params=LowGpuUtilizationParams,
        presets={
            "sagemaker": {
                "threshold_p95": 70.0,
                "threshold_p5": 10.0,
                "window": 500,
                "patience": 1000,
            }
        },
        branches={
            "unused": "never above zero, although a process uses its memory",
            "underused": "busy for less than threshold_p95 of the time",
            "fluctuating": "switches between busy and idle (info)",
        },
        does_not_see="For the driver, a GPU is busy while any kernel runs on it, however small, "
        "and while it waits inside a collective. GPUs of other vendors are not sampled.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        for there in gpus_with(frame, "utilization_percent"):
            values, name = there.column("utilization_percent"), there.name
            if values is None:
                continue
            if not there.is_jobs:
                gpu = self.state.gpus.pop(name, None)
                if gpu is not None and gpu.why:
                    yield Clear(about=f"{gpu.why} {name}")
                continue
            gpu = self.state.gpus.setdefault(name, _Gpu())
            if gpu.samples.add(frame.at_us, [values], window=self.params.window):
                gpu.taken = there.taken
            yield from self._evaluate(name, gpu, at)

    def _evaluate(self, name: str, gpu: _Gpu, at: Moment) -> Outcomes:
        params, seen = self.params, gpu.samples.seen
        if seen < max(params.patience, params.window) or len(gpu.samples.rows) < params.window:
            return
        low, high = (float(x) for x in np.percentile(gpu.samples.rows[:, 0], (5, 95)))
        why = self._reason(gpu, low, high)
        if (why or "") != gpu.leaning:
            gpu.leaning, gpu.leaning_since = why or "", seen
        settled = seen - gpu.leaning_since >= _SETTLED * params.window
        if gpu.why and gpu.why != why:
            graver = why is not None and settled and gpu.why == "fluctuating"
            if graver or gpu.hysteresis.gone(seen, least=params.window):
                yield Clear(about=f"{gpu.why} {name}")
                gpu.why, gpu.hysteresis = "", Hysteresis()
        if not gpu.why and why is not None and settled:
            gpu.why = why
        if why is not None and gpu.why == why:
            gpu.hysteresis.holds(at)
            yield self._finding(why, name, gpu, low, high)

    def _reason(self, gpu: _Gpu, low: float, high: float) -> Why | None:
        if gpu.samples.rows.max() <= 0:
            return "unused" if gpu.taken else None
        top = self.params.threshold_p95
        if high < (min(1.1 * top, (top + 100) / 2) if gpu.why == "underused" else top):
            return "underused"
        if gpu.why == "fluctuating":
            low = float(np.percentile(gpu.samples.rows[:, 0], 2.5))
        return "fluctuating" if low < self.params.threshold_p5 else None

    def _finding(self, why: Why, name: str, gpu: _Gpu, low: float, high: float) -> Finding:
        params = self.params
        limit = params.threshold_p5 if why == "fluctuating" else params.threshold_p95
        text = {
            "unused": "was not used at all",
            "underused": f"was busy for at most {high:.0f} % of the time (95th percentile)",
            "fluctuating": f"alternates between {low:.0f} % and {high:.0f} %",
        }[why]
        return Finding(
            about=f"{why} {name}",
            branch=why,
            subject=Subject(kind="device", name=name),
            reason=f"{name} {text} in the last {gpu.samples.span_s:,.0f} s",
            episode=gpu.hysteresis.episode,
            onset_ms=gpu.hysteresis.first_ms,
            severity="info" if why == "fluctuating" else None,
            facts=(
                fact("reason", why),
                fact("p95", high, limit=params.threshold_p95, unit="percent"),
                fact("p5", low, limit=params.threshold_p5, unit="percent"),
                fact("samples", len(gpu.samples.rows)),
            ),
            series=gpu.samples.series(f"utilisation of {name}", "percent", limit=limit),
        )
