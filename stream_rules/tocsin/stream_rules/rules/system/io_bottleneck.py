"""`io_bottleneck`: the GPUs wait, while the node waits for its disks or a network file system.

A sample of a node is a bottleneck when the mean utilisation of the job's GPUs is below
`gpu_threshold` and the node waits for input and output for more than `io_threshold` percent of the
time. That wait is the share of all cores' time, or the kernel's pressure metric: the share of the
last ten seconds in which at least one task waited. The share alone can hardly reach the threshold
on a machine with many cores: one reader on 64 cores causes 1.6 %. The rule fires when more than
`threshold` percent of the last `patience` samples were bottlenecks, none of them from before the
first step.

The thresholds are SageMaker Debugger's documented defaults, except for `gpu_threshold`: its
documentation has 70, its source and this rule have 10.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.stream_rules.rule import RuleMeta, system
from tocsin.stream_rules.rules.system.bottleneck_base import INPUTS, Bottleneck, BottleneckParams
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT


class IoBottleneckParams(BottleneckParams):
    """Parameters of `io_bottleneck`."""

    io_threshold: float = Field(default=50.0, ge=0, lt=100)
    """I/O wait above which the node is waiting for input and output. Unit: percent of the time."""


class IoBottleneck(Bottleneck[IoBottleneckParams]):
    """One episode for each node; it names the phase that takes most of the time."""

    meta = RuleMeta(
        name="io_bottleneck",
        version=1,
        family="system",
        meaning="The GPUs wait most of the time, while the node waits for input and output.",
        severity="warning",
        available="later",
        inputs=(
            *INPUTS,
            system("cpu.iowait_percent", optional=True),
            system("pressure.io_some_percent", optional=True),
        ),
        capture_hint=CAPTURE_HINT,
        remedy="Copy the data to a local disk or into memory before training, store many samples "
        "in one file, read ahead with more workers, and write checkpoints less often or "
        "asynchronously.",
        alias="IOBottleneck",
        params=IoBottleneckParams,
        presets={
            "sagemaker": {
                "threshold": 50.0,
                "gpu_threshold": 70.0,
                "io_threshold": 50.0,
                "patience": 1000,
            }
        },
        does_not_see="For the kernel, data from a socket (object stores) is not disk I/O: the "
        "loader waits for the network, which `dataloader` sees.",
        resolve_after_steps=0,
    )

    @property
    def busy_threshold(self) -> float:
        return self.params.io_threshold

    @property
    def busy_name(self) -> str:
        return "io_wait"

    def busy(self, frame: SystemFrame) -> Doubles | None:
        found = [
            column
            for name in ("cpu.iowait_percent", "pressure.io_some_percent")
            if (column := frame.column(name)) is not None
        ]
        return np.fmax.reduce(found) if found else None

    def reason(self, node: str, share: float, gpu: float, busy: float) -> str:
        return (
            f"in {share:.0f} % of the samples of {node} the GPUs were busy for {gpu:.0f} % of the "
            f"time, and the node waited for input and output for {busy:.0f} %"
        )
