"""From records of a bus to what is archived of them. Pure."""

from __future__ import annotations

from tocsin.bus.port import Record
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.store.archive.batch import Taken
from tocsin.store.manifest import Family


def topics_of(topics: Topics, family: Family) -> tuple[str, ...]:
    """The topics of a family; all have the same number of partitions."""
    if family == "telemetry":
        return topics.telemetry, topics.runs
    return topics.issues, topics.actions, topics.control


def read_record(record: Record, family: Family) -> tuple[str, Taken] | None:
    """The run and what is archived; None for what is of no run, and for tombstones.

    Raises:
        RecordError: the record cannot be read, or is in the partition of another run.
    """
    if record.value is None:
        return None
    meta = read_meta(record.headers)
    value = decode(meta, record.value)
    if isinstance(value, Snapshot):
        return None
    run_id = getattr(value.data, "run_id", None) if isinstance(value, Event) else None
    if not isinstance(value, Event):
        run_id = value.origin.run_id
    if not isinstance(run_id, str) or not run_id:
        return None
    place = telemetry_partition if family == "telemetry" else issue_partition
    if place(run_id) != record.partition.number:
        # Its offsets would be taken for those of the run's own partition.
        raise MalformedRecord(
            f"a record of run {run_id!r} in partition {record.partition.number}, which is not its"
        )
    taken = Taken(
        topic=record.partition.topic,
        offset=record.offset,
        append_ms=record.append_ms,
        meta=meta,
        value=value,
        key=record.key.decode(errors="replace"),
        event=record.value.decode(errors="replace") if isinstance(value, Event) else None,
        size_bytes=len(record.value),
    )
    return run_id, taken
