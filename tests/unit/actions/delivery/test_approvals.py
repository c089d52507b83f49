"""A stop that waits for people: their answers, the time that is up, and what is signed then."""

from __future__ import annotations

import json

import pytest

from support.records.issues import issue
from support.records.signed import answer_record
from tocsin.actions.decision.planned import STOP, Planned
from tocsin.actions.delivery.approvals import Approvals, answered, pending_approval, timed_out
from tocsin.actions.delivery.records import new_delivery
from tocsin.actions.delivery.stop_command import (
    NOT_AFTER_MS,
    give_up_ms,
    sent_from_ms,
    stop_command,
)
from tocsin.actions.ledger.ledger import Ledger
from tocsin.schemas.configuration.sections import ApproveOptions, StopOptions
from tocsin.schemas.errors import RecordError, SignatureError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.signing import SigningKey, TrustedKeys

NOW_MS = 1_800_000_000_000
TIMEOUT_MS = 600_000


def waiting(**options: object) -> Delivery:
    approve = ApproveOptions.model_validate(options)
    command = stop_command(issue(), "stop-1", StopOptions(), requested_by="test", now_ms=NOW_MS)
    stop = new_delivery(
        "stop-1",
        issue(),
        Planned(STOP, STOP, "tocsin.yaml:4:5"),
        command.encode(),
        now_ms=NOW_MS,
        give_up_ms=give_up_ms(StopOptions(), NOW_MS),
    )
    return pending_approval(stop, approve, "mode: ask", NOW_MS)


def answer(verdict: str = "approve", by: str = "ana", why: str = "") -> StopAnswered:
    about = waiting()
    return StopAnswered.model_validate(
        {
            "run_id": about.run_id,
            "incarnation": about.incarnation,
            "delivery_id": about.delivery_id,
            "verdict": verdict,
            "by": by,
            "why": why,
            "at_ms": NOW_MS,
        }
    )


def command_of(stop: Delivery) -> StopRequested:
    data = EVENT_TYPES.decode(json.dumps(stop.event).encode()).data
    assert isinstance(data, StopRequested)
    return data


def test_it_waits_and_says_for_what() -> None:
    stop = waiting()

    assert stop.waits_for_people
    assert stop.next_attempt_ms == NOW_MS + TIMEOUT_MS
    assert stop.reason == (
        "mode: ask: waits for `tocsin approve stop-1` until 2027-01-15 08:10:00 UTC; it is not "
        "sent without one"
    )
    assert "it is sent then" in waiting(on_timeout="stop").reason


def test_an_approval_sends_a_command_that_is_valid_from_then_on() -> None:
    later = NOW_MS + 500_000

    settled = answered(waiting(), answer(), later)

    assert settled is not None
    stop, decision = settled
    assert decision is None
    assert not stop.waits_for_people
    assert (stop.next_attempt_ms, stop.reason) == (later, "approved by ana")
    assert sent_from_ms(stop) == later
    command = command_of(stop)
    assert (command.requested_ms, command.not_after_ms) == (later, later + NOT_AFTER_MS)
    assert command.command_id == command_of(waiting()).command_id


def test_a_quorum_is_of_different_people() -> None:
    settled = answered(waiting(quorum=2), answer(by="ana"), NOW_MS + 1)
    assert settled is not None
    stop, decision = settled
    assert decision is None
    assert stop.waits_for_people
    assert "(1 of 2 so far)" in stop.reason
    assert answered(stop, answer(by="ana"), NOW_MS + 2) is None

    settled = answered(stop, answer(by="ben"), NOW_MS + 3)
    assert settled is not None
    assert settled[0].reason == "approved by ana, ben"


@pytest.mark.parametrize("who", ["ana", "ben"])
def test_one_who_rejects_is_enough_after_an_approval_of_their_own_too(who: str) -> None:
    first = answered(waiting(quorum=2), answer(by="ana"), NOW_MS + 1)
    assert first is not None

    settled = answered(first[0], answer("reject", who, "a known spike"), NOW_MS + 2)

    assert settled is not None
    stop, decision = settled
    assert stop.held == "rejected"
    assert decision is not None
    assert (decision.state, decision.reason) == (
        "suppressed",
        f"{who} rejected the stop: a known spike",
    )


@pytest.mark.parametrize("on_timeout", ["skip", "stop"])
def test_the_time_is_up(on_timeout: str) -> None:
    stop = waiting(on_timeout=on_timeout)
    assert timed_out(stop, NOW_MS + TIMEOUT_MS - 1) is None

    settled = timed_out(stop, NOW_MS + TIMEOUT_MS)

    assert settled is not None
    after, decision = settled
    if on_timeout == "skip":
        assert decision is not None
        assert (decision.state, after.held) == ("suppressed", "unanswered")
    else:
        assert decision is None
        assert command_of(after).not_after_ms == NOW_MS + TIMEOUT_MS + NOT_AFTER_MS


def test_only_signed_answers_count() -> None:
    key = SigningKey.generate()
    approvals = Approvals(lambda: TrustedKeys([key.public]))
    ledger = Ledger()
    ledger.write(waiting())

    with pytest.raises(SignatureError, match="not trusted"):
        approvals.follow(answer_record(answer(), SigningKey.generate()))
    with pytest.raises(SignatureError, match="not signed"):
        approvals.follow(answer_record(answer(), None))
    for name in (b"other/i1/approval", answer(by="ben").key.encode()):
        with pytest.raises(RecordError, match="under its run's key"):
            approvals.follow(answer_record(answer(), key, name=name))
    assert list(approvals.settle(ledger, NOW_MS + 1)) == []

    approvals.follow(answer_record(answer(), key))
    ((after, decision),) = approvals.settle(ledger, NOW_MS + 1)
    assert (after.reason, decision) == ("approved by ana", None)


def test_an_answer_may_come_before_the_stop_is_read() -> None:
    key = SigningKey.generate()
    approvals, ledger = Approvals(lambda: TrustedKeys([key.public])), Ledger()
    approvals.follow(answer_record(answer(), key))
    assert list(approvals.settle(ledger, NOW_MS)) == []

    ledger.write(waiting())

    assert [after.reason for after, _ in approvals.settle(ledger, NOW_MS)] == ["approved by ana"]


def test_compaction_loses_no_answer() -> None:
    key = SigningKey.generate()
    said = [answer(by="ana"), answer(by="ben", verdict="reject"), answer(by="ben")]
    other = answer(by="ana").model_copy(update={"delivery_id": "stop-2"})
    records = [answer_record(each, key) for each in (*said, other)]
    kept = {record.key: record for record in records}  # the newest of each key
    assert [*kept] == [each.key.encode() for each in (said[0], said[1], other)]
    approvals, ledger = Approvals(lambda: TrustedKeys([key.public])), Ledger()
    ledger.write(waiting(quorum=2))
    for record in kept.values():
        approvals.follow(record)
    *_, (after, decision) = approvals.settle(ledger, NOW_MS + 1)
    assert (after.reason, decision) == ("approved by ana, ben", None)


def test_answers_of_earlier_releases_count() -> None:
    key = SigningKey.generate()
    approvals, ledger = Approvals(lambda: TrustedKeys([key.public])), Ledger()
    ledger.write(waiting())
    old = f"{answer().run_id}/{answer().incarnation}/approval".encode()
    approvals.follow(answer_record(answer(), key, name=old))
    ((after, _),) = approvals.settle(ledger, NOW_MS + 1)
    assert after.reason == "approved by ana"
