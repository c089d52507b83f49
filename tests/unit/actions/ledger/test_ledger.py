from __future__ import annotations

import pytest

from support.records.issues import NOW_MS, delivery, issue
from tocsin.actions.decision.retry import Decision, Outcome
from tocsin.actions.ledger import final_entries
from tocsin.actions.ledger.final_entries import KEEP_FINAL_MS
from tocsin.actions.ledger.ledger import Ledger
from tocsin.actions.ledger.message_handles import MAX_MESSAGES, MessageHandles
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.topics import issue_partition


def pending(action: str = "ml", *, run: str = "run-1", episode: str = "1") -> Delivery:
    found = issue(run, episode=episode)
    return delivery(found, action, next_attempt_ms=NOW_MS, event={"a": 1})


def attempted(ledger: Ledger, old: Delivery, outcome: Outcome, now_ms: int = NOW_MS) -> Delivery:
    return ledger.attempted(old, outcome, at_ms=now_ms, duration_ms=5, now_ms=now_ms)


def test_the_schedule_gives_each_delivery_once_until_its_next_state() -> None:
    ledger = Ledger()
    first = ledger.write(pending())
    assert ledger.due("ml", NOW_MS - 1, (), 10) == []
    assert ledger.next_due_ms() == NOW_MS
    assert ledger.due("ml", NOW_MS, (), 10) == [first]
    assert ledger.due("ml", NOW_MS, (), 10) == []
    again = attempted(ledger, first, Outcome(status=503))
    assert ledger.next_due_ms() == again.next_attempt_ms
    assert again.event == {"a": 1}


def test_a_final_state_drops_the_event_and_leaves_the_schedule() -> None:
    ledger = Ledger()
    final = attempted(ledger, ledger.write(pending()), Outcome(status=204))
    assert (final.state, final.event, final.next_attempt_ms) == ("delivered", None, None)
    assert [attempt.result for attempt in final.last_attempts] == ["204"]
    assert ledger.open() == 0
    assert ledger.next_due_ms() is None
    assert ledger.knows(final.delivery_id)


def test_a_full_receiver_does_not_set_the_alarm_of_others() -> None:
    ledger = Ledger()
    ledger.write(pending("ml"))
    later = pending("chat").model_copy(update={"next_attempt_ms": NOW_MS + 50})
    ledger.write(later)
    assert ledger.next_due_ms(["ml"]) == NOW_MS + 50


def test_reading_back_keeps_the_newer_state_whatever_the_order() -> None:
    first = pending()
    source = Ledger()
    second = attempted(source, source.write(first), Outcome(status=503))
    third = attempted(source, second, Outcome(status=200), NOW_MS + 1000)
    for order in ([first, second, third], [third, first, second], [second, third, second]):
        ledger = Ledger()
        for entry in order:
            ledger.read(entry)
        assert ledger.open() == 0
        assert ledger.knows(first.delivery_id)
        assert not ledger.read(second)


def test_only_the_last_attempts_are_kept() -> None:
    ledger = Ledger()
    entry = ledger.write(pending())
    for i in range(12):
        entry = attempted(ledger, entry, Outcome(status=503), NOW_MS + i)
    assert entry.attempts == 12
    assert len(entry.last_attempts) == 8
    assert entry.last_attempts[-1].at_ms == NOW_MS + 11


def test_the_stop_of_an_incarnation_is_known_until_it_fails() -> None:
    ledger = Ledger()
    entry = ledger.write(pending("stop"))
    other = ledger.other_stop(entry.run_id, entry.incarnation, "d")
    assert other == "the run is being stopped already, for another issue"
    sent = attempted(ledger, entry, Outcome(sent=True))
    assert ledger.sent_stops() == [sent]
    ledger.decided(sent, Decision("rejected", "the run refused"), NOW_MS)
    assert ledger.other_stop(entry.run_id, entry.incarnation, "d") is None


def test_forgetting_a_partition_drops_its_runs_alone() -> None:
    ledger = Ledger()
    runs = ["run-1", next(r for i in range(99) if issue_partition(r := f"x{i}") == 3)]
    entries = [ledger.write(pending(run=run)) for run in runs]
    ledger.drop({issue_partition("run-1")})
    assert not ledger.knows(entries[0].delivery_id)
    assert list(ledger.pending()) == [entries[1]]
    assert (ledger.open("run-1"), ledger.open(runs[1])) == (0, 1)
    assert [d.run_id for d in ledger.due("ml", NOW_MS, (), 9)] == [runs[1]]


