"""How deliveries are sent: a queue per receiver and one for stops; none waits for another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.actions.delivery.retry import Outcome
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Delivery

logger = logging.getLogger(__name__)

PER_RECEIVER: Final = 16
"""Attempts at one receiver at a time. What is due beyond that waits in the ledger's schedule."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What an attempt is to deliver.

    Attributes:
        did: what tocsin has done about the issue so far, one sentence each.
    """

    delivery: Delivery
    now_ms: int
    did: Sequence[str] = ()


Attempt = Callable[[Notice], Awaitable[Outcome]]
"""Makes one attempt. Raises CancelledError, or RecordError: it can never be sent."""


@dataclass(frozen=True, slots=True)
class ReceiverQueue:
    """How to reach one receiver, or runs that are to stop; `give_up_ms` after the decision.

    Attributes:
        one_alert: it keeps one alert per issue: no earlier state may follow a later one.
        acknowledges: it shows that somebody takes care of an alert.
    """

    attempt: Attempt
    give_up_ms: int = 24 * 3_600_000
    at_once: int = PER_RECEIVER
    one_alert: bool = False
    acknowledges: bool = False


@dataclass(frozen=True, slots=True)
class Attempted:
    """What came of an attempt. Without an outcome: time to check what became of a delivery."""

    delivery_id: str
    outcome: Outcome | None
    at_ms: int
    duration_ms: int = 0


class ReceiverQueues:
    """Makes attempts, in tasks of the event loop.

    Args:
        report: called with the result of each; not of one that was cut off by `close`.
        crash: called with `attempting` and `attempted`.
        closers: called by `close`.
        find: makes the queue of a receiver that is not among them, if there is one; may block.
    """

    def __init__(
        self,
        queues: Mapping[str, ReceiverQueue],
        report: Callable[[Attempted], None],
        *,
        crash: Callable[[str], None],
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
        find: Callable[[str], ReceiverQueue | None] = lambda name: None,
    ) -> None:
        self._queues = dict(queues)
        self._report = report
        self._crash = crash
        self._closers = closers
        self._find = find
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._flying: Counter[str] = Counter()

    def get(self, action: str) -> ReceiverQueue | None:
        """The queue of a receiver; None if there is none of that name. May block."""
        if action not in self._queues and (found := self._find(action)) is not None:
            self._queues[action] = found
        return self._queues.get(action)

    def acknowledges(self, action: str) -> bool:
        """Whether a receiver shows that somebody takes care of an alert. May block."""
        queue = self.get(action)
        return queue is not None and queue.acknowledges

    def room(self, action: str) -> int:
        """How many more attempts may begin there now."""
        queue = self._queues.get(action)
        return (queue.at_once if queue is not None else PER_RECEIVER) - self._flying[action]

    def start(self, queue: ReceiverQueue, notice: Notice) -> None:
        """Begin an attempt."""
        identity = notice.delivery.delivery_id
        self._flying[notice.delivery.action] += 1
        self._tasks[identity] = asyncio.create_task(
            self._attempt(queue, notice), name=f"tocsin-delivery-{identity}"
        )

    async def close(self) -> None:
        """Cut off what is under way: whoever comes next makes it again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for close in self._closers:
            await close()

    async def _attempt(self, queue: ReceiverQueue, notice: Notice) -> None:
        delivery = notice.delivery
        started = time.monotonic()
        outcome = Outcome(failure="no connection")
        try:
            self._crash("attempting")
            outcome = await queue.attempt(notice)
            self._crash("attempted")
        except RecordError as error:
            outcome = Outcome(forbidden=str(error))
        except Exception:
            # One action's fault must not end the others: it counts as a failed attempt.
            logger.exception("attempt failed by a bug", extra={"action": delivery.kind})
        finally:
            self._flying[delivery.action] -= 1
            del self._tasks[delivery.delivery_id]
        duration_ms = round(1000 * (time.monotonic() - started))
        self._report(Attempted(delivery.delivery_id, outcome, notice.now_ms, duration_ms))
