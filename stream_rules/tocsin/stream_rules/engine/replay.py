"""Past telemetry through the engine: the same issues as live, and no side effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tocsin.bus.port import Record
from tocsin.schemas.errors import RecordError
from tocsin.stream_rules.engine.episodes import Told
from tocsin.stream_rules.engine.partitions import Engine, UnusableRecord
from tocsin.stream_rules.engine.specs import RuleSpec, rule_specs


def replay(
    records: Iterable[Record],
    specs: Sequence[RuleSpec] | None = None,
    *,
    until_ms: int | None = None,
    engine: Engine | None = None,
) -> list[Told]:
    """The issues, in the order in which they were decided.

    Records that cannot be used are passed over. Timers fire as far as records reach, and to
    `until_ms` (append time, Unix milliseconds) where that is given.

    Args:
        specs: the rule instances; by default all rules with their defaults.
        engine: one that has state already.
    """
    engine = engine or Engine(rule_specs() if specs is None else specs)
    told: list[Told] = []
    partitions: set[int] = set()
    for record in records:
        partitions.add(record.partition.number)
        try:
            told += engine.apply(record)
        except UnusableRecord as error:
            told += error.told
        except RecordError:
            continue
    if until_ms is not None:
        for partition in sorted(partitions):
            told += engine.tick(partition, until_ms, since_ms=0)
    return told