def test_what_waits_for_another_is_not_forgotten_with_other_partitions() -> None:
    ledger = Ledger()
    first, ended, waiting = (ledger.write(pending(episode=number)) for number in "123")
    assert len(ledger.due("ml", NOW_MS, (), 9)) == 3
    ledger.hold(ended, first)
    ledger.hold(waiting, first)
    ledger.decided(ended, Decision("suppressed", "a newer notice is sent"), NOW_MS)
    ledger.drop({issue_partition(first.run_id) + 1})
    attempted(ledger, first, Outcome(status=204))
    assert ledger.due("ml", NOW_MS, (), 9) == [waiting]


def test_final_entries_end_after_ninety_days() -> None:
    ledger = Ledger()
    final = attempted(ledger, ledger.write(pending("stop")), Outcome(status=200))
    assert ledger.outdated(NOW_MS + KEEP_FINAL_MS - 1) == []
    (gone,) = ledger.outdated(NOW_MS + KEEP_FINAL_MS)
    assert gone.key == final.key
    assert not ledger.knows(final.delivery_id)
    assert ledger.other_stop(final.run_id, final.incarnation, "d") is None


def test_of_too_many_final_entries_those_of_open_issues_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(final_entries, "MAX_FINAL", 2)
    monkeypatch.setattr(final_entries, "MAX_OF_OPEN", 3)
    ledger = Ledger()

    def deliver(episode: int, **changes: object) -> Delivery:
        entry = pending(episode=str(episode)).model_copy(update=changes)
        return attempted(ledger, ledger.write(entry), Outcome(status=204), NOW_MS + episode)

    first, second, *_ = [deliver(number) for number in range(4)]
    assert ledger.outdated(NOW_MS) == [], "who was told of these waits for their end"
    over = deliver(4, issue_id=first.issue_id, issue_state="resolved", delivery_id="over")
    assert [one.key for one in ledger.outdated(NOW_MS)] == [first.key], "its receiver knows"
    for number in range(5, 8):
        deliver(number)
    gone = [one.key for one in ledger.outdated(NOW_MS)]
    assert gone == [over.key, second.key], "there is a bound for the others, too"


def test_memory_is_flat_over_many_deliveries() -> None:
    ledger = Ledger()
    for i in range(2_000):
        entry = ledger.write(pending(episode=str(i)))
        entry = ledger.due("ml", NOW_MS, (), 10)[0]
        attempted(ledger, entry, Outcome(status=503))
        attempted(ledger, entry, Outcome(status=200))
    assert ledger.open() == 0
    assert ledger.next_due_ms() is None
    assert sum(1 for _ in ledger.pending()) == 0


def test_a_message_is_known_by_its_handle_after_a_restart() -> None:
    source, first = Ledger(), pending("chat")
    final = attempted(source, source.write(first), Outcome(status=200, handle="C1/2.3"))
    assert (final.state, final.handle) == ("delivered", "C1/2.3")
    ledger = Ledger()
    ledger.read(Delivery.model_validate_json(final.model_dump_json()))
    assert ledger.handle(pending("chat")) == "C1/2.3"
    assert ledger.handle(pending("ml")) is None
    assert ledger.handle(pending("chat", episode="2")) is None
    ledger.drop({issue_partition(first.run_id)})
    assert ledger.handle(first) is None


def test_no_more_messages_are_remembered_than_a_service_has_room_for() -> None:
    handles = MessageHandles()
    lines = [pending("chat", episode=str(number)) for number in range(2)]
    for one in lines:
        handles.learn(one.model_copy(update={"handle": "1"}))
    for number in range(MAX_MESSAGES - 1):
        handles.learn(lines[0].model_copy(update={"handle": "1", "action": f"chat-{number}"}))
    assert [handles.get(one) for one in lines] == [None, "1"]


def test_partitions_that_come_and_go_leave_nothing_behind() -> None:
    ledger = Ledger()
    final = attempted(Ledger(), pending(), Outcome(status=204))
    stop = ledger.decided(pending("stop", run="run-2"), Decision("suppressed", "no"), NOW_MS)
    mine = {issue_partition(final.run_id)}
    assert issue_partition(stop.run_id) not in mine

    for _ in range(3):
        ledger.read(final)
        ledger.drop(mine)
    ledger.read(final)

    # What a worker keeps to find its oldest entries; nothing else shows how many there are.
    assert [identity for _, identity in ledger._settled._oldest] == [final.delivery_id]
    assert [one.key for one in ledger.outdated(NOW_MS + KEEP_FINAL_MS)] == [final.key, stop.key]
