"""The common part of `cpu_bottleneck` and `io_bottleneck`: GPUs that wait while something else is
busy.

A snapshot is one sample of a node. It is a bottleneck where the mean utilisation of the job's GPUs
is below `gpu_threshold` and the other side is above its own threshold. Of the last `patience`
snapshots since the first step more than `threshold` percent must be bottlenecks. It resolves when
their share has been a fifth below `threshold` for a minute.

The GPUs of the job are compared; if they are not known, the GPUs that have memory in use.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, StepFrame, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Input, Params, event, scalar, system
from tocsin.stream_rules.rule_bases import NodeRule, NodeState, NodeWindow
from tocsin.stream_rules.signals.gpus import gpus_with
from tocsin.stream_rules.signals.phase_times import PHASES, PhaseTimes

_OVER: Final = 0.8
_OVER_S: Final = 60.0

INPUTS: Final[tuple[Input, ...]] = (
    system("gpu.*.utilization_percent"),
    system("gpu.*.memory_used_bytes", optional=True),
    system("gpu.*.memory_total_bytes", optional=True),
    system("gpu.*.of_job", optional=True),
    event(RunStarted, optional=True),
    *(scalar(phase, optional=True) for phase in PHASES),
)


class BottleneckParams(Params):
    """Parameters of both."""

    threshold: float = Field(default=50.0, ge=0, lt=100)
    """How many of the snapshots must be bottlenecks. Unit: percent."""
    gpu_threshold: float = Field(default=10.0, gt=0, le=100)
    """Mean utilisation below which the GPUs are waiting. Unit: percent."""
    patience: int = Field(default=1000, ge=10, le=100_000)
    """Number of samples that are checked, since the first step. Unit: samples of 0.5 s."""


@dataclass(slots=True)
class BottleneckState(NodeState):
    """Snapshots by node, and where the time of steps goes."""

    phases: PhaseTimes = field(default_factory=PhaseTimes)


P = TypeVar("P", bound=BottleneckParams)


class Bottleneck(NodeRule[P, BottleneckState]):
    """One episode for each node."""

    state_type = BottleneckState

    @abstractmethod
    def busy(self, frame: SystemFrame) -> Doubles | None:
        """The other side, percent by sample; None: it is not known."""

    @property
    @abstractmethod
    def busy_threshold(self) -> float:
        """Above it the other side is what the GPUs wait for, percent."""

    @property
    @abstractmethod
    def busy_name(self) -> str:
        """What the other side is, as a fact's name."""

    @abstractmethod
    def reason(self, node: str, share: float, gpu: float, busy: float) -> str:
        """The sentence, without the phase: shares and medians in percent."""

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, RunStarted) and data.role == "trainer" and data.node:
            self.state.phases.node_of[data.rank] = data.node
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        # From the first sample of a GPU on, the times of steps are kept to be laid beside.
        if self.state.windows:
            self.state.phases.add(frame)
        return ()

    def window(self) -> int:
        return self.params.patience

    def quantities(self, frame: SystemFrame) -> Iterable[tuple[str, Sequence[Doubles] | None]]:
        rates = [
            rate
            for gpu in gpus_with(frame, "utilization_percent")
            if gpu.is_jobs and gpu.taken
            if (rate := gpu.column("utilization_percent")) is not None
        ]
        busy = self.busy(frame)
        return [] if not rates or busy is None else [(frame.node, [np.mean(rates, axis=0), busy])]

    def on_window(self, name: str, window: NodeWindow, at: Moment) -> Outcomes:
        params, recent, hysteresis = self.params, window.samples, window.hysteresis
        if len(recent.rows) < params.patience:
            return
        gpu, busy = recent.rows.T
        both = (gpu < params.gpu_threshold) & (busy > self.busy_threshold)
        share = 100 * float(both.mean())
        if share > params.threshold:
            hysteresis.holds(at)
            yield self._finding(name, window, share, both)
        elif share > _OVER * params.threshold:
            hysteresis.doubtful()
        elif hysteresis.gone(recent.last_us / 1e6, least=_OVER_S):
            yield Clear(about=name)

    def _finding(
        self,
        name: str,
        node: NodeWindow,
        share: float,
        both: np.ndarray[tuple[int], np.dtype[np.bool_]],
    ) -> Finding:
        recent = node.samples
        gpu, busy = (float(x) for x in np.median(recent.rows[both], axis=0))
        times_us = (recent.start_us or 0) + (1e6 * recent.seconds[both]).astype(np.int64)
        phases = self.state.phases.shares(name, times_us.tolist())
        first = next(iter(phases), None)
        where = "" if first is None else f"; {phases[first]:.0f} % of the steps' time is {first}"
        return Finding(
            about=name,
            subject=Subject(kind="node", name=name),
            reason=self.reason(name, share, gpu, busy) + where,
            episode=node.hysteresis.episode,
            onset_ms=node.hysteresis.first_ms,
            facts=(
                fact("share", share, limit=self.params.threshold, unit="percent"),
                fact("gpu", gpu, limit=self.params.gpu_threshold, unit="percent"),
                fact(self.busy_name, busy, limit=self.busy_threshold, unit="percent"),
                *(
                    fact(f"time in {phase}", percent, unit="percent")
                    for phase, percent in phases.items()
                ),
            ),
            series=recent.series(f"mean utilisation of the GPUs of {name}", "percent"),
            explanation=f"of the last {len(recent.rows)} samples, over {recent.span_s:,.0f} s; "
            "medians of the samples in which the GPUs waited; the times are those of the "
            "steps that ended then",
        )
