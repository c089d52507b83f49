"""What `tocsin watch` knows: a view of the runs, and how far each is by its telemetry.

Memory is bounded whatever the bus holds: so many runs, issues and deliveries, and so many points of
a loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.bus.port import Record
from tocsin.console.views.sparkline import LossSeries, StepRate
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.runs_fold import RunSeen, RunsView
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition

MAX_SHOWN: Final = 500
"""Runs, issues and deliveries that are kept, each."""

BACK_MS: Final = 120_000
"""How far back the telemetry of a running run is read when it is first shown."""

BACK_ENDED_MS: Final = 30_000
"""The same before the end of one that has ended."""

_LAG_MS: Final = 10_000


@dataclass(slots=True)
class Track:
    """How far a run is, as one kind of record reports it."""

    step: int = -1
    loss: float | None = None
    series: LossSeries = field(default_factory=LossSeries)
    rate: StepRate = field(default_factory=StepRate)

    def advance(self, step: int, loss: float | None, at_ms: int) -> None:
        """Note a completed step and its loss."""
        if step > self.step:
            self.step = step
            self.rate.add(step, at_ms)
            if loss is not None:
                self.loss = loss
                self.series.add(loss)


@dataclass(slots=True)
class Progress:
    """How far one incarnation is: by telemetry, where that is read, and every few seconds by its
    views.
    """

    incarnation: str
    telemetry: Track = field(default_factory=Track)
    views: Track = field(default_factory=Track)
    heard_ms: int = 0
    eval_loss: float | None = None


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """One run in its newest incarnation, with its progress."""

    seen: RunSeen
    progress: Progress

    @property
    def step(self) -> int | None:
        """The last one that was done."""
        step = max(self.progress.telemetry.step, self.progress.views.step)
        return step if step >= 0 else None

    @property
    def state(self) -> str:
        """How it is: `running`, `lost`, or how it ended."""
        view = self.seen.view
        if view is None:
            return "starting" if self.step is None else "running"
        return view.outcome or view.state

    @property
    def loss(self) -> float | None:
        """The last one, as it is known."""
        first, second = self.progress.telemetry, self.progress.views
        if second.step > first.step:
            first, second = second, first
        return second.loss if first.loss is None else first.loss

    @property
    def series(self) -> LossSeries:
        """The loss so far: of telemetry, unless that is not read any more or has fewer points."""
        heard, viewed = self.progress.telemetry, self.progress.views
        unread = viewed.step > heard.step and self.seen.view_ms > self.progress.heard_ms + _LAG_MS
        return viewed.series if unread or len(viewed.series) > len(heard.series) else heard.series

    def per_s(self, now_ms: int) -> float | None:
        """Steps a second; None if that is not known or it stands still."""
        heard = self.progress.telemetry.rate.per_s(now_ms)
        return self.progress.views.rate.per_s(now_ms) if heard is None else heard

    @property
    def ended_ms(self) -> int:
        """When it ended, or was last heard of, or at least when it started."""
        view = self.seen.view
        ended = None if view is None else view.ended_ms
        return ended or self.last_heard_ms or self.seen.started_ms

    @property
    def last_heard_ms(self) -> int:
        """When anything of it was last heard; 0 if that is not known."""
        ranks = () if self.seen.view is None else self.seen.view.ranks
        return max([self.progress.heard_ms, *(rank.last_heard_ms for rank in ranks)])


class WatchState:
    """All that is shown, of one run or of all; of each kind at most `limit`. Not for several
    threads.
    """

    def __init__(self, topics: Topics, run_id: str | None = None, limit: int = MAX_SHOWN) -> None:
        self.topics = topics
        self.view = RunsView(run_id, limit=limit)
        self._progress: dict[str, Progress] = {}

    def apply(self, record: Record) -> bool:
        """Fold in a record of telemetry, runs, issues or actions; whether it changed anything."""
        if record.partition.topic == self.topics.telemetry:
            try:
                return self._apply_telemetry(record)
            except RecordError:
                self.view.unread += 1
                return True
        changed = self.view.apply(record)
        run = self.run(record.key.decode(errors="replace"))
        view = None if run is None else run.seen.view
        if run is not None and view is not None and view.last_step is not None:
            run.progress.views.advance(view.last_step, view.last_loss, run.seen.view_ms)
        return changed

    def fold(self, other: RunsView) -> None:
        """Add what another view knows, one of an archive."""
        self.view.fold(other)
        for run_id in other.seen:
            run = self.run(run_id)
            view = None if run is None else run.seen.view
            if run is not None and view is not None and view.last_step is not None:
                run.progress.views.advance(view.last_step, view.last_loss, run.seen.view_ms)

    def carry_over(self, before: WatchState) -> None:
        """Take the losses that were seen before the bus was opened again."""
        for run in self.ordered_runs():
            old = before.run(run.seen.run_id)
            if old is not None and old.progress.incarnation == run.progress.incarnation:
                run.progress.telemetry = old.progress.telemetry
                run.progress.heard_ms = old.progress.heard_ms
                run.progress.eval_loss = old.progress.eval_loss

    def run(self, run_id: str) -> WatchedRun | None:
        """The run with this id, if it is known."""
        seen = self.view.seen.get(run_id)
        return None if seen is None else WatchedRun(seen, self._progress_of(seen))

    def ordered_runs(self) -> Sequence[WatchedRun]:
        """Running ones first, the newest first; then the others, the one that ended last first."""
        for run_id in self._progress.keys() - self.view.seen.keys():
            del self._progress[run_id]
        return sorted(
            (WatchedRun(seen, self._progress_of(seen)) for seen in self.view.seen.values()),
            key=lambda run: (
                not run.seen.running,
                -(run.seen.started_ms if run.seen.running else run.ended_ms),
                run.seen.run_id,
            ),
        )

    def places(self, now_ms: int, limit: int) -> Mapping[int, int]:
        """Which partitions of telemetry the first `limit` runs need: number -> from which time.

        A run that has ended never makes a partition be read from before that of a running one.
        """
        starts: dict[int, int] = {}
        for run in self.ordered_runs()[:limit]:
            number = telemetry_partition(run.seen.run_id)
            if number in starts:
                continue
            over = not run.seen.running and run.ended_ms
            starts[number] = run.ended_ms - BACK_ENDED_MS if over else now_ms - BACK_MS
        return starts

    def _apply_telemetry(self, record: Record) -> bool:
        # Most records are large and of no interest here, which their headers show.
        meta = read_meta(record.headers)
        if meta.type == RunStarted.event_type:
            return self.view.apply(record)
        if meta.type != StepFrame.type or meta.rank != 0 or record.value is None:
            return False
        frame = decode(meta, record.value)
        assert isinstance(frame, StepFrame)
        origin, at_ms = frame.origin, record.append_ms
        if not frame.steps.size:
            return False
        seen = self.view.accepts(origin.run_id, origin.incarnation, record.offset, at_ms)
        if seen is None:
            return False
        progress = self._progress_of(seen)
        progress.heard_ms = max(progress.heard_ms, at_ms)
        losses = frame.column("loss")
        if frame.mode == "train":
            values = [None] * frame.steps.size if losses is None else losses.tolist()
            for step, loss in zip(frame.steps.tolist(), values, strict=True):
                progress.telemetry.advance(step, loss, at_ms)
        elif losses is not None and frame.mode == "eval":
            progress.eval_loss = float(losses[-1])
        return True

    def _progress_of(self, seen: RunSeen) -> Progress:
        """Of its newest incarnation; each begins again."""
        progress = self._progress.get(seen.run_id)
        if progress is None or progress.incarnation != seen.incarnation:
            progress = self._progress[seen.run_id] = Progress(seen.incarnation)
        return progress
