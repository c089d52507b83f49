"""The bus port: what the rest of tocsin knows of a bus.

Two implementations stand behind it, `tocsin.bus.embedded.bus` (one SQLite file) and
`tocsin.bus.kafka.bus` (aiokafka); one contract suite in `tests/contract` runs over both. The bus
moves bytes: what a record means is none of its business.

All methods are coroutines of one event loop. None of them blocks the loop for longer than a few
milliseconds; each network wait has a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

from tocsin.schemas.errors import ConfigurationError, TocsinError, UnavailableError
from tocsin.schemas.topics import TopicSpec

Headers = tuple[tuple[str, bytes], ...]


RECORD_OVERHEAD: Final = 512
"""Bytes counted for a record beside its key, value and headers.

A Kafka batch of one incompressible record of 2 MiB adds about 150.
"""


MAX_POLL_BYTES: Final = 32 * 1024 * 1024
"""Of an embedded bus: a poll ends with the record whose value exceeds this, added up."""


class Partition(NamedTuple):
    """One partition of one topic."""

    topic: str
    number: int


FEW_HEADERS: Final = 5
"""As most records have, and one sender has the same on all of its: what is made of them is kept for
the next one. Those with more (dead letters hold what others have sent) are each looked at."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written. `value` None is a tombstone; the partition is always explicit."""

    partition: Partition
    key: bytes
    value: bytes | None
    headers: Headers = ()


def record_size(record: Outgoing | Record) -> int:
    """The bytes of a record as its topic's limit counts them: uncompressed, with its frame."""
    size = RECORD_OVERHEAD + len(record.key) + len(record.value or b"")
    return size + headers_size(record.headers)


def headers_size(headers: Headers) -> int:
    """The bytes of a record's headers."""
    return _repeated_size(headers) if len(headers) <= FEW_HEADERS else _headers_size(headers)


def _headers_size(headers: Headers) -> int:
    return sum(len(name) + len(value) for name, value in headers)


_repeated_size = lru_cache(maxsize=64)(_headers_size)


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read. `append_ms` is the bus's own append time (Unix, milliseconds)."""

    partition: Partition
    offset: int
    append_ms: int
    key: bytes
    value: bytes | None
    headers: Headers = ()

    def header(self, name: str) -> bytes | None:
        """The first header of that name, or None."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class From:
    """Where a reader begins: at an offset, at the first record appended at or after a time, or at
    an end.
    """

    kind: Literal["earliest", "latest", "offset", "time"]
    value: int = 0

    @classmethod
    def offset(cls, offset: int) -> From:
        """At this offset."""
        return cls("offset", offset)

    @classmethod
    def time(cls, append_ms: int) -> From:
        """At the first record whose append time is `append_ms` or later; at the end if there is
        none.
        """
        return cls("time", append_ms)


EARLIEST: Final = From("earliest")
LATEST: Final = From("latest")


class BusError(TocsinError):
    """The bus could not do what it was asked."""


class BusUnavailable(BusError, UnavailableError):
    """The bus does not answer now: try again later (a broker away, a disk full, a file locked)."""


class BusClosed(BusError):
    """The bus, or this part of it, was closed."""


class UnknownTopic(BusError, ConfigurationError):
    """A topic does not exist on this bus: `tocsin bus init` creates what is missing."""


class UnusableBus(BusError, ConfigurationError):
    """The bus cannot be opened as it is configured; the message says what to change."""


class MissingBus(UnusableBus):
    """The bus file does not exist, and this command creates none."""


class FencedMember(BusError):
    """This member is no longer in its group: drop the state, join again."""


class Writer(Protocol):
    """The writing side of a producer, for who needs no offsets."""

    async def publish(self, records: Sequence[Outgoing], /) -> object:
        """Append the records, in order per partition, and wait until they survive this process.

        Raises as `Producer.publish` does.
        """
        ...

    async def close(self) -> None:
        """Let go of resources. Bounded by 2 s."""
        ...


class Outlet(Protocol):
    """A bus, or the way to one, into which records go; open between `async with`."""

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableBus or BusUnavailable."""
        ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def init(self, specs: Sequence[TopicSpec]) -> object:
        """Create the topics that are missing, now or with the first record."""
        ...

    async def producer(self) -> Writer:
        """A new writer."""
        ...


class Producer(Protocol):
    """Writes records. Safe to be used by several tasks of one loop."""

    async def publish(self, records: Sequence[Outgoing], /) -> Sequence[int]:
        """Append the records, in order per partition, and wait until all are acknowledged
        (durable).

        Returns the offsets, in the order of `records`. A record may be there more than once after
        an error that was followed by a retry; readers drop repeats by id.

        Raises:
            RecordTooLarge: before anything is written. UnknownTopic, BusUnavailable, BusClosed.
        """
        ...

    async def close(self) -> None:
        """Let go of resources; a publish under way fails with BusClosed. Bounded by 2 s."""
        ...


