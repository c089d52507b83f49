"""What the bus knows about the issue of a link: its newest state, its stops, and used links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tocsin.actions.decision.planned import STOP
from tocsin.bus.port import Bus, Partition, Record
from tocsin.console.views.bus_view import read_all
from tocsin.schemas.errors import RecordError
from tocsin.schemas.links import Link, LinkVerb
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.silences import SILENCES
from tocsin.schemas.records.wire import read_event
from tocsin.schemas.topics import Topics, issue_partition

ON_ISSUES: tuple[LinkVerb, ...] = ("ack", "resolve", "false-alarm", "silence")


@dataclass(slots=True)
class Case:
    """An issue, as a page shows it.

    Attributes:
        issue: its newest state; None: it is not on the bus.
        answers: what people have answered, the oldest first.
        stops: its stops by delivery id.
        events: the ids of the events by which people have decided something.
    """

    issue: IssueFiring | None = None
    answers: list[Feedback] = field(default_factory=list)
    stops: dict[str, Delivery] = field(default_factory=dict)
    events: set[str] = field(default_factory=set)

    def waiting(self) -> Sequence[Delivery]:
        """The stops that wait for people."""
        return [stop for stop in self.stops.values() if stop.waits_for_people]

    def buttons(self, opened: Link) -> Iterator[Link]:
        """What can be answered on the page of a link, each as a link of its own."""
        links = [
            self._link(opened, verb, stop.delivery_id)
            for stop in self.waiting()
            for verb in ("approve", "reject")
        ]
        links += [self._link(opened, verb) for verb in ON_ISSUES]
        return (link for link in links if self.why_not(link) is None)

    def why_not(self, link: Link) -> str | None:
        """Why a button cannot be used (any more); None: it can."""
        if self.issue is None:
            return "The issue of this link is not on the bus."
        if link.use_id in self.events:
            return "This answer was given already; a link counts once."
        if link.verb in ("approve", "reject"):
            stop = self.stops.get(link.stop_id)
            if stop is None or not stop.waits_for_people or stop.approval is None:
                return "The stop does not wait for an answer any more."
            if link.verb == "approve" and link.person in stop.approval.by:
                return "This link has approved the stop already; a link counts once."
        return None

    def apply(self, record: Record, link: Link) -> None:
        """Take a record of the run's partitions in."""
        if record.value is None or not _concerns(record.key, link):
            return
        with suppress(RecordError):
            event = read_event(record)
            if event is None:
                return
            data = event.data
            if isinstance(data, Feedback):
                if data.issue.issue_id == link.issue_id:
                    self.events.add(event.id)
                    self.answers.append(data)
            elif isinstance(data, IssueFiring):
                if data.issue_id == link.issue_id and data.incarnation == link.incarnation:
                    self.issue = data
            elif isinstance(data, Delivery):
                if data.kind == STOP and data.incarnation == link.incarnation:
                    self.stops[data.delivery_id] = data
            else:
                self.events.add(event.id)

    def _link(self, opened: Link, verb: LinkVerb, stop_id: str = "") -> Link:
        return Link(
            verb=verb,
            run_id=opened.run_id,
            incarnation=opened.incarnation,
            issue_id=opened.issue_id,
            person=opened.person,
            until_ms=opened.until_ms,
            stop_id=stop_id,
        )


async def read_case(bus: Bus, topics: Topics, link: Link) -> Case:
    """Read what is known now.

    Raises:
        BusUnavailable: the bus does not answer.
    """
    number = issue_partition(link.run_id)
    case = Case()
    partitions = [
        Partition(name, number) for name in (topics.issues, topics.actions, topics.control)
    ]
    async for record in read_all(bus, partitions):
        case.apply(record, link)
    return case


def _concerns(key: bytes, link: Link) -> bool:
    """Whether a record may be about a link's issue: most are not, and need not be decoded."""
    run = link.run_id.encode()
    return key == run or key.startswith(
        (run + b"/", f"{link.issue_id}/{STOP}".encode(), SILENCES.encode())
    )
