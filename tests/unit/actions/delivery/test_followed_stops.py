from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import JsonValue

from support.records.issues import NOW_MS, TOPICS, delivery, incarnation, issue, view
from tocsin.actions.delivery import stop_command as stops
from tocsin.schemas.configuration.sections import StopOptions
from tocsin.schemas.errors import MalformedRecord, SignatureError
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.run_view import RunView, StopView
from tocsin.schemas.records.runs_fold import RunSeen
from tocsin.schemas.records.stops.commands import StopRequested, stop_key
from tocsin.schemas.records.wire import read_signature
from tocsin.schemas.signing import SigningKey, TrustedKeys

ISSUE = issue()
COMMAND_ID = delivery_id(ISSUE.issue_id, "stop", "firing")
KEY = SigningKey.generate()
StopState = Literal["acknowledged", "left", "escalated", "exited", "refused", "expired"]


def command(*, now_ms: int = NOW_MS) -> dict[str, JsonValue]:
    made = stops.stop_command(ISSUE, COMMAND_ID, StopOptions(), requested_by="a", now_ms=now_ms)
    payload: dict[str, JsonValue] = json.loads(made.encode())
    return payload


def sent(next_attempt_ms: int | None = None) -> Delivery:
    return delivery(
        ISSUE,
        "stop",
        delivery_id=COMMAND_ID,
        reason="sent",
        attempts=1,
        next_attempt_ms=next_attempt_ms or NOW_MS + 900_000,
        give_up_ms=NOW_MS + 900_000,
    )


def facts(
    state: StopState | None = None,
    *,
    ended: bool = False,
    training: int = 0,
    command_id: str = COMMAND_ID,
) -> RunSeen:
    stop = None
    if state is not None:
        how, code = ("edge", 79) if state == "exited" else (None, None)
        stop = StopView(state=state, command_id=command_id, how=how, exit_code=code, reason="r")
    return seen(view(ended=ended, stop=stop, training=training), NOW_MS)


def seen(made: RunView, as_of_ms: int) -> RunSeen:
    run = RunSeen(made.run_id)
    run.add_view(made, as_of_ms=as_of_ms)
    return run


def test_a_repeat_from_the_ledger_is_the_same_to_the_byte() -> None:
    first, second = (stops.signed_record(TOPICS, command(), KEY) for _ in range(2))
    assert first == second
    TrustedKeys([KEY.public]).verify(first.key, first.value or b"", read_signature(first.headers))


def test_the_command_names_one_incarnation_and_ends() -> None:
    record = stops.signed_record(TOPICS, command(), KEY)
    data = EVENT_TYPES.decode(record.value or b"").data
    assert isinstance(data, StopRequested)
    assert record.key == stop_key("run-1", incarnation()).encode()
    assert data.command_id == COMMAND_ID
    assert data.not_after_ms == NOW_MS + 600_000
    assert data.grace_s == 30


def test_the_nonce_follows_from_the_delivery() -> None:
    nonces = {
        json.dumps(command(now_ms=NOW_MS + later)["data"]["nonce"])  # type: ignore[index,call-overload]
        for later in (0, 1)
    }
    assert len(nonces) == 1


def test_the_command_names_the_last_good_checkpoint_unless_told_not_to() -> None:
    good = Checkpoint(path="/ckpt/900.pt", step=900)
    bad = issue().model_copy(update={"last_good_checkpoint": good})
    for choice, expected in (("protect_last_good", good), ("skip", None)):
        options = StopOptions.model_validate({"checkpoint": choice})
        made = stops.stop_command(bad, COMMAND_ID, options, requested_by="a", now_ms=NOW_MS)
        assert made.data.last_good_checkpoint == expected


def test_an_altered_command_does_not_verify() -> None:
    record = stops.signed_record(TOPICS, command(), KEY)
    altered = (record.value or b"").replace(b'"grace_s":30.0', b'"grace_s":3.00')
    assert altered != record.value
    with pytest.raises(SignatureError):
        TrustedKeys([KEY.public]).verify(record.key, altered, read_signature(record.headers))


