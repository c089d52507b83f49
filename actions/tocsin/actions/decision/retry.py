"""What an attempt means for its delivery: done, refused for good, or again, and when. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Final, Literal

from tocsin.schemas.records.deliveries import DeliveryState

BackendShows = Literal["ended", "replaced", "asked", "refused", "running", "unknown"]
"""What a backend shows of a job that it is to end: gone; another incarnation runs; accepted, and
will show the end; will not do it; not gone yet; could not be asked, or does not know."""

Failure = Literal[
    "timeout",
    "connection refused",
    "connection reset",
    "name not found",
    "no connection",
    "TLS certificate not accepted",
    "broken answer",
    "bus away",
]
"""What kept an attempt from an answer. All of them may be better the next time."""

RETRIED_STATUSES: Final = frozenset({408, 425, 429})
"""Statuses below 500 that mean: later."""

LONGEST_RETRY_AFTER_MS: Final = 24 * 3_600_000
LONGEST_RETRY_AFTER_TEXT: Final = 100
"""Characters of a Retry-After header; an HTTP date has 29."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter, milliseconds."""

    first_ms: int = 1_000
    most_ms: int = 300_000
    least_ms: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one attempt: an HTTP status, a failure, or what it means in words of our own.

    Attributes:
        retry_after: the header's text, seconds or a date.
        forbidden: why another attempt is pointless, or why we must not even try.
        done: it was delivered, in these words.
        later: it was not, in these words, and may be the next time.
        sent: a stop command is on the bus; the run will answer.
        handle: what the service calls the message, by which it can be edited and answered.
        backend: of an attempt at a backend that is to end a job.
    """

    status: int | None = None
    phrase: str = ""
    retry_after: str | None = None
    failure: Failure | None = None
    forbidden: str | None = None
    done: str | None = None
    later: str | None = None
    sent: bool = False
    handle: str | None = None
    backend: BackendShows | None = None

    def text(self) -> str:
        """In a few words; never anything that the peer wrote."""
        words = self.forbidden or self.done or self.later
        if words is not None:
            return words
        if self.failure is not None:
            return self.failure
        return f"{self.status} {self.phrase}".strip() if self.status is not None else "sent"


def phrase_of(status: int) -> str:
    """The standard's own words for a status, not the peer's; "" if it has none."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The state after an attempt. `next_attempt_ms` is None when the state is final."""

    state: DeliveryState
    reason: str
    next_attempt_ms: int | None = None

    @property
    def retry(self) -> bool:
        """Whether there will be another attempt."""
        return self.state == "pending"


def is_temporary(outcome: Outcome) -> bool:
    """Whether the same attempt may succeed later: 408, 425, 429, 5xx, no answer."""
    if outcome.sent or outcome.forbidden is not None or outcome.done is not None:
        return False
    if outcome.failure is not None or outcome.later is not None or outcome.status is None:
        return True
    return outcome.status >= 500 or outcome.status < 200 or outcome.status in RETRIED_STATUSES


def decide(
    outcome: Outcome,
    *,
    delivery_id: str,
    attempts: int,
    now_ms: int,
    give_up_ms: int,
    policy: RetryPolicy,
) -> Decision:
    """Decide after the attempt number `attempts` (from 1).

    2xx: delivered. 408, 425, 429, 5xx and failures of the connection: again, by Retry-After where
    that is later than the backoff, until `give_up_ms`. All else, redirects too: rejected.
    """
    text = outcome.text()
    status = outcome.status
    if outcome.sent:
        return Decision("pending", "sent, waiting for the run's answer", give_up_ms)
    if outcome.forbidden is not None:
        return Decision("rejected", text)
    if outcome.done is not None:
        return Decision("delivered", text)
    if not is_temporary(outcome) and status is not None:
        if status < 300:
            return Decision("delivered", text)
        if status < 400:
            return Decision(
                "rejected", f"{text}: redirects are not followed; configure the final URL"
            )
        return Decision("rejected", text)
    if now_ms >= give_up_ms:
        return Decision("expired", f"given up after {attempts} attempts, the last: {text}")
    wait_ms = backoff_ms(delivery_id, attempts, policy)
    asked_ms = retry_after_ms(outcome.retry_after, now_ms)
    if asked_ms is not None:
        wait_ms = max(wait_ms, asked_ms)
    # The last attempt is made when time is up, rather than given up before.
    return Decision("pending", text, min(now_ms + wait_ms, give_up_ms))


def too_late(age_ms: int, give_up_ms: int) -> str | None:
    """Why a notice of an issue that came `age_ms` ago is not sent any more; None if it is.

    A worker that is new on an old bus finds a month of issues, of which nobody wants to hear now.
    """
    if age_ms <= give_up_ms:
        return None
    age, most = (f"{ms / 3_600_000:,.1f} h" for ms in (age_ms, give_up_ms))
    return f"the issue is {age} old, and a notice is given up after {most}"


def backoff_ms(delivery_id: str, attempts: int, policy: RetryPolicy) -> int:
    """The wait after attempt number `attempts`: random up to an exponential limit (full jitter).

    The randomness is a hash of delivery and attempt, so that it is the same wherever it is asked.
    """
    limit = min(policy.most_ms, policy.first_ms << min(attempts - 1, 30))
    digest = hashlib.sha256(f"{delivery_id}/{attempts}".encode()).digest()
    return max(policy.least_ms, limit * int.from_bytes(digest[:8], "big") >> 64)


def retry_after_ms(text: str | None, now_ms: int) -> int | None:
    """Milliseconds from now that a Retry-After header asks for; None if it cannot be read.

    At most `LONGEST_RETRY_AFTER_MS`. Raises nothing, whatever the peer has written.
    """
    if text is None or len(text) > LONGEST_RETRY_AFTER_TEXT:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 10:
        return min(1000 * int(text), LONGEST_RETRY_AFTER_MS)
    try:
        date = parsedate_to_datetime(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        asked_ms = round(date.timestamp() * 1000) - now_ms
    # The standard library's parser has no closed list of errors: a number that is too large for a
    # C integer, a zone of many hours or a part that is missing each raise something else.
    except (ValueError, OverflowError, TypeError, IndexError, AttributeError):
        return None
    return min(max(0, asked_ms), LONGEST_RETRY_AFTER_MS)
