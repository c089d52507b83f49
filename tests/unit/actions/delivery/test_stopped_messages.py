"""The message about an issue shows how the stop of its run has ended, where it can be edited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.actions.virtual_notices import VirtualNotices
from support.records.issues import NOW_MS, issue, view, view_record
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.message import message_for
from tocsin.bus.port import Outgoing
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import STOPPED
from tocsin.schemas.records.goodput import Outlook
from tocsin.schemas.records.issues import IssueOngoing
from tocsin.schemas.records.run_view import StopView

ISSUE = issue()
STOP_ID = delivery_id(ISSUE.issue_id, "stop", "firing")
POSTED = Outcome(done="posted", handle="message-1")


@pytest.fixture
def chat() -> Iterator[VirtualNotices]:
    made = chat_that(edits=True)
    yield made
    made.close()


def chat_that(*, edits: bool, repeat_ms: int | None = None) -> VirtualNotices:
    times = NoticeTimes(repeat_ms=repeat_ms)
    made = VirtualNotices(times, stops=True, edits=edits, now_ms=NOW_MS)
    made.answers = [POSTED] * 8
    return made


def exited(*, state: str = "exited") -> Outgoing:
    """What the run says at its end."""
    stop = StopView.model_validate(
        {"state": state, "command_id": STOP_ID, "how": "edge", "exit_code": 79, "reason": "no key"}
    )
    return view_record(view(ended=state == "exited", stop=stop, next_offset=2))


def occasions(made: VirtualNotices) -> list[str]:
    return [one.delivery.occasion for one in made.notices]


@pytest.mark.parametrize(
    ("state", "title"), [("exited", "run stopped; critical: "), ("refused", "stop refused; ")]
)
def test_a_message_is_edited_when_the_stop_has_ended(
    chat: VirtualNotices, state: str, title: str
) -> None:
    chat.give(view_record(view()))
    chat.issue(ISSUE)
    assert occasions(chat) == ["new"]

    chat.give(exited(state=state))
    chat.advance(5_000)

    assert occasions(chat) == ["new", STOPPED]
    first, last = chat.notices
    assert (last.handle, last.delivery.issue_state) == ("message-1", "firing")
    assert message_for(first).title.startswith("critical: ")
    assert message_for(last).title.startswith(title)
    assert "NaN in the loss" in message_for(last).headline
    entry = chat.entries()[f"{ISSUE.issue_id}/mail/stopped"]
    assert (entry.state, entry.delivery_id) == (
        "delivered",
        delivery_id(ISSUE.issue_id, "mail", STOPPED),
    )


def test_how_the_stop_has_ended_does_not_wait_for_a_reminder() -> None:
    chat = chat_that(edits=True, repeat_ms=4 * 3_600_000)
    chat.give(view_record(view()))
    chat.issue(ISSUE)
    chat.advance(1_000)
    chat.issue(IssueOngoing(**dict(ISSUE)))
    chat.give(exited())
    chat.advance(5_000)
    chat.close()

    assert occasions(chat) == ["new", STOPPED]
    assert chat.service.unfinished() == []


def test_what_cannot_be_edited_gets_no_message_more() -> None:
    mail = chat_that(edits=False)
    mail.issue(ISSUE)
    mail.give(exited())
    mail.advance(5_000)
    mail.close()

    assert occasions(mail) == ["new"]
    assert mail.entries()[f"{ISSUE.issue_id}/stop"].state == "delivered"


def test_nothing_is_posted_where_no_message_was_kept(chat: VirtualNotices) -> None:
    chat.answers = [Outcome(done="posted")]
    chat.issue(ISSUE)
    chat.give(exited())
    chat.advance(5_000)

    assert occasions(chat) == ["new"]
    entry = chat.entries()[f"{ISSUE.issue_id}/mail/stopped"]
    assert (entry.state, entry.reason) == (
        "suppressed",
        "there is no message that can be edited",
    )


def test_the_newest_state_of_the_issue_is_shown_over_a_restart_too(chat: VirtualNotices) -> None:
    chat.issue(ISSUE)
    chat.advance(1_000)
    chat.issue(issue(raised_from="warning"))
    chat.restart()
    chat.give(exited())
    chat.advance(5_000)

    assert occasions(chat) == ["new", "worse", STOPPED]
    assert message_for(chat.notices[-1]).title.startswith("run stopped; now critical: ")


def test_the_end_of_the_issue_stays_the_last_word(chat: VirtualNotices) -> None:
    chat.issue(ISSUE)
    chat.issue(issue(resolved=True))
    chat.give(exited())
    chat.advance(5_000)
    assert occasions(chat) == ["new", "resolved", STOPPED]
    assert message_for(chat.notices[-1]).title.startswith("run stopped; resolved: ")

    # The condition has come back before the run has left: that message is about something else.
    again = chat_that(edits=True)
    again.issue(ISSUE)
    again.issue(issue(resolved=True))
    again.issue(ISSUE.model_copy(update={"times": 2}))
    again.give(exited())
    again.advance(5_000)
    again.close()
    assert occasions(again) == ["new", "resolved", "new"]


def test_a_worker_may_die_at_any_entry_of_the_ledger(chat: VirtualNotices) -> None:
    chat.issue(ISSUE)
    before = len(chat.ledger)
    chat.give(exited())
    chat.advance(5_000)
    whole = list(chat.ledger)
    assert len(whole) > before + 2

    for kept in range(before, len(whole) + 1):
        one = chat_that(edits=True)
        one.ledger = whole[:kept]
        one.restart(exited())
        one.advance(5_000)
        one.close()

        entries = one.entries()
        assert entries[f"{ISSUE.issue_id}/stop"].state == "delivered"
        assert entries[f"{ISSUE.issue_id}/mail/stopped"].state == "delivered"
        assert {note.delivery.delivery_id for note in one.notices} <= {
            delivery_id(ISSUE.issue_id, "mail", STOPPED)
        }


def test_a_message_tells_what_is_at_stake_and_what_the_stop_has_saved(
    chat: VirtualNotices,
) -> None:
    planned = {
        "devices": {"NVIDIA H100 80GB HBM3": 8},
        "last_step": 999,
        "outlook": Outlook(total_steps=10_000, step_s=3.6),
    }
    chat.give(view_record(view().model_copy(update=planned)))
    chat.issue(ISSUE)
    stop = StopView.model_validate({"state": "exited", "command_id": STOP_ID, "how": "edge"})
    ended = view(ended=True, stop=stop, next_offset=2)
    over = {"outcome": "stopped", "ended_ms": NOW_MS}
    chat.give(view_record(ended.model_copy(update={**planned, **over})))
    chat.advance(5_000)

    first, last = map(message_for, chat.notices)
    estimate = (
        "an estimated 72 GPU-hours (8 x H100 80GB HBM3, 9,000 of 10,000 steps left at 3.6 s each)"
    )
    assert f"At stake:         {estimate}\n" in first.text()
    assert f"Saved:            {estimate}\n" in last.text()


def test_a_message_says_nothing_of_what_is_not_known(chat: VirtualNotices) -> None:
    chat.give(view_record(view()))
    chat.issue(ISSUE)

    assert "At stake" not in message_for(chat.notices[0]).text()
