"""A launcher's view of its own run: what rules and actions have put on the bus about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from tocsin.bus.port import LATEST, Bus, From, Partition, Reader, Record
from tocsin.schemas.deliveries import Delivery
from tocsin.schemas.errors import RecordError
from tocsin.schemas.events import Data, Event
from tocsin.schemas.issues import Issue, IssueFiring
from tocsin.schemas.runs import CaptureFigures, RunView
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.schemas.wire import decode, read_meta

logger = logging.getLogger(__name__)

UNANSWERED_MS: Final = 3_000
"""An issue without a delivery this long after it was read has none to come, milliseconds."""

OVER: Final = frozenset({"ended", "lost"})


class OwnRun:
    """What was read so far. Pure: records in, news out."""

    def __init__(self, run_id: str) -> None:
        self.issues: dict[str, Issue] = {}
        self.deliveries: dict[str, Delivery] = {}
        self.views: dict[str, RunView] = {}
        self._run_id = run_id
        self._first_read_ms: dict[str, int] = {}

    def apply(
        self, record: Record, incarnations: AbstractSet[str], now_ms: int
    ) -> Issue | Delivery | RunView | None:
        """Take a record of any of the three topics; what it says if it is news of this job."""
        data = _event_data(record)
        if not isinstance(data, IssueFiring | Delivery | RunView) or data.run_id != self._run_id:
            return None
        if data.incarnation not in incarnations:
            return None
        if isinstance(data, RunView):
            known = self.views.get(data.incarnation)
            if known is not None and known.next_offset > data.next_offset:
                return None
            self.views[data.incarnation] = data
            return data
        if isinstance(data, Delivery):
            before = self.deliveries.get(data.key)
            self.deliveries[data.key] = data
            return None if before is not None and before.state == data.state else data
        found = self.issues.get(data.issue_id)
        self.issues[data.issue_id] = data
        self._first_read_ms.setdefault(data.issue_id, now_ms)
        if found is None or (found.state, found.severity) != (data.state, data.severity):
            return data
        return None

    def ended(self, incarnation: str) -> bool:
        """Whether the rules have seen the end of that incarnation."""
        view = self.views.get(incarnation)
        # Rules in a process of their own may come to the end later than the others.
        return view is not None and view.state in OVER and "in_progress" not in view.rules.values()

    def open_deliveries(self) -> list[Delivery]:
        """Those that are not in a final state."""
        return [delivery for delivery in self.deliveries.values() if not delivery.final]

    def settled(self, incarnation: str, now_ms: int) -> bool:
        """Whether nothing more is to be expected about that incarnation."""
        if not self.ended(incarnation) or self.open_deliveries():
            return False
        answered = {delivery.issue_id for delivery in self.deliveries.values()}
        return all(
            issue_id in answered or now_ms - read_ms > UNANSWERED_MS
            for issue_id, read_ms in self._first_read_ms.items()
        )

    def steps(self) -> int:
        """Steps over all incarnations of this job, as the rules have counted."""
        return sum(view.last_step + 1 for view in self.views.values() if view.last_step is not None)

    def rules(self) -> Mapping[str, str]:
        """Rule -> status, of the newest incarnation that has a view."""
        newest = max(self.views.values(), key=lambda view: view.started_ms, default=None)
        return {} if newest is None else dict(newest.rules)

    def capture(self) -> CaptureFigures | None:
        """Over all incarnations; see `CaptureFigures.joined`."""
        return CaptureFigures.joined(
            view.capture for view in self.views.values() if view.capture is not None
        )


def partitions_of(topics: Topics, run_id: str) -> tuple[Partition, Partition, Partition]:
    """Where runs, issues and actions hold what is about this run."""
    few = issue_partition(run_id)
    return (
        Partition(topics.runs, telemetry_partition(run_id)),
        Partition(topics.issues, few),
        Partition(topics.actions, few),
    )


async def open_reader(bus: Bus, topics: Topics, run_id: str) -> Reader:
    """A reader of what is appended from now on. Raises what `bus.reader` does."""
    partitions = partitions_of(topics, run_id)
    reader = await bus.reader(dict.fromkeys(partitions, LATEST))
    # The end is pinned now: a reader may look it up only when it polls first.
    for partition, end in (await reader.ends(partitions)).items():
        await reader.seek(partition, From.offset(end))
    return reader


def _event_data(record: Record) -> Data | None:
    if record.value is None:
        return None
    try:
        decoded = decode(read_meta(record.headers), record.value)
    except RecordError:
        logger.debug("a record was left aside", exc_info=True)
        return None
    return decoded.data if isinstance(decoded, Event) else None
