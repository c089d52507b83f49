"""`batch_size`: a larger batch would fit and use idle resources. Advice, not a fault.

The 95th percentiles of a GPU's utilisation, of its memory and of the node's processors are all
below their thresholds, over the last `window` samples since the first step, once there are
`patience` of them. CPU is the utilisation of all cores together, or of the job relative to the
cores that it may use, whichever is higher. The model's part of the memory does not grow with the
batch, so the reported factor is a lower bound.

The thresholds are SageMaker Debugger's documented defaults; `patience` is the default in its source
(its documentation has 100). `low_gpu_utilization` reports a GPU that is not used at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import DataLoaderSeen, RunData
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, RuleMeta, event, system
from tocsin.stream_rules.rule_bases import NodeRule, NodeState, NodeWindow
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT, gpus_with

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
class _State(NodeState):
    batch: int | None = None


class BatchSize(NodeRule[BatchSizeParams, _State]):
    """One episode for each GPU."""

    meta = RuleMeta(
        name="batch_size",
        version=1,
        family="system",
        meaning="GPU compute, GPU memory and CPU are all under-used; a larger batch would fit.",
        severity="info",
        available="later",
        inputs=(
            system("gpu.*.utilization_percent"),
            system("gpu.*.memory_used_bytes", optional=True),
            system("gpu.*.memory_total_bytes", optional=True),
            system("gpu.*.of_job", optional=True),
            system("cpu.percent", optional=True),
            system("cpu.process_tree_percent", optional=True),
            system("cpu.limit_cores", optional=True),
            event(DataLoaderSeen, optional=True),
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

    def window(self) -> int:
        return self.params.window

    def quantities(self, frame: SystemFrame) -> Iterable[tuple[str, Sequence[Doubles] | None]]:
        cpu = _processors(frame)
        for gpu in gpus_with(frame, "utilization_percent") if cpu is not None else ():
            rate, memory = gpu.column("utilization_percent"), gpu.memory_percent()
            if not gpu.is_jobs or not gpu.taken:
                yield gpu.name, None
            elif rate is not None and memory is not None and cpu is not None:
                yield gpu.name, [rate, memory, cpu]

    def on_window(self, name: str, window: NodeWindow, at: Moment) -> Outcomes:
        params, samples = self.params, window.samples
        if samples.seen < params.patience or len(samples.rows) < params.window:
            return
        limits = np.array(
            [params.gpu_threshold_p95, params.gpu_memory_threshold_p95, params.cpu_threshold_p95]
        )
        high = np.percentile(samples.rows, 95, axis=0)
        if (high < limits).all() and samples.rows[:, 0].any():
            window.hysteresis.holds(at)
            yield self._finding(name, window, *high.tolist())
        elif (high < np.minimum(_OVER * limits, (limits + 100) / 2)).all():
            window.hysteresis.doubtful()
        elif window.hysteresis.gone(samples.seen, least=params.window):
            yield Clear(about=name)

    def _finding(
        self, name: str, window: NodeWindow, rate: float, memory: float, cpu: float
    ) -> Finding:
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
            episode=window.hysteresis.episode,
            onset_ms=window.hysteresis.first_ms,
            facts=tuple(facts),
            series=window.samples.series(f"memory of {name}", "percent", 1),
        )


def _processors(frame: SystemFrame) -> Doubles | None:
    found = [column for column in (frame.column("cpu.percent"),) if column is not None]
    tree, cores = frame.column("cpu.process_tree_percent"), frame.column("cpu.limit_cores")
    if tree is not None and cores is not None:
        with np.errstate(all="ignore"):
            found.append(np.where(cores > 0, tree / cores, np.nan))
    return np.fmax.reduce(found) if found else None
