"""Circuit breakers: a receiver that fails one delivery after another gets one attempt at a time.

Deliveries wait in the ledger's schedule meanwhile. Each still has its last attempt when its time is
up, unless another one has failed at that receiver since. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from tocsin.actions.decision.retry import Decision, Outcome, is_temporary
from tocsin.schemas.records.deliveries import Delivery

GONE: Final = (
    "the receiver answered 410 Gone: it is disabled until its configuration is read again, "
    "by a reload or a restart"
)

_NO_ROOM_MS: Final = 1_000

_TURNS: Final = 8
"""How many of those that wait are considered for each attempt: the first may not be there any more.
The others are not looked at, since they may be a hundred thousand."""


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """When a circuit opens: `failures` deliveries in a row; and the time between attempts then.

    A single delivery that the receiver cannot digest opens none, however often it is tried.
    """

    failures: int = 5
    probe_every_ms: int = 30_000


class Circuit:
    """Whether one receiver may be tried."""

    def __init__(self, policy: CircuitPolicy) -> None:
        self.policy = policy
        self.open_until_ms: int | None = None
        """None while it is closed."""

        self.gone = False
        """Whether the receiver has answered that it does not exist any more."""

        self._failed: set[str] = set()
        self._probe: str | None = None
        self._failed_ms = 0
        self._turn_ms = 0

    @property
    def suspended(self) -> bool:
        """Whether most deliveries are not to be attempted now."""
        return self.gone or self.open_until_ms is not None

    def gate(self, delivery: Delivery, now_ms: int, *, room: int) -> Decision | None:
        """What becomes of a delivery that is due without an attempt; None: attempt it.

        `room` is how many more attempts the receiver takes.
        """
        if self.gone:
            return Decision("rejected", GONE)
        if self.open_until_ms is None:
            return None
        if now_ms >= delivery.give_up_ms:
            if self._failed_ms >= delivery.give_up_ms:
                after = f"given up after {delivery.attempts:,} attempts"
                return Decision("expired", f"{after}: the receiver fails for other deliveries, too")
            return None if room > 0 else Decision("pending", "", now_ms + _NO_ROOM_MS)
        if now_ms >= self.open_until_ms and self._probe is None and room > 0:
            self._probe = delivery.delivery_id
            return None
        later_ms = max(self.open_until_ms, now_ms + _NO_ROOM_MS)
        self._turn_ms = max(later_ms, self._turn_ms + self.policy.probe_every_ms // _TURNS)
        return Decision("pending", "", min(self._turn_ms, delivery.give_up_ms))

    def attempted(self, delivery_id: str, outcome: Outcome, now_ms: int) -> bool:
        """Take in what came of an attempt; whether that closed the circuit.

        Any answer but a temporary failure shows that the receiver works; what we refuse to send
        ourselves shows nothing.
        """
        if self._probe == delivery_id:
            self._probe = None
        if outcome.forbidden is not None:
            return False
        if outcome.status == HTTPStatus.GONE:
            self.gone = True
        if is_temporary(outcome):
            self._failed.add(delivery_id)
            self._failed_ms = max(self._failed_ms, now_ms)
            if self.suspended or len(self._failed) >= self.policy.failures:
                self.open_until_ms = now_ms + self.policy.probe_every_ms
                self._failed.clear()
            return False
        was_open, self.open_until_ms = self.open_until_ms is not None, None
        self._turn_ms = 0
        self._failed.clear()
        return was_open
