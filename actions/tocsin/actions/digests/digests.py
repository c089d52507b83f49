"""Digests from the moment they are due until they are in the ledger.

The ledger holds which were decided: a digest is decided once, by the worker that has its partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from tocsin.actions.decision.planned import Held
from tocsin.actions.digests.intervals import (
    ALL_RUNS,
    DigestReceiver,
    DueDigest,
    digest_entry,
    why_not_sent,
)
from tocsin.bus.port import BusError
from tocsin.runtime.leased_runs import Skip
from tocsin.runtime.service import Attachment
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.digests import Digest

logger = logging.getLogger(__name__)

_AGAIN_MS: Final = 60_000
"""After a bus that could not be read."""

ReadDigest = Callable[[DueDigest, Skip | None], Awaitable[Digest]]
"""Reads what is in a digest, without runs that somebody else serves. Raises BusError: the bus is
away."""


class Digests:
    """Has them read in tasks of the event loop; all else is for the worker's thread.

    Args:
        read: None: there are none.
        knows: whether the ledger has an entry with that id.
        unreachable: why a receiver gets nothing; None if it does.
        held: what holds notices to a receiver now.

    Attributes:
        receivers: who gets digests.
    """

    def __init__(
        self,
        receivers: Mapping[str, DigestReceiver],
        read: ReadDigest | None,
        *,
        knows: Callable[[str], bool],
        unreachable: Callable[[str], str | None],
        held: Callable[[str, int], Held | None],
    ) -> None:
        self.receivers = receivers
        self._read = read
        self._runs: Sequence[str] = (ALL_RUNS,)
        self._skip: Skip | None = None
        self._nudge: Callable[[], None] = lambda: None
        self._knows = knows
        self._unreachable = unreachable
        self._held = held
        self._now_ms = 0
        self._not_before_ms = 0
        self._wanted: Sequence[DueDigest] = ()
        self._found: deque[tuple[DueDigest, Digest]] = deque()
        self._reading: dict[DueDigest, asyncio.Task[None]] = {}

    def attached(self, to: Attachment) -> None:
        """Called once, before anything else. A service for some runs alone sends a digest of
        each."""
        self._nudge, self._skip = to.nudge, to.skip
        if to.only_runs is not None:
            self._runs = sorted(to.only_runs)

    def settled(self, now_ms: int, owned: Collection[int]) -> Iterator[tuple[Delivery, str | None]]:
        """The entries of those that were read, each with why it is not sent; then looks which are
        due. To be written one by one."""
        while self._found:
            due, digest = self._found.popleft()
            to = self.receivers.get(due.receiver)
            if to is not None and due.partition in owned and not self._knows(due.delivery_id):
                held = self._held(due.receiver, now_ms)
                why_not = why_not_sent(digest, self._unreachable(due.receiver), held)
                yield digest_entry(due, digest, to, held, now_ms), why_not
        self._now_ms, self._wanted = now_ms, ()
        if self._read is not None and now_ms >= self._not_before_ms:
            last = (
                DueDigest.last(name, run, to.every_ms, now_ms)
                for run in self._runs
                for name, to in self.receivers.items()
            )
            self._wanted = [
                due
                for due in last
                if due.partition in owned
                and due not in self._reading
                and not self._knows(due.delivery_id)
            ]

    @property
    def wanted(self) -> bool:
        """Whether `start` has something to do."""
        return bool(self._wanted)

    def next_due_ms(self) -> int | None:
        """When `settled` is to be called again; None: at any time."""
        if self._read is None or not self.receivers:
            return None
        lengths = [to.every_ms for to in self.receivers.values()]
        due_ms = min((self._now_ms // every_ms + 1) * every_ms for every_ms in lengths)
        return min(due_ms, self._not_before_ms) if self._not_before_ms > self._now_ms else due_ms

    def start(self) -> None:
        """Read those that are due; in the event loop."""
        wanted, self._wanted = self._wanted, ()
        for due in wanted:
            name = f"tocsin-digest-{due.receiver}"
            self._reading[due] = asyncio.create_task(self._collect(due), name=name)

    async def close(self) -> None:
        """Cut off what is being read."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _collect(self, due: DueDigest) -> None:
        assert self._read is not None
        try:
            self._found.append((due, await self._read(due, self._skip)))
        except BusError as error:
            logger.warning("digest not read: %s", error, extra={"action": "digest"})
            self._not_before_ms = self._now_ms + _AGAIN_MS
        except Exception:
            # One digest's fault must not end the service.
            logger.exception("digest not made", extra={"action": "digest"})
            self._not_before_ms = self._now_ms + _AGAIN_MS
        finally:
            del self._reading[due]
            self._nudge()
