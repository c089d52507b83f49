"""Whether the incarnation before this one was stopped, and why: asked before a job is started.

A restart loop starts a job again that was stopped for a reason. The job gets the reason, and does
not start where the configuration forbids it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tocsin.bus.port import EARLIEST, Partition, RunBus
from tocsin.bus.reading import read_to_end
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.text import plain_line
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

_STOPPED: Final = frozenset({"left", "escalated", "exited"})


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The newest incarnation of a run that was stopped, and the reason of its stop."""

    incarnation: str
    reason: str

    @property
    def line(self) -> str:
        """What the person at the terminal reads."""
        return f"this run was stopped before: {self.reason}"

    def held(self, another: str) -> str:
        """The same, where it is not started again; `another` names what to start it under."""
        return (
            f"{self.line}; it is not started again (stop.on_restart: hold). Start it under another "
            f"{another}, or set stop.on_restart to go_on"
        )


async def stopped_before(bus: RunBus, topics: Topics, run_id: str) -> Predecessor | None:
    """The incarnation before, if a stop ended it. Reads two partitions of compacted topics.

    Raises BusError.
    """
    views = Partition(topics.runs, telemetry_partition(run_id))
    commands = Partition(topics.control, issue_partition(run_id))
    reader = await bus.reader({views: EARLIEST, commands: EARLIEST})
    newest: RunView | None = None
    reasons: dict[str, str] = {}
    try:
        ends = await reader.ends([views, commands])
        async for records in read_to_end(reader, ends):
            for record in records:
                about = record.key.decode(errors="replace")
                if record.value is None or about.partition("/")[0] != run_id:
                    continue
                try:
                    data = EVENT_TYPES.decode(record.value).data
                except RecordError:
                    continue
                if isinstance(data, RunView):
                    newest = data
                elif isinstance(data, StopRequested):
                    reasons[data.command_id] = data.reason
    finally:
        await reader.close()
    if newest is None or newest.stop is None or newest.stop.state not in _STOPPED:
        return None
    reason = reasons.get(newest.stop.command_id) or "the reason is not on the bus any more"
    return Predecessor(newest.incarnation, plain_line(reason))
