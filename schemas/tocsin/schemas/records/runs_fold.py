"""Runs as people see them: the one fold of what trainings, rules and actions put on the bus. Pure.

`status`, `issues`, `why`, `watch`, `stop`, the launcher's summary and the actions all read this
fold; each gives it the records of the topics that it needs. So no two of them can differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import IssueFiring, IssueState
from tocsin.schemas.records.run_view import RunView, StopView
from tocsin.schemas.records.runs import (
    Heartbeat,
    RunData,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.records.stops.commands import StopAnswer, StopRequested
from tocsin.schemas.records.stops.progress import answered
from tocsin.schemas.records.wire import ReceivedRecord, read_event

MAX_INCARNATIONS: Final = 1_000
"""Of so many incarnations of a run the newest view is kept."""

_PAST: Final = 8

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class StateSeen:
    """An issue came into a state: when (append time of what decided it), and at which step."""

    state: IssueState
    at_ms: int
    step: int | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class CommandSeen:
    """A stop command as it is on the control topic, unverified, and when it came there."""

    command: StopRequested
    append_ms: int


@dataclass(slots=True)
class RunSeen:
    """One run. All but `views` is about its newest incarnation."""

    run_id: str
    incarnation: str = ""
    views: dict[str, RunView] = field(default_factory=dict)
    """The newest view of each incarnation that has one."""

    view_ms: int = 0
    """Append time of the newest view, Unix milliseconds."""

    as_of_ms: int = 0
    """The time up to which the newest view speaks."""

    stop: StopView | None = None
    """How far its stop has come, by its view and by later answers."""

    ended: RunEnded | RunView | None = None
    """What reported the end of the job; None while it runs, and when it is lost."""

    _heard_ms: int = 0
    _known_to: int = 0  # up to this offset of telemetry there is no newer incarnation
    _heard_to: int = -1  # offset of the last event that is in `stop` or `ended`
    _trained: bool = False  # whether a rank of it was heard
    _past: deque[str] = field(default_factory=lambda: deque(maxlen=_PAST))

    @property
    def view(self) -> RunView | None:
        """The run's newest view; None until the rules have published one."""
        return self.views.get(self.incarnation)

    @property
    def running(self) -> bool:
        """Whether it has not ended, and is not lost, by its view."""
        return self.view is None or self.view.state == "running"

    @property
    def started_ms(self) -> int:
        """When it started, as far as is known."""
        return self._heard_ms if self.view is None else self.view.started_ms

    @property
    def changed_ms(self) -> int:
        """When something was last heard of its newest incarnation, as far as is known."""
        view = self.view
        if view is None:
            return self._heard_ms
        heard = (rank.last_heard_ms for rank in view.ranks)
        stopped = () if self.stop is None else self.stop.states.values()
        return max(view.started_ms, view.ended_ms or 0, self._heard_ms, *heard, *stopped)

    def add_view(self, view: RunView, *, append_ms: int = 0, as_of_ms: int = 0) -> bool:
        """Fold in a view; whether it is the newest of the run.

        Each incarnation keeps the view that knows most. One that knows more than all before it is
        the newest even if telemetry of another incarnation was heard meanwhile.
        """
        known = self.views.get(view.incarnation)
        if known is not None and view.next_offset < known.next_offset:
            return False
        self.views[view.incarnation] = view
        if view.incarnation != self.incarnation:
            newer = view.next_offset >= self._known_to or view.started_ms > self.started_ms
            if self.incarnation and not newer:
                return False
            self._start(view.incarnation, view.next_offset, view.started_ms)
        self._known_to = max(self._known_to, view.next_offset)
        self._trained = self._trained or bool(view.ranks)
        self.view_ms, self.as_of_ms = append_ms, as_of_ms
        if view.next_offset > self._heard_to:
            self.stop, self.ended = view.stop, view if view.state == "ended" else None
        if len(self.views) > MAX_INCARNATIONS:
            del self.views[next(name for name in self.views if name != self.incarnation)]
        return True

    def add_event(self, data: RunData, *, offset: int, append_ms: int) -> bool:
        """Fold in an event of telemetry; whether it is of the newest incarnation."""
        # A launcher outlives its trainings: only when it starts does it speak of a new one.
        starts = isinstance(data, RunStarted) or (
            isinstance(data, Heartbeat) and data.role != "launcher"
        )
        if self.incarnation and data.incarnation != self.incarnation and not starts:
            return False
        launcher = data.role == "launcher"
        if not self.accepts(data.incarnation, offset, append_ms, launcher=launcher):
            return False
        if isinstance(data, RunEnded) and launcher:
            self.ended, self._heard_to = data, offset
        elif isinstance(data, StopAnswer):
            self.stop, self._heard_to = answered(self.stop, data, append_ms), offset
        return True

    def accepts(
        self, incarnation: str, offset: int, append_ms: int, *, launcher: bool = False
    ) -> bool:
        """Whether telemetry at that offset is of the newest incarnation; it may start a new one.

        Telemetry may be read from before the view: that of an earlier incarnation shows by its
        offset.
        """
        if incarnation != self.incarnation:
            if incarnation in self._past or offset < self._known_to:
                return False
            # Of a job on several nodes each launcher starts an incarnation; one of them is that of
            # all ranks, and which one only the ranks say.
            self._start(incarnation, offset + 1, append_ms, forget=launcher and not self._trained)
        self._trained = self._trained or not launcher
        return True

    def _start(
        self, incarnation: str, known_to: int, started_ms: int, *, forget: bool = False
    ) -> None:
        if self.incarnation and not forget:
            self._past.append(self.incarnation)
        if incarnation in self._past:
            self._past.remove(incarnation)
        self.incarnation, self._known_to, self._heard_ms = incarnation, known_to, started_ms
        self.stop = self.ended = None
        self._trained = False


