"""How deliveries are sent: a queue per receiver and one for stops; none waits for another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.actions.decision.retry import Decision, Outcome, too_late
from tocsin.actions.delivery.circuit import Circuit, CircuitPolicy
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Delivery, DeliveryState

logger = logging.getLogger(__name__)

PER_RECEIVER: Final = 16
"""Attempts at one receiver at a time. What is due beyond that waits in the ledger's schedule."""

_UNKNOWN_RECEIVER_MS: Final = 60_000
_FULL_MS: Final = 1_000
_ALL: Final = 1_000_000
"""As many as are due: `gate` puts most of them off."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What an attempt is to deliver.

    Attributes:
        did: what tocsin has done about the issue so far, one sentence each.
        handle: what the service calls the message about an earlier state of the issue.
        others: what is delivered in the same message.
        answer_url: the link by which the receiver of one of them answers; empty: it has none.
        page_url: the page of the issue of one of them; empty: it has none.
        stop: the state of the stop of its run; None if there is none.
        stake: what of its run is at stake or was saved, with its label; None: not known.
    """

    delivery: Delivery
    now_ms: int
    did: Sequence[str] = ()
    handle: str | None = None
    others: Sequence[Delivery] = ()
    answer_url: Callable[[Delivery], str] = lambda delivery: ""
    page_url: Callable[[Delivery], str] = lambda delivery: ""
    stop: DeliveryState | None = None
    stake: tuple[str, str] | None = None


Attempt = Callable[[Notice], Awaitable[Outcome]]
"""Makes one attempt. Raises CancelledError, or RecordError: it can never be sent."""


@dataclass(frozen=True, slots=True)
class ReceiverQueue:
    """How to reach one receiver, or runs that are to stop; `give_up_ms` after the decision.

    Attributes:
        one_alert: it keeps one alert per issue: no earlier state may follow a later one.
        acknowledges: it shows that somebody takes care of an alert.
        circuit: when it is left alone for a while; None: never.
        groups: it is sent the issues of a group in one message.
        edits: its messages can be edited, so that nobody is notified.
    """

    attempt: Attempt
    give_up_ms: int = 24 * 3_600_000
    at_once: int = PER_RECEIVER
    one_alert: bool = False
    acknowledges: bool = False
    circuit: CircuitPolicy | None = None
    groups: bool = False
    edits: bool = False


def queue_of(delivery: Delivery) -> str:
    """The name of its queue: of the receiver, of `stop`, or of the backend that is asked now."""
    return delivery.action if delivery.backend is None else target_queue(delivery.backend.target)


def target_queue(target: str) -> str:
    """The name of a target's queue; no receiver has such a name, with a space."""
    return f"target {target}"