class Reader(Protocol):
    """Reads partitions given by the caller; belongs to no group."""

    async def poll(self, *, timeout_s: float, max_records: int = 500) -> Sequence[Record]:
        """The next records, in order per partition; empty when none came within `timeout_s`.

        Returns as soon as there is one. Raises BusUnavailable, UnknownTopic, BusClosed; it may be
        called again after BusUnavailable and goes on where it was.
        """
        ...

    async def seek(self, partition: Partition, start: From) -> None:
        """Go on from `start` in that partition."""
        ...

    async def position(self, partition: Partition) -> int:
        """The offset of the next record that `poll` would return."""
        ...

    async def ends(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        """The offset that the next appended record will get, per partition: lag = end -
        position.
        """
        ...

    async def close(self) -> None:
        """Let go of resources. Bounded by 2 s."""
        ...


class RunBus(Outlet, Protocol):
    """A bus as the launcher or listener of one run uses it: it writes, and reads without groups."""

    @property
    def url(self) -> str:
        """As `Bus.url`."""
        ...

    @property
    def notice(self) -> str | None:
        """As `Bus.notice`."""
        ...

    async def reader(self, start: Mapping[Partition, From]) -> Reader:
        """As `Bus.reader`."""
        ...


class Consumer(Reader, Protocol):
    """A reader that keeps its place in a group's name."""

    def assigned(self) -> frozenset[Partition]:
        """The partitions that this member owns now."""
        ...

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Store, for the group, the offset of the next record to be read.

        Raises:
            FencedMember: the group has given a partition to another member.
        """
        ...

    async def committed(self, partition: Partition) -> int | None:
        """What the group stored last for that partition; None if nothing."""
        ...


class AssignmentListener(Protocol):
    """Told about changes of a member's partitions, from within `poll`."""

    async def on_revoked(self, partitions: frozenset[Partition]) -> None:
        """Called when partitions go to another member: the last chance to commit.

        May take up to 10 s.
        """
        ...

    async def on_assigned(self, partitions: frozenset[Partition]) -> None:
        """Called when partitions are owned; none of their records is read before this returns.

        `seek` is allowed. It may be cancelled, if the partitions are revoked meanwhile:
        `on_revoked` follows. None at all: those revoked before have gone to others.
        """
        ...


class Lease(Protocol):
    """A claim that lives as long as its holder; it ends by `release`, or some seconds after the
    holder died.
    """

    async def release(self) -> None:
        """Give it back now."""
        ...


@dataclass(frozen=True, slots=True)
class TopicState:
    """What a topic is like on the bus, beside what it should be like.

    `differs` holds sentences such as "retention.ms is 604800000, expected 86400000".
    """

    spec: TopicSpec
    exists: bool
    records: int
    size_bytes: int | None
    differs: tuple[str, ...] = ()


class Bus(Protocol):
    """One bus, open between `async with`."""

    @property
    def url(self) -> str:
        """How to reach it, without secrets: `embedded:PATH` or `kafka://HOST:PORT`."""
        ...

    @property
    def notice(self) -> str | None:
        """One line for a person, when the bus is not where one would look; None otherwise."""
        ...

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableBus or BusUnavailable."""
        ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def init(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Create the topics that are missing; never change one that exists. Returns their state
        afterwards.
        """
        ...

    async def show(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Compare the topics with what they should be. Creates nothing."""
        ...

    async def producer(self) -> Producer:
        """A new producer."""
        ...

    async def reader(self, start: Mapping[Partition, From]) -> Reader:
        """A reader of these partitions from these places. Raises UnknownTopic."""
        ...

    async def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        listener: AssignmentListener | None = None,
        only: Sequence[Partition] | None = None,
        member: str | None = None,
    ) -> Consumer:
        """A member of `group`, which begins at the committed offset, else at the earliest record.

        With `only` it takes exactly these partitions, without membership; the offsets are the
        group's anyway. With `member`, a name that nobody else in the group has, it is the
        same member after a restart: it does not leave when it is closed, and gets its partitions
        back if it is there again before the group takes it for dead. An embedded bus, where joining
        costs nothing, ignores it.
        """
        ...

    async def lease(self, name: str) -> Lease | None:
        """Claim `name`, or None while somebody else holds it. Always granted on Kafka, where nobody
        asks.
        """
        ...

    async def leased(self, name: str) -> bool:
        """Whether somebody who lives holds `name`. Never on Kafka."""
        ...
