"""Bases for rules that read one kind of input: rows of tensor tables, a series, samples of a node.

Each does what all rules of its kind need, and leaves the condition to the subclass. A rule that
none of them fits extends `Rule` itself. They are for custom rules, too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from tocsin.schemas.records.frames import Doubles, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import Fact, Series, Severity, Subject, SubjectKind
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows, named
from tocsin.stream_rules.rule import P, Rule
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.sliding_window import SlidingWindow, TrainingStart


@dataclass(slots=True)
class RowState:
    """What a `TensorRowRule` remembers; a rule that remembers more extends it."""

    tables: dict[str, LowestRankRows] = field(default_factory=dict)


R = TypeVar("R", bound=RowState)


class TensorRowRule(Rule[P, R]):
    """A rule on tables of tensors, which have one row for each tensor, layer or router.

    The base assembles a table that came in several parts, keeps to the lowest rank that sends it,
    and skips tables without `columns`. A subclass sets `columns` and overrides `on_table`::

        class LargeTensors(TensorRowRule[LargeParams, RowState]):
            meta = RuleMeta(..., inputs=(tensors("weights"),))
            state_type = RowState
            columns = ("absmax",)

            def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
                size = doubles(table, "absmax")
                rows = np.flatnonzero(size > self.params.limit).tolist()
                if not rows:
                    yield Clear(table.step)
                    return
                yield self.row_finding(
                    table,
                    rows,
                    reason=f"{table.rows[rows[0]]} has a value of {size[rows[0]]:.3g}",
                    others=", and {} other tensors have one",
                    facts=[fact("absmax", size[rows[0]], limit=self.params.limit)],
                )
    """

    by_part = True
    columns: ClassVar[tuple[str, ...]] = ()
    """The statistics and counts that `on_table` needs. The tables of a step that lack one are
    skipped: activations have one table for each kind of layer."""

    @abstractmethod
    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        """Called with each whole table that has `columns` and at least one row."""

    def table_key(self, frame: TensorFrame) -> str:
        """Which tables belong to one series: those of a collection, unless a rule defines more."""
        return frame.collection

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if any(name not in frame.columns + frame.count_columns for name in self.columns):
            return ()
        key = self.table_key(frame)
        known = self.state.tables.get(key)
        if known is None:
            known = self.state.tables[key] = LowestRankRows()
        table = known.assemble(frame)
        return () if table is None or not table.rows else self.on_table(table, at)

    def row_finding(
        self,
        table: TensorFrame,
        rows: Sequence[int],
        *,
        reason: str,
        others: str = "",
        kind: SubjectKind = "tensor",
        collection: str | None = None,
        branch: str = "",
        about: str | None = None,
        first_step: int | None = None,
        onset_ms: int | None = None,
        severity: Severity | None = None,
        remedy: str | None = None,
        facts: Iterable[Fact] = (),
        series: Series | None = None,
        explanation: str = "",
    ) -> Finding:
        """What the rule has found in some rows: it is about the first, and names the others.

        Args:
            others: what follows the reason where there are further rows; `{}` is their number.
            collection: that of the table, unless another is given.
            about: the branch, unless another is given.
        """
        more = len(rows) - 1
        return Finding(
            about=branch if about is None else about,
            branch=branch,
            subject=Subject(
                kind=kind, name=table.rows[rows[0]], collection=collection or table.collection
            ),
            reason=reason + (others.format(more) if more else ""),
            first_step=first_step,
            first_rank=table.origin.rank,
            onset_ms=onset_ms,
            severity=severity,
            remedy=remedy,
            facts=tuple(facts),
            series=series,
            followed=more,
            also=named(table.rows, rows[1:]),
            explanation=explanation,
        )


@dataclass(slots=True)
class SeriesState:
    """What a `SeriesRule` remembers; a rule that remembers more extends it."""

    rank_series: StoredRankSeries = field(default_factory=RankSeries)


V = TypeVar("V", bound=SeriesState)


class SeriesRule(Rule[P, V]):
    """A rule on one scalar of the steps, such as the loss.

    The base keeps to the lowest rank that has it, calls `on_value` once for each step with a finite
    value, and starts again when a lower rank appears. `self.state.rank_series.series(name)` is the
    evidence::

        class HighLoss(SeriesRule[HighParams, SeriesState]):
            meta = RuleMeta(..., inputs=(scalar("loss"),))
            state_type = SeriesState
            column = "loss"

            def on_value(self, step: int, value: float, at: Moment) -> Outcomes:
                if value <= self.params.limit:
                    yield Clear(step)
                    return
                yield Finding(
                    subject=Subject(kind="loss", name="loss"),
                    reason=f"the loss is {value:.4g}",
                    first_step=step,
                    series=self.state.rank_series.series("loss"),
                )
    """

    column: ClassVar[str]
    """The scalar: `loss`, `gradient_norm`, `log.reward`."""

    @abstractmethod
    def on_value(self, step: int, value: float, at: Moment) -> Outcomes:
        """Called with the finite value of each step, in order; each step once."""

    def restarted(self) -> V:
        """The state for a lower rank, whose series takes the place of the one so far."""
        state: V = self.state_type(rank_series=self.state.rank_series)
        return state

    def points(self, frame: StepFrame) -> Iterable[tuple[int, float]]:
        """The new steps of a frame of the lowest rank, and their values."""
        return self.state.rank_series.points(frame, self.column)

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        if self.state.rank_series.overtaken_by(frame):
            self.state = self.restarted()
        if not self.state.rank_series.accepts(frame):
            return
        for step, value in self.points(frame):
            if math.isfinite(value):
                yield from self.on_value(step, value, at)


@dataclass(slots=True)
class NodeWindow:
    """The last samples of a node or a device, and whether an issue about it is open."""

    samples: SlidingWindow = field(default_factory=SlidingWindow)
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


@dataclass(slots=True)
class NodeState:
    """What a `NodeRule` remembers; a rule that remembers more extends it."""

    start: TrainingStart = field(default_factory=TrainingStart)
    windows: dict[str, NodeWindow] = field(default_factory=dict)


N = TypeVar("N", bound=NodeState)


class NodeRule(Rule[P, N]):
    """A rule on the last samples of each node, or of each of its devices.

    The base keeps a window for each name that `quantities` yields, and calls `on_window` when it
    has new samples. Samples from before the training starts do not count::

        class HotNode(NodeRule[HotParams, NodeState]):
            meta = RuleMeta(..., inputs=(system("cpu.temperature_celsius"),))
            state_type = NodeState

            def window(self) -> int:
                return 120

            def quantities(self, frame: SystemFrame) -> Iterable[tuple[str, Sequence[Doubles]]]:
                celsius = frame.column("cpu.temperature_celsius")
                return [] if celsius is None else [(frame.node, [celsius])]

            def on_window(self, name: str, window: NodeWindow, at: Moment) -> Outcomes:
                celsius = float(np.median(window.samples.rows[:, 0]))
                if celsius > self.params.limit:
                    window.hysteresis.holds(at)
                    yield Finding(
                        about=name,
                        subject=Subject(kind="node", name=name),
                        reason=f"the CPU of {name} has {celsius:.0f} °C",
                        episode=window.hysteresis.episode,
                        onset_ms=window.hysteresis.first_ms,
                    )
                elif window.hysteresis.gone(at.now_ms / 1000, least=60.0):
                    yield Clear(about=name)
    """

    @abstractmethod
    def window(self) -> int:
        """How many samples are kept."""

    @abstractmethod
    def quantities(self, frame: SystemFrame) -> Iterable[tuple[str, Sequence[Doubles] | None]]:
        """Names of nodes or devices, each with its quantities by sample; None: it is not the job's
        any more."""

    @abstractmethod
    def on_window(self, name: str, window: NodeWindow, at: Moment) -> Outcomes:
        """Called when a window has new samples: `window.samples.rows[:, i]` is quantity i."""

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        state = self.state
        if not state.start.is_over(at):
            return
        for name, quantities in self.quantities(frame):
            if quantities is None:
                if state.windows.pop(name, None) is not None:
                    yield Clear(about=name)
                continue
            window = state.windows.setdefault(name, NodeWindow())
            if window.samples.add(frame.at_us, quantities, window=self.window()):
                yield from self.on_window(name, window, at)
