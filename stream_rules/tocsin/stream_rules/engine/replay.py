"""Past telemetry through the engine: the same issues as live, and no side effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tocsin.bus.port import Record
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord


def replay(
    records: Iterable[Record],
    specs: Sequence[RuleSpec] | None = None,
    *,
    until_ms: int | None = None,
    engine: PartitionEngine | None = None,
) -> list[Reported]:
    """The issues, in the order in which they were decided.

    Records that cannot be used are passed over. Timers fire as far as records reach, and to
    `until_ms` (append time, Unix milliseconds) where that is given.

    Args:
        specs: the rule instances; by default all rules with their defaults.
        engine: one that has state already.
    """
    engine = engine or PartitionEngine(rule_specs() if specs is None else specs)
    reported: list[Reported] = []
    partitions: set[int] = set()
    for record in records:
        partitions.add(record.partition.number)
        try:
            reported += engine.apply(record)
        except UnusableRecord as error:
            reported += error.reported
    if until_ms is not None:
        for partition in sorted(partitions):
            reported += engine.tick(partition, until_ms, since_ms=0)
    return reported
