"""A launcher's view of its own run: what rules and actions have put on the bus about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tocsin.bus.port import LATEST, From, Partition, Reader, Record, RunBus
from tocsin.schemas.records.configurations import WORKERS_PARTITION, ConfigurationRefused
from tocsin.schemas.records.deliveries import REPEAT, Delivery
from tocsin.schemas.records.issues import Issue, IssueFiring, IssueOngoing
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import CaptureFigures
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.records.wire import event_data
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

UNANSWERED_MS: Final = 3_000
"""An issue without a delivery this long after it was read has none to come, milliseconds."""

OVER: Final = frozenset({"ended", "lost"})


@dataclass(frozen=True, slots=True)
class _Read:
    """A state of an issue that was news, and when it was read."""

    issue: Issue
    at_ms: int

    @property
    def answerable(self) -> bool:
        """Whether there may be a delivery for it: a notice or a stop."""
        if isinstance(self.issue, IssueOngoing):
            return self.issue.raised_from is not None or self.issue.stop_released
        return self.issue.state == "firing" or not self.issue.muted

    def repeats(self, issue: Issue) -> bool:
        mine = self.issue
        return (mine.state, mine.severity, mine.times) == (
            issue.state,
            issue.severity,
            issue.times,
        )


class OwnRun:
    """What was read so far. Pure: records in, news out."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.view = RunsView(run_id)
        self._newest: dict[str, _Read] = {}

    @property
    def views(self) -> Mapping[str, RunView]:
        """The newest view of each incarnation of the job that has one."""
        seen = self.view.seen.get(self._run_id)
        return {} if seen is None else seen.views

    def apply(
        self, record: Record, incarnations: AbstractSet[str], now_ms: int
    ) -> Issue | Delivery | RunView | ConfigurationRefused | None:
        """Fold in a record of any of the topics; its data if it is news of this job."""
        data = event_data(record)
        if isinstance(data, ConfigurationRefused):
            return data if data.is_of_run(self._run_id) else None
        if not isinstance(data, IssueFiring | Delivery | RunView) or data.run_id != self._run_id:
            return None
        if data.incarnation not in incarnations:
            return None
        before = self.view.delivery(data.key) if isinstance(data, Delivery) else None
        self.view.add(data, append_ms=record.append_ms)
        if isinstance(data, RunView):
            return data if self.views[data.incarnation] is data else None
        if isinstance(data, Delivery):
            return None if before is not None and before.state == data.state else data
        found = self._newest.get(data.issue_id)
        if found is not None and found.repeats(data):
            return None
        self._newest[data.issue_id] = _Read(data, now_ms)
        return data

    def ended(self, incarnation: str) -> bool:
        """Whether the rules have seen the end of that incarnation."""
        view = self.views.get(incarnation)
        # Rules in a process of their own may come to the end later than the others.
        return view is not None and view.state in OVER and "in_progress" not in view.rules.values()

    def open_deliveries(self) -> list[Delivery]:
        """The deliveries without a final state. Without repeats: nobody waits for these."""
        return [one for one in self.view.deliveries if not one.final and one.occasion != REPEAT]

    def settled(self, incarnation: str, now_ms: int) -> bool:
        """Whether nothing more is to be expected about that incarnation."""
        if not self.ended(incarnation) or self.open_deliveries():
            return False
        answered = {
            (delivery.issue_id, delivery.issue_times, delivery.issue_state)
            for delivery in self.view.deliveries
        }
        return all(
            not read.answerable
            or now_ms - read.at_ms > UNANSWERED_MS
            or (issue_id, read.issue.times, read.issue.state) in answered
            for issue_id, read in self._newest.items()
        )

    def steps(self) -> int:
        """Steps over all incarnations of this job, as the rules have counted."""
        return sum(view.last_step + 1 for view in self.views.values() if view.last_step is not None)

    def judged_steps(self, incarnation: str, steps: int) -> int:
        """How many of a job's `steps` the rules have seen; all, once they have seen its end."""
        return steps if self.ended(incarnation) else min(self.steps(), steps)

    @property
    def newest(self) -> RunView | None:
        """The view of the newest incarnation that has one."""
        # Several trainings of one job have started with it.
        return max(
            self.views.values(), key=lambda view: (view.started_ms, view.next_offset), default=None
        )

    def rules(self) -> Mapping[str, str]:
        """Rule -> status, of the newest incarnation that has a view."""
        return {} if self.newest is None else dict(self.newest.rules)

    def capture(self) -> CaptureFigures | None:
        """Over all incarnations; see `CaptureFigures.joined`."""
        return CaptureFigures.joined(
            view.capture for view in self.views.values() if view.capture is not None
        )


def partitions_of(topics: Topics, run_id: str, *, helped: bool) -> tuple[Partition, ...]:
    """Where runs, issues and actions hold what is about this run.

    `helped`: it has a helper, which may refuse a configuration.
    """
    few = issue_partition(run_id)
    about = (
        Partition(topics.runs, telemetry_partition(run_id)),
        Partition(topics.issues, few),
        Partition(topics.actions, few),
    )
    return (*about, Partition(topics.control, WORKERS_PARTITION)) if helped else about


async def open_reader(bus: RunBus, partitions: Sequence[Partition]) -> Reader:
    """A reader of what is appended there from now on. Raises what `bus.reader` does."""
    reader = await bus.reader(dict.fromkeys(partitions, LATEST))
    # The end is pinned now: a reader may look it up only when it polls first.
    for partition, end in (await reader.ends(partitions)).items():
        await reader.seek(partition, From.offset(end))
    return reader