class RunsView:
    """Runs, issues, deliveries, stop commands and refused configurations of a bus: of one run, or
    of all. What workers refuse is of no run.

    Not for several threads. With `limit` memory is bounded whatever the bus holds: of each kind the
    oldest are left out first.
    """

    def __init__(self, run_id: str | None = None, *, limit: int | None = None) -> None:
        self.run_id = run_id
        self.seen: dict[str, RunSeen] = {}
        self.commands: dict[str, CommandSeen] = {}
        self.unread = 0
        """Records that this release cannot read."""

        self._limit = limit
        self._issues: dict[str, IssueFiring] = {}
        self._states: dict[str, dict[StateSeen, None]] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._feedback: dict[str, dict[str, Feedback]] = {}
        self._refused: dict[bytes, ConfigurationRefused] = {}

    def apply(self, record: ReceivedRecord) -> bool:
        """Fold in a record of telemetry, runs, issues, actions or control; whether it changed
        anything.
        """
        if record.value is None:
            # Keys of runs and of deliveries differ: only those of deliveries have a slash.
            key = record.key.decode(errors="replace")
            gone = (
                self.seen.pop(key, None),
                self._deliveries.pop(key, None),
                self._refused.pop(record.key, None),
            )
            return any(one is not None for one in gone)
        try:
            event = read_event(record)
        except RecordError:
            self.unread += 1
            return True
        return event is not None and self.add(
            event.data, offset=record.offset, append_ms=record.append_ms, time_ms=event.time_ms
        )

    def add(self, data: Data, *, offset: int = 0, append_ms: int = 0, time_ms: int = 0) -> bool:
        """Fold in an event; whether it changed anything. `time_ms` is the event's."""
        if isinstance(data, ConfigurationRefused):
            self._refused[data.key] = data
            self._bound(self._refused, lambda one: (one.at_ms,))
            return True
        if not isinstance(data, RunData | Delivery | StopRequested | Feedback):
            return False
        if not self._wants(data.run_id):
            return False
        match data:
            case RunView():
                run = self._run(data.run_id)
                return run.add_view(data, append_ms=append_ms, as_of_ms=time_ms)
            case IssueFiring():
                self._issues[data.issue_id] = data.overall()
                # A record that was sent twice is one state.
                states = self._states.setdefault(data.issue_id, {})
                states.setdefault(StateSeen(data.state, data.at_ms, data.step))
                for issue_id in self._bound(self._issues, lambda issue: (issue.onset_ms,)):
                    del self._states[issue_id]
            case Delivery():
                before = self._deliveries.get(data.key)
                if before is not None and data.rank < before.rank:
                    return False
                self._deliveries[data.key] = data
                self._bound(self._deliveries, lambda delivery: (delivery.created_ms,))
            case Feedback():
                # A record that was sent twice is one answer.
                given = self._feedback.setdefault(data.issue.issue_id, {})
                given.setdefault(data.feedback_id, data)
                self._bound(self._feedback, lambda one: (min(each.at_ms for each in one.values()),))
            case StopRequested():
                # A sender that died before it knew sends the same again.
                self.commands.setdefault(data.command_id, CommandSeen(data, append_ms))
            case _:
                run = self._run(data.run_id)
                return run.add_event(data, offset=offset, append_ms=append_ms)
        return True

    def accepts(self, run_id: str, incarnation: str, offset: int, append_ms: int) -> RunSeen | None:
        """That run, if numbers of telemetry at that offset are of its newest incarnation."""
        if not self._wants(run_id):
            return None
        run = self._run(run_id)
        return run if run.accepts(incarnation, offset, append_ms) else None

    def _run(self, run_id: str) -> RunSeen:
        run = self.seen.get(run_id)
        if run is None:
            run = self.seen[run_id] = RunSeen(run_id)
            # Those that ended or started long ago; not the new one, which has no times yet.
            self._bound(
                self.seen,
                lambda other: (
                    other is run,
                    other.running,
                    (other.view and other.view.ended_ms) or other.started_ms,
                ),
            )
        return run

    @property
    def runs(self) -> Sequence[RunView]:
        """The newest view of each run, the first started first."""
        views = [run.view for run in self.seen.values() if run.view is not None]
        return sorted(views, key=lambda view: view.started_ms)

    @property
    def issues(self) -> Sequence[IssueFiring]:
        """In order of occurrence, each in its newest state, but with the highest severity that it
        had and where it first began.
        """
        return sorted(
            self._issues.values(), key=lambda issue: (issue.onset_ms, issue.first_step or 0)
        )

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """Each in its newest state, the first created first."""
        return sorted(self._deliveries.values(), key=lambda delivery: delivery.created_ms)

    @property
    def refused(self) -> Sequence[ConfigurationRefused]:
        """The configurations that workers refuse now, by worker."""
        return sorted(self._refused.values(), key=lambda one: one.worker)

    def since(self, at_ms: int) -> RunsView:
        """The runs, issues and deliveries that changed at that time (Unix milliseconds) or later.

        Commands stay all: they explain stops; so does what workers refuse. An issue keeps all its
        states and answers.
        """
        found = RunsView(self.run_id, limit=self._limit)
        found._refused = dict(self._refused)
        found.unread, found.commands = self.unread, dict(self.commands)
        for run_id, run in self.seen.items():
            if run.changed_ms >= at_ms:
                found.seen[run_id] = run
        for issue_id, issue in self._issues.items():
            if self.changed_ms(issue) >= at_ms:
                found._issues[issue_id] = issue
                found._states[issue_id] = self._states[issue_id]
        found._feedback = {
            name: self._feedback[name] for name in found._issues.keys() & self._feedback.keys()
        }
        for key, delivery in self._deliveries.items():
            if delivery.updated_ms >= at_ms:
                found._deliveries[key] = delivery
        return found

    def fold(self, other: RunsView) -> None:
        """Add what another view knows, one of an archive; of each thing the newer state counts."""
        for seen in other.seen.values():
            for view in seen.views.values():
                self._run(seen.run_id).add_view(
                    view, append_ms=seen.view_ms, as_of_ms=seen.as_of_ms
                )
        for issue_id, issue in other._issues.items():
            own = self._issues.get(issue_id)
            if own is None or own.at_ms < issue.at_ms:
                self._issues[issue_id] = issue
            states = {**other._states[issue_id], **self._states.get(issue_id, {})}
            ordered = sorted(states, key=lambda state: state.at_ms)
            self._states[issue_id] = dict.fromkeys(ordered)
        for issue_id, given in other._feedback.items():
            self._feedback[issue_id] = {**given, **self._feedback.get(issue_id, {})}
        for key, delivery in other._deliveries.items():
            known = self._deliveries.get(key)
            if known is None or known.rank < delivery.rank:
                self._deliveries[key] = delivery
        for command_id, command in other.commands.items():
            self.commands.setdefault(command_id, command)
        self._refused = {**other._refused, **self._refused}

    def changed_ms(self, issue: IssueFiring) -> int:
        """When its newest state was decided or a person answered it last, Unix milliseconds."""
        answers = self._feedback.get(issue.issue_id, {}).values()
        return max(issue.at_ms, issue.onset_ms, *(answer.at_ms for answer in answers))

    def run(self, run_id: str) -> RunView | None:
        """The newest view of that run."""
        return self.seen[run_id].view if run_id in self.seen else None

    def deliveries_of(self, issue_id: str) -> Sequence[Delivery]:
        """The deliveries of an issue, the oldest first."""
        found = (one for one in self._deliveries.values() if one.issue_id == issue_id)
        return sorted(found, key=lambda delivery: delivery.created_ms)

    def delivery(self, key: str) -> Delivery | None:
        """The newest state of the delivery with that key."""
        return self._deliveries.get(key)

    def issue(self, issue_id: str) -> IssueFiring | None:
        """The issue with that id, as `issues` has it."""
        return self._issues.get(issue_id)

    def states(self, issue_id: str) -> Sequence[StateSeen]:
        """All states of that issue, in the order in which they came."""
        return list(self._states.get(issue_id, ()))

    def feedback(self, issue_id: str) -> Sequence[Feedback]:
        """What people answered to that issue, in the order in which it came."""
        return list(self._feedback.get(issue_id, {}).values())

    def verdict(self, issue: IssueFiring) -> Feedback | None:
        """What people answered last to an issue; None if nobody has since it last fired."""
        given = self.feedback(issue.issue_id)
        return given[-1] if given and given[-1].issue.times >= issue.times else None

    def open(self, issue: IssueFiring) -> bool:
        """Whether neither its rule has resolved it, nor a person."""
        verdict = self.verdict(issue)
        return issue.state != "resolved" and not (verdict is not None and verdict.closes)

    def _wants(self, run_id: str) -> bool:
        return self.run_id in (None, run_id)

    def _bound(self, found: dict[K, V], age: Callable[[V], tuple[int, ...]]) -> list[K]:
        """Leave out the oldest, a tenth of them at once, when there are too many."""
        if self._limit is None or len(found) <= self._limit:
            return []
        oldest = sorted(found, key=lambda key: age(found[key]))[: self._limit // 10]
        for key in oldest:
            del found[key]
        return oldest
