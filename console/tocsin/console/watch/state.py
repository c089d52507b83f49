"""What `tocsin watch` knows: records in, the newest of each run, issue and delivery kept.

Memory is bounded whatever the bus holds: so many runs, issues and deliveries, the oldest of which
are forgotten first, and so many points of a loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tocsin.bus.port import Record
from tocsin.console.views.sparkline import LossSeries, StepRate
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import RunStarted, RunView
from tocsin.schemas.records.wire import Meta, decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition

MAX_RUNS: Final = 500
MAX_ISSUES: Final = 500
MAX_DELIVERIES: Final = 500

BACK_MS: Final = 120_000
"""How far back the telemetry of a running run is read when it is first shown."""

BACK_ENDED_MS: Final = 30_000
"""The same before the end of one that has ended."""

_PAST: Final = 8
_LAG_MS: Final = 10_000
_STEPS: Final = StepFrame.type
_STARTED: Final = RunStarted.event_type

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Track:
    """How far a run is, as one kind of record tells it."""

    step: int = -1
    loss: float | None = None
    series: LossSeries = field(default_factory=LossSeries)
    rate: StepRate = field(default_factory=StepRate)

    def reached(self, step: int, loss: float | None, at_ms: int) -> None:
        """It has done that step, with that loss."""
        if step > self.step:
            self.step = step
            self.rate.add(step, at_ms)
            if loss is not None:
                self.loss = loss
                self.series.add(loss)


@dataclass(slots=True)
class WatchedRun:
    """One run in its newest incarnation. `view` is None until a rules worker has told of it."""

    run_id: str
    incarnation: str = ""
    known_to: int = 0
    """Up to this offset of telemetry, itself not included, there is no newer incarnation."""

    past: deque[str] = field(default_factory=lambda: deque(maxlen=_PAST))
    view: RunView | None = None
    view_ms: int = 0
    started_ms: int = 0
    heard_ms: int = 0
    eval_loss: float | None = None
    heard: Track = field(default_factory=Track)
    """As telemetry tells it, where that is read."""

    told: Track = field(default_factory=Track)
    """As its views tell it, every few seconds."""

    @property
    def step(self) -> int | None:
        """The last one that was done."""
        step = max(self.heard.step, self.told.step)
        return step if step >= 0 else None

    @property
    def loss(self) -> float | None:
        """The last one, as it is known."""
        first, second = self.heard, self.told
        if second.step > first.step:
            first, second = second, first
        return second.loss if first.loss is None else first.loss

    @property
    def series(self) -> LossSeries:
        """The loss so far: of telemetry, unless that is not read any more or has said less."""
        unread = self.told.step > self.heard.step and self.view_ms > self.heard_ms + _LAG_MS
        if unread or len(self.told.series) > len(self.heard.series):
            return self.told.series
        return self.heard.series

    def per_s(self, now_ms: int) -> float | None:
        """Steps a second; None if that is not known or it stands still."""
        heard = self.heard.rate.per_s(now_ms)
        return self.told.rate.per_s(now_ms) if heard is None else heard

    @property
    def running(self) -> bool:
        """Whether it is not known to have ended or to be lost."""
        return self.view is None or self.view.state == "running"

    @property
    def began_ms(self) -> int:
        """When it started, as far as is known."""
        return self.view.started_ms if self.view is not None else self.started_ms

    @property
    def ended_ms(self) -> int:
        """When it ended, or was last heard of, or at least when it started."""
        ended = self.view.ended_ms if self.view is not None else None
        return ended or self.last_heard_ms or self.began_ms

    @property
    def last_heard_ms(self) -> int:
        """When anything of it was last heard; 0 if that is not known."""
        ranks = self.view.ranks if self.view is not None else ()
        return max([self.heard_ms, *(rank.last_heard_ms for rank in ranks)])

    def hears(self, incarnation: str, offset: int, at_ms: int) -> bool:
        """Whether telemetry at that offset is of the incarnation at hand; it may begin a new one.

        Telemetry is read from a while ago, after the views: that of an incarnation before shows by
        its offset.
        """
        if incarnation == self.incarnation:
            return True
        if incarnation in self.past or offset < self.known_to:
            return False
        self._begin(incarnation, offset + 1, at_ms)
        return True

    def is_told(self, view: RunView) -> bool:
        """The same of a view. One that knows more counts even of an incarnation before."""
        if view.incarnation != self.incarnation:
            newer = view.next_offset > self.known_to or view.started_ms > self.began_ms
            if self.incarnation and not newer:
                return False
            self._begin(view.incarnation, view.next_offset, view.started_ms)
        self.known_to = max(self.known_to, view.next_offset)
        return True

    def _begin(self, incarnation: str, known_to: int, at_ms: int) -> None:
        if self.incarnation:
            self.past.append(self.incarnation)
            self.view, self.view_ms, self.heard_ms, self.eval_loss = None, 0, 0, None
            self.heard, self.told = Track(), Track()
        if incarnation in self.past:
            self.past.remove(incarnation)
        self.incarnation, self.known_to, self.started_ms = incarnation, known_to, at_ms


class WatchState:
    """All that is shown, of one run or of all. Not for several threads."""

    def __init__(self, topics: Topics, run_id: str | None = None) -> None:
        self.topics = topics
        self.run_id = run_id
        self.runs: dict[str, WatchedRun] = {}
        self.issues: dict[str, IssueFiring] = {}
        self.deliveries: dict[bytes, Delivery] = {}
        self.unread = 0
        """Records that this release cannot read."""

    def apply(self, record: Record) -> bool:
        """Take in a record of telemetry, runs, issues or actions; whether anything changed."""
        topic = record.partition.topic
        if record.value is None:
            return self._forget(topic, record.key)
        try:
            meta = read_meta(record.headers)
            if topic == self.topics.telemetry:
                return self._apply_telemetry(meta, record, record.value)
            found = decode(meta, record.value)
        except RecordError:
            self.unread += 1
            return True
        return isinstance(found, Event) and self._apply_event(found.data, record)

    def carry_over(self, before: WatchState) -> None:
        """Take the losses that were seen before the bus was opened again."""
        for run_id, run in self.runs.items():
            old = before.runs.get(run_id)
            if old is not None and old.incarnation == run.incarnation:
                run.heard, run.heard_ms, run.eval_loss = old.heard, old.heard_ms, old.eval_loss

    def ordered_runs(self) -> Sequence[WatchedRun]:
        """Running ones first, the newest first; then the others, the one that ended last first."""
        return sorted(
            self.runs.values(),
            key=lambda run: (
                not run.running,
                -(run.began_ms if run.running else run.ended_ms),
                run.run_id,
            ),
        )

    def ordered_issues(self) -> Sequence[IssueFiring]:
        """The newest first."""
        return sorted(
            self.issues.values(),
            key=lambda issue: (issue.onset_ms, issue.first_step or 0),
            reverse=True,
        )

    def ordered_deliveries(self) -> Sequence[Delivery]:
        """The newest first."""
        return sorted(
            self.deliveries.values(), key=lambda delivery: delivery.created_ms, reverse=True
        )

    def places(self, now_ms: int, limit: int) -> Mapping[int, int]:
        """Which partitions of telemetry the first `limit` runs need: number -> from which time.

        A run that has ended never makes a partition be read from before that of a running one.
        """
        starts: dict[int, int] = {}
        for run in self.ordered_runs()[:limit]:
            number = telemetry_partition(run.run_id)
            if number in starts:
                continue
            over = not run.running and run.ended_ms
            starts[number] = run.ended_ms - BACK_ENDED_MS if over else now_ms - BACK_MS
        return starts

    # -- records in ------------------------------------------------------------------------

    def _apply_telemetry(self, meta: Meta, record: Record, value: bytes) -> bool:
        # Most records are large and of no interest here: their headers say so.
        shown = meta.type == _STARTED or (meta.type == _STEPS and meta.rank == 0)
        if not shown:
            return False
        found = decode(meta, value)
        if isinstance(found, StepFrame):
            run = self._run(found.speaker.run_id)
            return run is not None and self._apply_steps(run, found, record)
        if isinstance(found, Event) and isinstance(found.data, RunStarted):
            run = self._run(found.data.run_id)
            return run is not None and run.hears(
                found.data.incarnation, record.offset, record.append_ms
            )
        return False

    def _apply_steps(self, run: WatchedRun, frame: StepFrame, record: Record) -> bool:
        at_ms, incarnation = record.append_ms, frame.speaker.incarnation
        if not frame.steps.size or not run.hears(incarnation, record.offset, at_ms):
            return False
        run.heard_ms = max(run.heard_ms, at_ms)
        losses = frame.column("loss")
        if frame.mode == "train":
            values = [None] * frame.steps.size if losses is None else losses.tolist()
            for step, loss in zip(frame.steps.tolist(), values, strict=True):
                run.heard.reached(step, loss, at_ms)
        elif losses is not None and frame.mode == "eval":
            run.eval_loss = float(losses[-1])
        return True

    def _apply_event(self, data: Data, record: Record) -> bool:
        if isinstance(data, RunView):
            run = self._run(data.run_id)
            if run is None or not run.is_told(data):
                return False
            run.view, run.view_ms = data, record.append_ms
            if data.last_step is not None:
                run.told.reached(data.last_step, data.last_loss, record.append_ms)
        elif isinstance(data, IssueFiring) and self._shows(data.run_id):
            self.issues[data.issue_id] = data.overall()
            _bound(self.issues, MAX_ISSUES, lambda issue: issue.onset_ms)
        elif isinstance(data, Delivery) and self._shows(data.run_id):
            self.deliveries[record.key] = data
            _bound(self.deliveries, MAX_DELIVERIES, lambda delivery: delivery.created_ms)
        else:
            return False
        return True

    def _forget(self, topic: str, key: bytes) -> bool:
        if topic == self.topics.runs:
            return self.runs.pop(key.decode(errors="replace"), None) is not None
        return topic == self.topics.actions and self.deliveries.pop(key, None) is not None

    def _shows(self, run_id: str) -> bool:
        return self.run_id in (None, run_id)

    def _run(self, run_id: str) -> WatchedRun | None:
        if not self._shows(run_id):
            return None
        run = self.runs.get(run_id)
        if run is None:
            run = self.runs[run_id] = WatchedRun(run_id)
            if len(self.runs) > MAX_RUNS:
                # The last of the order; not the new one, which has no times yet.
                others = [other for other in self.ordered_runs() if other is not run]
                for other in others[-MAX_RUNS // 10 :]:
                    del self.runs[other.run_id]
        return run


def _bound(found: dict[K, V], limit: int, age: Callable[[V], int]) -> None:
    """Forget the oldest, a tenth of them at once, when there are too many."""
    if len(found) > limit:
        for key in sorted(found, key=lambda key: age(found[key]))[: limit // 10]:
            del found[key]