@dataclass(frozen=True, slots=True)
class Attempted:
    """What came of an attempt. Without an outcome: time to check what became of a delivery.

    Attributes:
        delivery_ids: of all that is in one message.
        instead: what was decided in place of an attempt.
        suspended_until_ms: until then the receiver is left alone.
        works_again: whether it was left alone before this attempt.
    """

    delivery_ids: Sequence[str]
    outcome: Outcome | None
    at_ms: int
    duration_ms: int = 0
    instead: Decision | None = None
    suspended_until_ms: int | None = None
    works_again: bool = False


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
        metrics: Metrics | None = None,
    ) -> None:
        self._queues = dict(queues)
        self._report = report
        self._crash = crash
        self._closers = closers
        # Those of receivers that were replaced, once their last attempts have ended.
        self._closing: set[asyncio.Task[None]] = set()
        self._find = find
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._flying: Counter[str] = Counter()
        self._circuits: dict[str, Circuit] = {}
        self._metrics = metrics or Metrics()

    def get(self, action: str) -> ReceiverQueue | None:
        """The queue of a receiver; None if the configuration names no such receiver. May block."""
        if action not in self._queues and (found := self._find(action)) is not None:
            self._queues[action] = found
        return self._queues.get(action)

    def acknowledges(self, action: str) -> bool:
        """Whether a receiver shows that somebody takes care of an alert. May block."""
        queue = self.get(action)
        return queue is not None and queue.acknowledges

    def why_not(self, action: str, age_ms: int) -> str | None:
        """Why a receiver gets no notice of an issue of that age; None if it does. May block."""
        queue = self.get(action)
        if queue is None:
            return "the receiver is not there: its secret is missing"
        return too_late(age_ms, queue.give_up_ms)

    def room(self, action: str) -> int:
        """How many deliveries that are due `gate` can be asked about now."""
        circuit = self._circuits.get(action)
        return _ALL if circuit is not None and circuit.suspended else self._room(action)

    def gate(self, delivery: Delivery, now_ms: int) -> Decision | None:
        """What becomes of a delivery without an attempt; None: `start` it. May block."""
        name = queue_of(delivery)
        if self.get(name) is None:
            # Another worker's configuration may have it; it is not ours to refuse before its time.
            later_ms = min(now_ms + _UNKNOWN_RECEIVER_MS, delivery.give_up_ms)
            if later_ms > now_ms:
                return Decision("pending", delivery.reason, later_ms)
            sent = "" if delivery.attempts else ", and never sent"
            what = "receiver" if delivery.backend is None else "target"
            return Decision("expired", f"no {what} of that name{sent}")
        circuit = self._circuits.get(name)
        if circuit is None:
            # Room for receivers was requested already; a target has some beside that for stops.
            full = self._room(name) <= 0
            return Decision("pending", delivery.reason, now_ms + _FULL_MS) if full else None
        return circuit.gate(delivery, now_ms, room=self._room(name))

    def start(self, notice: Notice) -> None:
        """Begin an attempt. Its receiver is there."""
        identity, action = notice.delivery.delivery_id, queue_of(notice.delivery)
        self._flying[action] += 1
        self._tasks[identity] = asyncio.create_task(
            self._attempt(self._queues[action], notice), name=f"tocsin-delivery-{identity}"
        )

    def add(self, queues: Mapping[str, ReceiverQueue]) -> None:
        """Send to these receivers from now on, too; in the event loop's thread.

        One that was left alone is tried again: it may be what was changed.
        """
        self._queues = {**self._queues, **queues}
        for action in self._circuits:
            self._metrics.set(names.SUSPENDED, 0.0, receiver=action)
        self._circuits.clear()

    def keep(
        self, queues: Mapping[str, ReceiverQueue], close_old: Callable[[], Awaitable[None]]
    ) -> None:
        """Send to no others than these any more; in the event loop's thread.

        Attempts under way end where they began; `close_old` is called after them.
        """
        self._queues = dict(queues)
        closing = asyncio.create_task(self._close_after(set(self._tasks.values()), close_old))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self, close_receivers: Callable[[], Awaitable[None]]) -> None:
        """Cut off what is under way: whoever comes next makes it again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if waited := [*tasks, *self._closing]:
            await asyncio.wait(waited)
        for close in (close_receivers, *self._closers):
            await close()

    async def _close_after(
        self, attempts: set[asyncio.Task[None]], close: Callable[[], Awaitable[None]]
    ) -> None:
        if attempts:
            await asyncio.wait(attempts)
        await close()

    def _room(self, action: str) -> int:
        queue = self._queues.get(action)
        return (queue.at_once if queue is not None else PER_RECEIVER) - self._flying[action]

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
            self._flying[queue_of(delivery)] -= 1
            del self._tasks[delivery.delivery_id]
        duration_ms = round(1000 * (time.monotonic() - started))
        self._report(self._result(queue, notice, outcome, duration_ms))

    def _result(
        self, queue: ReceiverQueue, notice: Notice, outcome: Outcome, duration_ms: int
    ) -> Attempted:
        identity, action = notice.delivery.delivery_id, queue_of(notice.delivery)
        if notice.delivery.backend is not None:
            shown = outcome.backend or "unknown"
            self._metrics.add(names.BACKENDS, target=notice.delivery.backend.target, shows=shown)
        identities = (identity, *(one.delivery_id for one in notice.others))
        if queue.circuit is None:
            return Attempted(identities, outcome, notice.now_ms, duration_ms)
        circuit = self._circuits.setdefault(action, Circuit(queue.circuit))
        works_again = circuit.attempted(identity, outcome, notice.now_ms + duration_ms)
        self._metrics.set(names.SUSPENDED, float(circuit.suspended), receiver=action)
        return Attempted(
            identities,
            outcome,
            notice.now_ms,
            duration_ms,
            suspended_until_ms=circuit.open_until_ms,
            works_again=works_again,
        )
