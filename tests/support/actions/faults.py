"""What a receiver can do to an attempt, and what is to become of the delivery."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from typing import Final

from support.records.issues import NOW_MS
from tocsin.actions.decision.retry import Failure, Outcome, phrase_of
from tocsin.schemas.records.deliveries import DeliveryState


@dataclass(frozen=True)
class Fault:
    """One answer, or none.

    Attributes:
        path: of the fault server.
        state: of the delivery if every attempt ends so.
        wait_ms: before the second attempt, at least and at most.
    """

    path: str
    outcome: Outcome
    state: DeliveryState
    wait_ms: tuple[int, int] = (100, 1_000)

    def __str__(self) -> str:
        return self.path.strip("/")


def _status(status: int, state: DeliveryState) -> Fault:
    return Fault(f"/status/{status}", Outcome(status=status, phrase=phrase_of(status)), state)


def _asked_to_wait(path: str, after: str) -> Fault:
    outcome = Outcome(status=429, phrase="Too Many Requests", retry_after=after)
    return Fault(path, outcome, "expired", (89_000, 90_000))


def _silent(path: str, failure: Failure) -> Fault:
    return Fault(path, Outcome(failure=failure), "expired")


_DATE: Final = formatdate(NOW_MS // 1000 + 90, usegmt=True)

FAULTS: Final = (
    *(_status(status, "delivered") for status in (200, 202, 204)),
    *(_status(status, "rejected") for status in (301, 307, 400, 401, 403, 404, 409, 410, 413, 422)),
    *(_status(status, "expired") for status in (408, 425, 429, 500, 502, 503, 504)),
    _asked_to_wait("/status/429?after=90", "90"),
    _asked_to_wait(f"/status/429?after={_DATE.replace(' ', '%20')}", _DATE),
    _silent("/timeout", "timeout"),
    _silent("/drip", "timeout"),
    _silent("/reset", "connection reset"),
    _silent("/half", "connection reset"),
    _silent("wrong TLS", "TLS certificate not accepted"),
    _silent("no such name", "name not found"),
    _silent("nobody there", "connection refused"),
)
