"""Stops that people must approve: the question, the answers, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from tocsin.actions.decision.retry import Decision
from tocsin.actions.delivery.stop_command import renewed
from tocsin.actions.ledger.ledger import Change, Ledger
from tocsin.bus.port import Record
from tocsin.schemas.configuration.sections import ApproveOptions
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Approval, Delivery, HeldBy
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.stops.control import StopAnswered, is_answer_key
from tocsin.schemas.records.wire import read_signature
from tocsin.schemas.signing import TrustedKeys
from tocsin.schemas.text import time_text

MAX_ANSWERS: Final = 10_000
"""Answers that are remembered before their stop is known; the oldest are forgotten first."""


def pending_approval(stop: Delivery, options: ApproveOptions, why: str, now_ms: int) -> Delivery:
    """A new stop that waits for people."""
    until_ms = now_ms + options.timeout // timedelta(milliseconds=1)
    approval = Approval(
        why=why, until_ms=until_ms, on_timeout=options.on_timeout, quorum=options.quorum
    )
    waits = {
        "approval": approval,
        "next_attempt_ms": until_ms,
        "give_up_ms": stop.give_up_ms + until_ms - now_ms,
    }
    return _reasoned(stop.model_copy(update=waits))


def answered(stop: Delivery, answer: StopAnswered, now_ms: int) -> Change | None:
    """What an answer makes of a stop that waits; None: it is nothing new."""
    approval = stop.approval
    if approval is None:
        return None
    if answer.verdict == "reject":
        why = f": {answer.why}" if answer.why else ""
        return _ended(stop, "rejected", f"{answer.by} rejected the stop{why}")
    if answer.by in approval.by:
        return None
    by = (*approval.by, answer.by)
    stop = stop.model_copy(update={"approval": approval.model_copy(update={"by": by})})
    if len(by) >= approval.quorum:
        return _released(stop, f"approved by {', '.join(by)}", now_ms), None
    return _reasoned(stop), None


def timed_out(stop: Delivery, now_ms: int) -> Change | None:
    """What becomes of a stop that waits when the time is up; None: it is not."""
    approval = stop.approval
    if approval is None or now_ms < approval.until_ms:
        return None
    if approval.on_timeout == "stop":
        return _released(stop, "nobody rejected the stop in time", now_ms), None
    return _ended(stop, "unanswered", "the stop was not approved in time")


class Approvals:
    """The answers on the control topic. Without a signature that is trusted now, none counts."""

    def __init__(self, trusted: Callable[[], TrustedKeys]) -> None:
        self._trusted = trusted
        self._answers: dict[str, list[StopAnswered]] = {}

    def follow(self, record: Record) -> None:
        """Take a record of the control topic in. Other commands are not looked at.

        Raises:
            SignatureError: it is an answer, and not signed by a trusted key.
            RecordError: likewise, and cannot be read.
        """
        if record.value is None or not is_answer_key(record.key):
            return
        self._trusted().verify(record.key, record.value, read_signature(record.headers))
        data = EVENT_TYPES.decode(record.value).data
        key = record.key.decode(errors="replace")
        if not isinstance(data, StopAnswered) or not data.is_under(key):
            raise RecordError("expected an answer to a stop, under its run's key")
        self._answers.setdefault(data.delivery_id, []).append(data)
        while len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def settle(self, ledger: Ledger, now_ms: int) -> Iterator[Change]:
        """The stops that wait no more, or have one more answer."""
        for stop in ledger.waiting_stops():
            for answer in self._answers.pop(stop.delivery_id, ()):
                settled = answered(stop, answer, now_ms)
                if settled is None:
                    continue
                yield settled
                stop = settled[0]
                if settled[1] is not None or not stop.waits_for_people:
                    break
            else:
                if (settled := timed_out(stop, now_ms)) is not None:
                    yield settled


def _released(stop: Delivery, why: str, now_ms: int) -> Delivery:
    assert stop.approval is not None
    command = renewed(stop, now_ms)
    return stop.model_copy(
        update={
            "approval": stop.approval.model_copy(update={"decided_ms": now_ms}),
            "reason": why,
            "next_attempt_ms": now_ms,
            "updated_ms": max(now_ms, stop.updated_ms),
            "event": json.loads(command.encode()),
        }
    )


def _ended(stop: Delivery, held: HeldBy, why: str) -> Change:
    return stop.model_copy(update={"held": held}), Decision("suppressed", why)


def _reasoned(stop: Delivery) -> Delivery:
    """With the sentence about what it waits for."""
    approval = stop.approval
    assert approval is not None
    so_far = f" ({len(approval.by)} of {approval.quorum} so far)" if approval.quorum > 1 else ""
    then = "it is sent then" if approval.on_timeout == "stop" else "it is not sent without one"
    until = time_text(approval.until_ms)
    how = f"`tocsin approve {stop.delivery_id[:8]}`"
    reason = f"{approval.why}: waits for {how} until {until}{so_far}; {then}"
    return stop.model_copy(update={"reason": reason})
