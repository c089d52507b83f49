"""`cpu_bottleneck`: the GPUs wait for the CPU.

A sample of a node is a bottleneck when the mean utilisation of the job's GPUs is below
`gpu_threshold` and the processors are above `cpu_threshold`: the job's busiest thread (this share
of one core cannot be spread over others), or all cores together, or the job relative to the cores
that it may use. The rule fires when more than `threshold` percent of the last `patience` samples
were bottlenecks, none of them from before the first step, because no GPU works while data is
prepared. The evidence names the phases of the steps that ended in these samples.

The thresholds are SageMaker Debugger's documented defaults, except for `patience`, which is 1000 in
its source. Its rule counts any single GPU below the threshold, and any busy core of any node.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.stream_rules.rule import RuleMeta, system
from tocsin.stream_rules.rules.system.bottleneck_base import INPUTS, Bottleneck, BottleneckParams
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT


class CpuBottleneckParams(BottleneckParams):
    """Parameters of `cpu_bottleneck`."""

    cpu_threshold: float = Field(default=90.0, ge=0, lt=100)
    """CPU utilisation above which the CPU is busy. Unit: percent."""


class CpuBottleneck(Bottleneck[CpuBottleneckParams]):
    """One episode for each node; it names the phase that takes most of the time."""

    meta = RuleMeta(
        name="cpu_bottleneck",
        version=1,
        family="system",
        meaning="The GPUs wait most of the time, while a core that the job needs is always busy.",
        severity="warning",
        available="later",
        inputs=(
            *INPUTS,
            system("cpu.process_tree_busiest_core_percent", optional=True),
            system("cpu.process_tree_percent", optional=True),
            system("cpu.percent", optional=True),
            system("cpu.limit_cores", optional=True),
        ),
        capture_hint=CAPTURE_HINT,
        remedy="If it is data loading, give the loader more workers, or prepare the data once. "
        "Otherwise use larger batches, compile the model, and move work off the training thread.",
        alias="CPUBottleneck",
        params=CpuBottleneckParams,
        presets={
            "sagemaker": {
                "threshold": 50.0,
                "gpu_threshold": 10.0,
                "cpu_threshold": 90.0,
                "patience": 100,
            }
        },
        does_not_see="A thread that waits for a lock or for the network is not busy; only "
        "low_gpu_utilization sees a GPU that waits for it. The rule needs a GPU.",
        resolve_after_steps=0,
    )

    @property
    def busy_threshold(self) -> float:
        return self.params.cpu_threshold

    @property
    def busy_name(self) -> str:
        return "cpu"

    def busy(self, frame: SystemFrame) -> Doubles | None:
        found = [
            column
            for name in ("cpu.process_tree_busiest_core_percent", "cpu.percent")
            if (column := frame.column(name)) is not None
        ]
        tree, cores = frame.column("cpu.process_tree_percent"), frame.column("cpu.limit_cores")
        if tree is not None and cores is not None:
            with np.errstate(all="ignore"):
                found.append(np.where(cores > 0, tree / cores, np.nan))
        return np.fmax.reduce(found) if found else None

    def reason(self, node: str, share: float, gpu: float, busy: float) -> str:
        return (
            f"in {share:.0f} % of the samples of {node} the GPUs were busy for {gpu:.0f} % of the "
            f"time, and a core that the job needs for {busy:.0f} %"
        )