def test_what_is_no_command_is_not_signed() -> None:
    with pytest.raises(MalformedRecord):
        stops.signed_record(TOPICS, {**command(), "type": "tocsin.stop.left"}, KEY)


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (None, None),
        (facts(), None),
        (facts(ended=True), "the run has ended with exit code 79"),
        (facts(training=1), "another incarnation of the run has begun"),
        (facts("acknowledged", command_id="c-9"), "under way (command c-9)"),
        (facts("exited", command_id="c-9"), "stopped already (command c-9)"),
        (facts("refused", command_id="c-9"), None),
        (facts("acknowledged"), None),
    ],
)
def test_why_no_stop_is_sent(known: RunSeen | None, why: str | None) -> None:
    found = stops.why_no_stop(known, ISSUE.incarnation, delivery_id=COMMAND_ID, age_ms=0)
    assert (found is None) == (why is None)
    assert (why or "") in (found or "")


@pytest.mark.parametrize(
    ("training", "as_of_ms", "behind"),
    [(0, NOW_MS - 1, False), (1, NOW_MS - 1, True), (1, NOW_MS, True), (1, NOW_MS + 1, False)],
)
def test_a_view_from_before_the_issue_knows_nothing_of_its_incarnation(
    training: int, as_of_ms: int, behind: bool
) -> None:
    assert stops.is_behind(seen(view(training=training), as_of_ms), ISSUE) is behind


def test_an_old_issue_of_an_unknown_run_stops_nothing() -> None:
    why = stops.why_no_stop(None, ISSUE.incarnation, delivery_id=COMMAND_ID, age_ms=600_001)
    assert why is not None


@pytest.mark.parametrize(
    ("known", "state"),
    [
        (None, None),
        (facts(), None),
        (facts("acknowledged"), None),
        (facts("left"), None),
        (facts("escalated"), None),
        (facts("exited"), "delivered"),
        (facts("exited", ended=True), "delivered"),
        (facts("refused"), "rejected"),
        (facts("expired"), "expired"),
        (facts("exited", command_id="c-9"), None),
        (facts("exited", training=1), "pending"),
        (facts(ended=True), "pending"),
        (facts("left", ended=True), "pending"),
    ],
)
def test_after_an_answer(known: RunSeen | None, state: str | None) -> None:
    decision = stops.decide_stop(known, sent(), NOW_MS)
    assert (decision.state if decision else None) == state
    if state == "pending":
        assert decision is not None
        assert decision.next_attempt_ms == NOW_MS + stops.ANSWER_MS


def test_answers_may_come_after_the_end_and_then_it_is_decided() -> None:
    waiting = sent(NOW_MS + stops.ANSWER_MS)
    later = NOW_MS + stops.ANSWER_MS
    assert stops.decide_stop(facts(ended=True), waiting, NOW_MS + 1) is None
    without = stops.decide_stop(facts(ended=True), waiting, later)
    assert without is not None
    assert without.state == "suppressed"
    obeyed = stops.decide_stop(facts("left", ended=True), waiting, later)
    assert obeyed is not None
    assert obeyed.state == "delivered"


def test_a_stop_that_the_next_incarnation_follows_at_once_was_obeyed() -> None:
    known = facts("exited", ended=True)
    for _ in range(2):
        known.add_view(view(training=1, next_offset=2))
    decision = stops.decide_stop(known, sent(), NOW_MS)
    assert decision is not None
    assert decision.state == "delivered"
    assert "exit code 79" in decision.reason
    assert stops.why_no_stop(known, known.incarnation, delivery_id="d-2", age_ms=0) is None


def test_people_are_told_why_a_stop_did_not_work() -> None:
    assert stops.sentence("delivered", "left at step 9") == "It stopped the run."
    why = "stops are switched off (--no-stop)"
    assert stops.sentence("suppressed", why) == f"It sent no stop: {why}."
    assert stops.sentence("rejected", "no trusted key.").endswith("refused: no trusted key.")
