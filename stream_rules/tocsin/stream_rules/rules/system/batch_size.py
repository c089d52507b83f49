"""`batch_size`: a larger batch would fit and use idle resources. Advice, not a fault.

The 95th percentiles of a GPU's utilisation, of its memory and of the node's processors are all
below their thresholds, over the last `window` samples since the first step, once there are
`patience` of them. CPU is the utilisation of all cores together, or of the job relative to the
cores that it may use, whichever is higher. The model's part of the memory does not grow with the
batch, so the reported factor is a lower bound.

Thresholds are the documented defaults of SageMaker Debugger; `patience` is that of its source, the
documentation says 100. `low_gpu_utilization` reports a GPU that is not used at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.schemas.records.issues import Evidence, Subject
from tocsin.schemas.records.runs import DataLoaderSeen, RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, system
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT, gpus_with
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.sliding_window import SlidingWindow, TrainingStart

_FULL: Final = 90.0
"""Of a GPU's memory: what a batch may well fill, percent."""

_OVER: Final = 1.1


class BatchSizeParams(Params):
    """Parameters of `batch_size`."""

    cpu_threshold_p95: float = Field(default=70.0, gt=0, le=100)
    """CPU utilisation below which the CPU is under-used. Unit: percent."""
    gpu_threshold_p95: float = Field(default=70.0, gt=0, le=100)
    """Utilisation below which the GPU is under-used. Unit: percent."""
    gpu_memory_threshold_p95: float = Field(default=70.0, gt=0, le=100)
    """Memory use below which the GPU has free memory. Unit: percent."""
    window: int = Field(default=500, ge=10, le=10_000)
    """Number of samples that are checked. Unit: samples of 0.5 s."""
    patience: int = Field(default=1000, ge=0, le=100_000)
    """Number of samples before the first check. Unit: samples of 0.5 s."""


@dataclass(slots=True)
class _Gpu:
    recent: SlidingWindow = field(default_factory=SlidingWindow)
    latch: Hysteresis = field(default_factory=Hysteresis)


@dataclass(slots=True)
class _State:
    start: TrainingStart = field(default_factory=TrainingStart)
    gpus: dict[str, _Gpu] = field(default_factory=dict)
    batch: int | None = None


class BatchSize(Rule[BatchSizeParams, _State]):
    """One episode for each GPU."""

    meta = RuleMeta(
        name="batch_size",
        version=1,
        family="system",
        meaning="GPU compute, GPU memory and CPU are all under-used; a larger batch would fit.",
        severity="info",
        comes="later",
        inputs=(
            system("gpu.*.utilization_percent"),
            system("gpu.*.memory_used_bytes", beside=True),
            system("gpu.*.memory_total_bytes", beside=True),
            system("gpu.*.of_job", beside=True),
            system("cpu.percent", beside=True),
            system("cpu.process_tree_percent", beside=True),
            system("cpu.limit_cores", beside=True),
            event(DataLoaderSeen, beside=True),
        ),
        capture_hint=CAPTURE_HINT,
        remedy="Try larger batches, with a matching learning rate, or use a smaller GPU.",
        alias="BatchSize",
        params=BatchSizeParams,
        presets={
            "sagemaker": {
                "cpu_threshold_p95": 70.0,
                "gpu_threshold_p95": 70.0,
                "gpu_memory_threshold_p95": 70.0,
                "window": 500,
                "patience": 100,
            }
        },
        does_not_see="Whether the training would learn as well with larger batches. A GPU that "
        "waits for the network counts as under-used.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, DataLoaderSeen) and data.mode == "train" and data.batch_size:
            self.state.batch = data.batch_size
        return ()

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        cpu = _processors(frame)
        if not self.state.start.is_over(at) or cpu is None:
            return
        for gpu in gpus_with(frame, "utilization_percent"):
            rate, memory = gpu.column("utilization_percent"), gpu.memory_percent()
            if not gpu.of_job or not gpu.taken:
                if self.state.gpus.pop(gpu.name, None) is not None:
                    yield Clear(about=gpu.name)
                continue
            if rate is None or memory is None:
                continue
            known = self.state.gpus.setdefault(gpu.name, _Gpu())
            if known.recent.add(frame.at_us, [rate, memory, cpu], window=self.params.window):
                yield from self._evaluate(gpu.name, known, at)

    def _evaluate(self, name: str, gpu: _Gpu, at: Moment) -> Outcomes:
        params, recent = self.params, gpu.recent
        if recent.seen < params.patience or len(recent.rows) < params.window:
            return
        limits = np.array(
            [params.gpu_threshold_p95, params.gpu_memory_threshold_p95, params.cpu_threshold_p95]
        )
        high = np.percentile(recent.rows, 95, axis=0)
        if (high < limits).all() and recent.rows[:, 0].any():
            gpu.latch.holds(at)
            yield self._finding(name, gpu, *high.tolist())
        elif (high < np.minimum(_OVER * limits, (limits + 100) / 2)).all():
            gpu.latch.doubtful()
        elif gpu.latch.gone(recent.seen, least=params.window):
            yield Clear(about=name)

    def _finding(self, name: str, gpu: _Gpu, rate: float, memory: float, cpu: float) -> Finding:
        params, batch = self.params, self.state.batch
        times = _FULL / max(memory, 1.0)
        fits = f"a batch of {int(times * batch)}" if batch else f"{times:.1f} times the batch"
        facts = [
            fact("gpu_p95", rate, limit=params.gpu_threshold_p95, unit="percent"),
            fact("gpu_memory_p95", memory, limit=params.gpu_memory_threshold_p95, unit="percent"),
            fact("cpu_p95", cpu, limit=params.cpu_threshold_p95, unit="percent"),
            fact("fits_at_least", times, unit="batches"),
        ]
        if batch:
            facts.append(fact("batch_size", batch, unit="samples"))
        return Finding(
            about=name,
            subject=Subject(kind="device", name=name),
            reason=f"{name} is busy for at most {rate:.0f} % of the time and uses {memory:.0f} % "
            f"of its memory, the processors {cpu:.0f} % (95th percentiles): at least {fits} "
            "would fit",
            episode=gpu.latch.episode,
            onset_ms=gpu.latch.first_ms,
            evidence=Evidence(
                facts=tuple(facts),
                series=gpu.recent.series(f"memory of {name}", "percent", 1),
            ),
        )


def _processors(frame: SystemFrame) -> Doubles | None:
    found = [column for column in (frame.column("cpu.percent"),) if column is not None]
    tree, cores = frame.column("cpu.process_tree_percent"), frame.column("cpu.limit_cores")
    if tree is not None and cores is not None:
        with np.errstate(all="ignore"):
            found.append(np.where(cores > 0, tree / cores, np.nan))
    return np.fmax.reduce(found) if found else None
