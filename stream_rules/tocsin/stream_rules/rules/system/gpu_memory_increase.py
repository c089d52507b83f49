"""`gpu_memory_increase`: the memory of a GPU fills up.

- predicted: a steady growth over at least five minutes, measured as `host_memory_increase` does,
  meets the size of the memory within `horizon`. It resolves when for 20 minutes no trend reaches
  the limit within twice the horizon.
- step: the median of the last `window` samples is more than `increase` points above that of the
  `window` before. Caching allocators take memory in steps, and an evaluation or a longer sequence
  may cause an intended one: an info. It resolves when adjacent windows are similar. If the growth
  is steady, only `predicted` is reported.

Samples from before the first step do not count, and the rule does not fire before there are
`patience` samples. Those are the parameters of SageMaker Debugger; its test compares two windows
that overlap in all but one sample, so with its documented defaults the difference cannot exceed 0.4
points, and it never fires. This rule compares adjacent windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.configuration.values import Duration
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, system
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT, Gpu, gpus_with
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.sliding_window import SlidingWindow, TrainingStart
from tocsin.stream_rules.signals.trend import Trend

_GIB: Final = 1 << 30
_STEADY_S: Final = 1200.0


class GpuMemoryIncreaseParams(Params):
    """Parameters of `gpu_memory_increase`."""

    increase: float = Field(default=5.0, gt=0, lt=100)
    """Minimum size of a step. Unit: points of percent of the GPU's memory."""
    window: int = Field(default=500, ge=10, le=10_000)
    """Number of samples that are compared with as many earlier ones. Unit: samples of 0.5 s."""
    horizon: Duration = Field(default=timedelta(hours=2), examples=["2h"])
    """Time within which the memory will be full. Unit: a duration."""
    patience: int = Field(default=1000, ge=0, le=100_000)
    """Number of samples before the first check. Unit: samples of 0.5 s."""


@dataclass(slots=True)
class _Memory:
    recent: SlidingWindow = field(default_factory=SlidingWindow)
    trend: Trend = field(default_factory=Trend)
    predicted: Hysteresis = field(default_factory=Hysteresis)
    step: Hysteresis = field(default_factory=Hysteresis)


@dataclass(slots=True)
class _State:
    start: TrainingStart = field(default_factory=TrainingStart)
    gpus: dict[str, _Memory] = field(default_factory=dict)


class GpuMemoryIncrease(Rule[GpuMemoryIncreaseParams, _State]):
    """One episode for each GPU and branch."""

    meta = RuleMeta(
        name="gpu_memory_increase",
        version=1,
        family="system",
        meaning="The memory of a GPU will be full soon, or has jumped.",
        severity="warning",
        available="later",
        inputs=(
            system("gpu.*.memory_used_bytes"),
            system("gpu.*.memory_total_bytes", optional=True),
            system("gpu.*.of_job", optional=True),
        ),
        capture_hint=CAPTURE_HINT,
        remedy="Look for losses or outputs that are kept with their graph (use .item() or "
        ".detach()), caches that grow, and sequences that get longer.",
        alias="GPUMemoryIncrease",
        params=GpuMemoryIncreaseParams,
        presets={"sagemaker": {"increase": 10.0, "window": 500, "patience": 100}},
        branches={
            "predicted": "a steady growth fills it within the horizon",
            "step": "a jump in memory use (info)",
        },
        does_not_see="Memory that an allocator reserves counts as used: a leak inside its pool "
        "shows only when the pool grows. A program that fills the memory in less than five minutes "
        "is too fast for a prediction.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        trains = self.state.start.is_over(at)
        for gpu in gpus_with(frame, "memory_used_bytes"):
            used, percent = gpu.column("memory_used_bytes"), gpu.memory_percent()
            if not gpu.is_jobs:
                if self.state.gpus.pop(gpu.name, None) is not None:
                    yield Clear(about=f"predicted {gpu.name}")
                    yield Clear(about=f"step {gpu.name}")
                continue
            if used is None or percent is None or not trains:
                continue
            memory = self.state.gpus.setdefault(gpu.name, _Memory())
            window = 2 * self.params.window
            if not memory.recent.add(frame.at_us, [percent, used], window=window):
                continue
            for at_us, value in zip(frame.at_us.tolist(), used.tolist(), strict=True):
                memory.trend.add(at_us / 1e6, value)
            if memory.recent.seen >= self.params.patience:
                yield from self._predict(gpu, memory, at)
                yield from self._compare(gpu, memory, at)

    def _predict(self, gpu: Gpu, memory: _Memory, at: Moment) -> Outcomes:
        percent, used = memory.recent.rows[-1].tolist()
        total = 100 * used / percent if percent > 0 else 0.0
        horizon_s = self.params.horizon.total_seconds()
        ahead = memory.trend.meets_in_s(total)
        if ahead is not None and ahead <= horizon_s * (2 if memory.predicted.open else 1):
            memory.predicted.holds(at)
            slope = (total - memory.trend.last) / ahead
            yield Finding(
                about=f"predicted {gpu.name}",
                branch="predicted",
                subject=Subject(kind="device", name=gpu.name),
                reason=f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB of {gpu.name} are in use, and "
                f"{60 * slope / 2**20:,.0f} MiB more each minute: full in {ahead / 60:,.0f} min",
                episode=memory.predicted.episode,
                onset_ms=memory.predicted.first_ms,
                facts=(
                    fact("used", used, limit=total, unit="bytes"),
                    fact("growth", slope, unit="bytes/s"),
                    fact("full_in", ahead, limit=horizon_s, unit="s"),
                ),
                series=memory.trend.series(f"memory of {gpu.name}", "bytes", total),
                explanation="the growth is that between the medians of the first and the last "
                "ninth of the last 5 or 20 minutes",
            )
        elif memory.predicted.gone(at.now_ms / 1000, least=_STEADY_S):
            yield Clear(about=f"predicted {gpu.name}")

    def _compare(self, gpu: Gpu, memory: _Memory, at: Moment) -> Outcomes:
        window, recent = self.params.window, memory.recent
        if len(recent.rows) < 2 * window:
            return
        before = float(np.median(recent.rows[:window, 0]))
        now = float(np.median(recent.rows[window:, 0]))
        if now - before <= self.params.increase or memory.predicted.open:
            if memory.step.gone(recent.seen, least=window):
                yield Clear(about=f"step {gpu.name}")
            return
        memory.step.holds(at)
        yield Finding(
            about=f"step {gpu.name}",
            branch="step",
            subject=Subject(kind="device", name=gpu.name),
            reason=f"{now:.0f} % of the memory of {gpu.name} are in use, {before:.0f} % in the "
            f"{window} samples before",
            episode=memory.step.episode,
            onset_ms=memory.step.first_ms,
            severity="info",
            facts=(
                fact("increase", now - before, limit=self.params.increase, unit="percent"),
                fact("used", now, unit="percent"),
                fact("used_before", before, unit="percent"),
            ),
            series=recent.series(f"memory of {gpu.name}", "percent"),
            explanation=f"medians of {window} samples and of as many before them",
        )
