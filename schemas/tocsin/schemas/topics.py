"""The seven topics: their names, keys, partitions and clean-up.

This is the one place where topic names, partition counts and retention are written down. The bus
is handed `TopicSpec`s; services ask `Topics(prefix)` for names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from tocsin.schemas.errors import ConfigurationError

MAX_RECORD_BYTES: Final = 2 * 1024 * 1024
"""`max.message.bytes` of each topic, and the producers' `max_request_size`."""

TELEMETRY_PARTITIONS: Final = 48
ISSUE_PARTITIONS: Final = 12
DLQ_PARTITIONS: Final = 6

ALL_RUNS: Final = "_all"
"""How keys of the control topic begin that are about all runs. No run can have this id."""

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS

STATE_KEEP_MS: Final = 14 * _DAY_MS
"""How long the states of a run stay after their last change, where nobody deletes them."""

VIEW_KEEP_MS: Final = 30 * _DAY_MS
"""How long the view of a run stays after its last change, by append time: as long as issues do."""

_PREFIX: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")

Cleanup = Literal["delete", "compact"]


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic must look like: `retention_ms` is for `delete`, `tombstone_ms` for `compact`.

    A `compact` topic of an embedded bus has `retention_ms`, too: how long a record stays that
    nobody replaces. There each run has workers of its own, which end with it and leave what they
    wrote; on Kafka a worker writes tombstones.
    """

    name: str
    partitions: int
    cleanup: Cleanup
    retention_ms: int | None = None
    tombstone_ms: int = _DAY_MS
    max_record_bytes: int = MAX_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one team (`bus.prefix`).

    Raises:
        ConfigurationError: the prefix is not lower-case letters, digits, '.', '_' and '-'.
    """

    prefix: str = "tocsin"

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigurationError(
                f"bus prefix {self.prefix!r}: expected at most 100 lower-case letters, digits, "
                "'.', '_' or '-' that start with a letter or digit, for example 'vision'"
            )

    @property
    def telemetry(self) -> str:
        """All that a run sends, acknowledgements of a stop included. Key: run_id."""
        return f"{self.prefix}.telemetry.v1"

    @property
    def state(self) -> str:
        """Rule snapshots with the offset that they cover. Key: run_id/rule instance."""
        return f"{self.prefix}.state.v1"

    @property
    def runs(self) -> str:
        """What a reader wants to know of a run. Key: run_id."""
        return f"{self.prefix}.runs.v1"

    @property
    def issues(self) -> str:
        """Issues and their later states: the product's output. Key: run_id."""
        return f"{self.prefix}.issues.v1"

    @property
    def actions(self) -> str:
        """The delivery ledger. Key: issue/action."""
        return f"{self.prefix}.actions.v1"

    @property
    def control(self) -> str:
        """Signed commands, key run/incarnation/stop, _all/silence/ID; unsigned: run/look_closer."""
        return f"{self.prefix}.control.v1"

    @property
    def dlq(self) -> str:
        """Dead letters: raw bytes untouched, and why. Key: the original's."""
        return f"{self.prefix}.dlq.v1"

    def specs(self) -> tuple[TopicSpec, ...]:
        """All seven, in the order of the way of the data."""
        return (
            TopicSpec(self.telemetry, TELEMETRY_PARTITIONS, "delete", retention_ms=_DAY_MS),
            TopicSpec(self.state, TELEMETRY_PARTITIONS, "compact", retention_ms=STATE_KEEP_MS),
            TopicSpec(self.runs, TELEMETRY_PARTITIONS, "compact", retention_ms=VIEW_KEEP_MS),
            TopicSpec(self.issues, ISSUE_PARTITIONS, "delete", retention_ms=30 * _DAY_MS),
            TopicSpec(self.actions, ISSUE_PARTITIONS, "compact"),
            TopicSpec(self.control, ISSUE_PARTITIONS, "compact", tombstone_ms=7 * _DAY_MS),
            TopicSpec(self.dlq, DLQ_PARTITIONS, "delete", retention_ms=14 * _DAY_MS),
        )


def telemetry_partition(run_id: str) -> int:
    """The partition of a run in telemetry, state and runs (0 … 47)."""
    return partition_for(run_id.encode(), TELEMETRY_PARTITIONS)


def issue_partition(run_id: str) -> int:
    """The partition of a run in issues, actions and control: the telemetry one modulo 12."""
    return telemetry_partition(run_id) % ISSUE_PARTITIONS


@lru_cache(maxsize=16_384)
def partition_for(key: bytes, partitions: int) -> int:
    """Kafka's default partitioner: positive murmur2 of the key, modulo the partition count."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """32-bit MurmurHash2 with Kafka's seed, as an unsigned number (`Utils.murmur2` of Kafka)."""
    mask, m, length = 0xFFFFFFFF, 0x5BD1E995, len(data)
    h = 0x9747B28C ^ length
    for i in range(0, length - length % 4, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    tail = data[length - length % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)
