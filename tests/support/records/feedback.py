"""An issue on a bus, for those who answer to it."""

from __future__ import annotations

from support.records.issues import issue, issue_record
from tocsin.bus.port import Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.schemas.topics import issue_partition


async def publish_issue(context: CommandContext, run_id: str = "run-1") -> None:
    """Set the bus up, with one issue of that run."""
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        sent = issue_record(issue(run_id))
        producer = await bus.producer()
        partition = Partition(context.topics.issues, issue_partition(run_id))
        await producer.publish([Outgoing(partition, sent.key, sent.value, sent.headers)])
        await producer.close()
