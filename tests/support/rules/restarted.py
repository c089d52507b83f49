"""A run whose worker is replaced in its middle, with the states that the first one has saved."""

from __future__ import annotations

from collections.abc import Sequence

from tocsin.bus.port import Record
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay


def half_way(records: Sequence[Record], specs: tuple[RuleSpec, ...]) -> list[IssueFiring]:
    """What is found if another worker goes on in the middle of the records."""
    cut = len(records) // 2
    first = PartitionEngine(specs)
    told = replay(records[:cut], engine=first)
    ((number, state, engine),) = first.runs()
    saved = engine.snapshots(next_offset=state.next_offset, clock_ms=state.clock_ms, software="")
    second = PartitionEngine(specs)
    second.adopt(
        number, engine.state.run_id, {s.rule: s for s in saved}, next_offset=state.next_offset
    )
    return [one.issue for one in (*told, *replay(records[cut:], engine=second))]
