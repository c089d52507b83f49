"""What a worker drives: a `Service`, a pure core that is given records and the time.

Order of a round, always under the worker's lock and all in one thread of its own unless said
otherwise: `apply`, `outputs`; at a checkpoint then `snapshots`, `committable`, and on the event
loop `checkpointed`. A partition's life: `restore` (0 or more times), `restored`, rounds, `release`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime.leased_runs import HoldLimit, Skip
from tocsin.runtime.second_reader import ReadAgain, SecondReading
from tocsin.schemas.errors import RecordError, TocsinError


class StartOver(TocsinError):
    """A service had to leave records out. It can take them now: all that is not committed is read
    again."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A record that the service cannot use, and why. It goes to the dead letters."""

    record: Record
    error: RecordError


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All records that were appended before `as_of_ms` have been applied. Unix milliseconds.

    `since_ms` is when that could first be reported since the partition was assigned to this worker.
    """

    as_of_ms: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of a round, and what is known of the input partitions, by number.

    Timers may fire for `owned` partitions only. `caught_up` is filled when a timer was due
    (`next_due_ms`), with the partitions that have no lag. `was_away`: the records of this round are
    the first since the bus did not answer. `lag_ms`: how old the oldest of them was when it was
    read, by the bus's clock as far as it is known; None: there is none.
    """

    now_ms: int
    owned: frozenset[int] = frozenset()
    caught_up: Mapping[int, CaughtUp] = field(default_factory=dict)
    was_away: bool = False
    lag_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a service may know of its worker.

    Attributes:
        nudge: asks for a round soon, from any thread.
        only_runs: the runs that are served; None: all.
        skip: whether somebody else serves a run now. A coroutine of the worker's event loop.
    """

    nudge: Callable[[], None]
    only_runs: frozenset[str] | None = None
    skip: Skip | None = None


class Service(Protocol):
    """Inherit from it explicitly: the methods with a body here are optional.

    An exception other than those named is a bug; it stops the worker.
    """

    name: str
    """For logs, metrics, dead letters and the group's name: `rules`, `actions`."""

    inputs: Sequence[str]
    """Topics read through the group; all have the same number of partitions."""

    restores: Sequence[str]
    """Topics whose partition of the same number is read whole when an input partition comes."""

    read_ahead: Sequence[str] = ()
    """Those of the topics restored and followed of which only one record of each key counts
    (`order_of`): a worker that stands by reads the partitions of others before they come."""

    holds_skipped: bool = False
    """Whether records of a run that is somebody else's now are kept, and given to `apply` when it
    is so no more; otherwise they are dropped."""

    hold_limit: HoldLimit | None = None
    """How much is kept of these; None: all."""

    bus_time: bool = False
    """Whether its timers are in append time; otherwise they are in the worker's."""

    keeps_state: bool = True
    """Whether it has `snapshots`; else a checkpoint does without them."""

    def attached(self, to: Attachment) -> None:
        """Called once, before anything else."""
        return None

    def order_of(self, record: Record) -> int:
        """Which of the records of one key counts, on a topic that is read ahead: that with the
        highest order, of equals the last. A tombstone removes those before it, and is not asked
        for. Below 0: it cannot be read. From the event loop's thread; pure, some microseconds."""
        return record.offset

    def follows(self, partition: int) -> Sequence[Partition]:
        """Partitions read from their beginning and then for ever, beside the input's, without a
        group. What is there at the assignment comes through `restore`, the rest through `apply`;
        of an input's topic, which may be anybody's partition, through `consult`."""
        return ()

    def restore(self, partition: int, records: Sequence[Record]) -> None:
        """Records of the topics restored and followed, for input partition `partition`, in order.

        Of several snapshots of one key the one with the highest `next_offset` counts, not the last.
        A record that cannot be read is skipped, with a warning. With `only_runs`, those of state
        and runs are of these runs alone; of the ledger, whose keys do not say it, they are not.
        """
        return None

    def restored(self, partition: int, next_offset: int | None) -> None:
        """All was read; the group's committed offset is `next_offset` (None: nothing yet)."""
        return None

    def release(self, partitions: Collection[int]) -> None:
        """Drop the state of partitions that another worker owns now."""
        return None

    def lost(self, runs: Collection[str]) -> None:
        """Somebody else serves these runs from now on, which were served here: drop them, and keep
        their states for the case that they come back. All their records so far were applied."""
        return None

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        """Take the records in, in order per partition, and fire the timers that are due.

        Returns those that cannot be used; it must have gone on after them. Pure but for the
        service's own state; a second at most.
        """
        ...

    def consult(self, records: Sequence[Record]) -> None:
        """Records of an input's topic that are followed: to know, not to be worked on. Before
        `apply`; one of the service's own partitions comes to both."""
        return None

    def second_reading(self) -> SecondReading:
        """Which partitions are to be read a second time, for what `apply` has passed over. Of those
        that are not owned nothing is read."""
        return SecondReading()

    def read_again(self, again: ReadAgain) -> None:
        """This was; the next `apply` works on it."""
        return None

    def outputs(self) -> Sequence[Outgoing]:
        """What `apply` has found since the last call, and `snapshots` with `force`: acknowledged by
        the bus before anything else is written. Any output brings a checkpoint at once."""
        return ()

    def snapshots(self, *, force: bool) -> Sequence[Outgoing]:
        """The states that have changed since their last snapshot, each with the offset it covers.

        `force`: before partitions are given up. Otherwise one may be put off, as long as
        `committable` holds the offset back, and StartOver may be raised: all partitions are then
        released and read again from what is committed.
        """
        return ()

    def committable(self, partition: Partition, next_offset: int) -> int:
        """The offset that may be committed: `next_offset`, or less to read from there again after
        a crash."""
        return next_offset

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint should come now rather than at the end of its interval."""
        return False

    def next_due_ms(self) -> int | None:
        """When `apply` must be called even if no record comes (Unix milliseconds; see `bus_time`);
        None: never."""
        return None

    def settled(self) -> bool:
        """Whether all that `apply` was given has been dealt with; a service that gives work away
        says False until it is back. From the event loop's thread; must not block."""
        return True

    async def checkpointed(self, now_ms: int) -> None:
        """On the event loop, in each checkpoint: what was handed out is on the bus. Short.

        Snapshots and offsets follow, so what has led to it may be read again.
        `now_ms` may be long after that of the last `apply`, if the bus was away meanwhile.
        Not called after the checkpoint before partitions are given up, nor after the last.
        """
        return None

    def last_words(self) -> Sequence[Outgoing]:
        """What keeps the next worker from hanging where this one does, before its process is ended;
        the service is not used any more. From a thread of the watchdog, while a call into the
        service does not return; may take some seconds."""
        return ()

    async def ended(self) -> None:
        """On the event loop, when the worker ends, whatever ended it. 5 s at most."""
        return None
