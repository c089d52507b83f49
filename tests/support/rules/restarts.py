"""A worker that is restarted again and again must say what one says that never was."""

from __future__ import annotations

from collections.abc import Sequence

from tocsin.bus.port import Record
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.engine.partitions import PartitionEngine


def told_with_restarts(
    records: Sequence[Record], specs: Sequence[RuleSpec], *, every: int
) -> list[str]:
    """The issues, as JSON, with a restart after each `every` records."""
    number, run_id = records[0].partition.number, records[0].key.decode()
    engine, told = PartitionEngine(specs), []
    for at, record in enumerate(records, 1):
        told += [one.issue.model_dump_json() for one in engine.apply(record)]
        run = engine.run(run_id)
        if at % every or run is None:
            continue
        saved = run.snapshots(next_offset=at, clock_ms=record.append_ms, software="")
        engine = PartitionEngine(specs)
        read = {one.rule: Snapshot.decode(one.encode()) for one in saved}
        engine.adopt(number, run_id, read, next_offset=at)
    return told
