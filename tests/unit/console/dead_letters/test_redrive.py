from __future__ import annotations

import pytest

from support.records.issues import NOW_MS, delivery, issue
from tocsin.actions.ledger.final_entries import KEEP_FINAL_MS
from tocsin.actions.ledger.ledger import Ledger
from tocsin.console.dead_letters.letters import redriven
from tocsin.schemas.records.deliveries import Delivery

LATER_MS = NOW_MS + 3 * 86_400_000
FAILED = delivery(
    issue(),
    delivery_id="d-1",
    state="expired",
    reason="given up after 300 attempts",
    updated_ms=NOW_MS + 60_000,
    give_up_ms=NOW_MS + 60_000,
    attempts=300,
    event={"a": 1},
)
RESOLVED = FAILED.model_copy(
    update={"delivery_id": "d-2", "issue_state": "resolved", "state": "delivered"}
)


def changed(**changes: object) -> Delivery:
    return FAILED.model_copy(update=changes)


def again(letter: Delivery, *ledger: Delivery) -> Delivery | str:
    return redriven(letter, ledger, by="ana", now_ms=LATER_MS)


def test_it_keeps_its_id_and_has_its_time_anew() -> None:
    entry = again(FAILED, changed(event=None, redrives=1))
    assert isinstance(entry, Delivery)
    assert (entry.delivery_id, entry.key) == (FAILED.delivery_id, FAILED.key)
    assert (entry.state, entry.redrives, entry.attempts) == ("pending", 2, 0)
    assert entry.redriven_ms == LATER_MS
    assert (entry.next_attempt_ms, entry.give_up_ms) == (LATER_MS, LATER_MS + 60_000)
    assert (entry.event, entry.reason) == (
        {"a": 1},
        "to be sent once more, requested by ana",
    )


def test_each_time_it_has_as_long_as_the_first_time() -> None:
    entry = again(FAILED)
    assert isinstance(entry, Delivery)
    expired = entry.model_copy(update={"state": "expired"})
    second = redriven(expired, [expired], by="ana", now_ms=LATER_MS + 90_000)
    assert isinstance(second, Delivery)
    assert second.give_up_ms == LATER_MS + 90_000 + 60_000


@pytest.mark.parametrize(
    ("letter", "ledger", "why"),
    [
        (FAILED, [changed(state="delivered")], "delivered already"),
        (FAILED, [changed(state="pending", redrives=1)], "pending already"),
        (FAILED, [RESOLVED], "a later state of the issue was delivered: resolved"),
        (changed(kind="stop"), [], "a stop is not sent again"),
        (changed(event=None), [], "no event"),
    ],
)
def test_what_is_not_sent_again_has_its_reason(
    letter: Delivery, ledger: list[Delivery], why: str
) -> None:
    found = again(letter, *ledger)
    assert isinstance(found, str)
    assert why in found


def test_later_states_elsewhere_or_not_delivered_are_no_obstacle() -> None:
    others = [
        RESOLVED.model_copy(update={"state": "expired"}),
        RESOLVED.model_copy(update={"action": "mail"}),
        RESOLVED.model_copy(update={"issue_id": "another"}),
    ]
    assert isinstance(again(FAILED, *others), Delivery)
    assert isinstance(again(RESOLVED.model_copy(update={"state": "expired"}), FAILED), Delivery)


def test_the_ledger_takes_it_for_newer_and_nothing_of_before_it() -> None:
    ledger = Ledger()
    final = changed(event=None)
    assert ledger.read(final)
    entry = again(FAILED, final)
    assert isinstance(entry, Delivery)
    assert ledger.read(entry)
    assert ledger.due("ml", LATER_MS, (), 10) == [entry]
    assert not ledger.read(final), "an older record of the topic"
    assert not ledger.read(entry)

    delivered = entry.model_copy(
        update={"state": "delivered", "attempts": 1, "updated_ms": LATER_MS + 5, "event": None}
    )
    assert ledger.read(delivered)
    assert not ledger.read(entry), "a redrive that was read late"
    assert ledger.open() == 0
    # Kept since its last state, not since its first.
    assert ledger.outdated(final.updated_ms + KEEP_FINAL_MS) == []
    assert len(ledger.outdated(delivered.updated_ms + KEEP_FINAL_MS)) == 1
