"""Which notices are sent together and when they are repeated, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.actions.virtual_notices import START_MS, VirtualNotices
from support.records.issues import TOPICS, feedback, issue, issue_record, view
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.decision.silences import Silence
from tocsin.console.feedback.send import feedback_record
from tocsin.schemas.configuration.receivers import UrgentConfig
from tocsin.schemas.records.feedback import FeedbackAcknowledged, FeedbackFalseAlarm
from tocsin.schemas.records.issues import IssueOngoing
from tocsin.schemas.topics import issue_partition

Make = Callable[[NoticeTimes], VirtualNotices]
TOGETHER = NoticeTimes(group_by=("run",), wait_ms=2_000)
DAILY = NoticeTimes(repeat_ms=10_000)
BUSY = Outcome(status=503, phrase="Service Unavailable")


@pytest.fixture
def make() -> Iterator[Make]:
    """Workers, closed at the end."""
    made: list[VirtualNotices] = []

    def new(times: NoticeTimes) -> VirtualNotices:
        made.append(VirtualNotices(times, rules=("nonfinite", "loss_spike")))
        return made[-1]

    yield new
    for one in made:
        one.close()


def ids(worker: VirtualNotices) -> list[tuple[int, int]]:
    """When each message was sent, in seconds, and of how many deliveries it was."""
    return [((one.at_ms - START_MS) // 1000, len(one.keys)) for one in worker.sent]


def test_issues_of_a_group_are_one_message_and_each_has_its_entry(make: Make) -> None:
    worker = make(TOGETHER)
    worker.issue(issue())
    worker.advance(1_000)
    worker.issue(issue(rule="loss_spike", severity="warning"))
    worker.issue(issue(run="run-2"))
    worker.advance(3_000)

    assert ids(worker) == [(2, 2), (3, 1)]
    states = [(one.state, one.message_id, one.group) for one in worker.entries().values()]
    assert [state for state, *_ in states] == ["delivered"] * 3
    assert states[0][1:] == states[1][1:] == (worker.sent[0].message_id, "run=run-1")


def test_without_a_wait_each_issue_is_sent_at_once(make: Make) -> None:
    worker = make(NoticeTimes(group_by=("run",)))
    worker.issue(issue())
    worker.issue(issue(rule="loss_spike"))
    assert ids(worker) == [(0, 1), (0, 1)]


def test_a_message_is_tried_again_with_the_same_id_and_nothing_more_in_it(make: Make) -> None:
    worker = make(TOGETHER)
    worker.answers = [BUSY] * 3
    worker.issue(issue())
    worker.issue(issue(rule="loss_spike"))
    worker.advance(2_000)
    assert ids(worker) == [(2, 2)]
    worker.issue(issue(episode="2"))
    worker.advance(60_000)

    first = [one for one in worker.sent if one.message_id == worker.sent[0].message_id]
    assert len(first) > 1
    assert len({one.keys for one in first}) == 1
    assert [one.state for one in worker.entries().values()] == ["delivered"] * 3


def test_an_issue_that_comes_after_a_crash_does_not_join_what_was_attempted(make: Make) -> None:
    worker = make(TOGETHER)
    worker.issue(issue())
    worker.advance(2_000)
    # It was sent, and what came of it was lost.
    worker.ledger = [one for one in worker.ledger if b'"delivered"' not in (one.value or b"")]
    worker.restart(issue_record(issue(episode="2")))
    worker.advance(3_000)

    first, again, other = worker.sent
    assert (first.message_id, first.keys) == (again.message_id, again.keys)
    assert other.message_id != first.message_id


def test_a_message_has_issues_of_runs_of_one_partition(make: Make) -> None:
    worker = make(NoticeTimes(group_by=("rule",), wait_ms=2_000))
    runs = [f"run-{number}" for number in range(24)]
    for run in runs:
        worker.issue(issue(run=run, stop_worthy=False))
    worker.advance(3_000)
    # The partitions may go to different workers before the messages are due.
    assert len(worker.sent) == len({issue_partition(run) for run in runs})
    assert sum(len(one.keys) for one in worker.sent) == len(runs)


def test_two_messages_do_not_wait_for_each_other(make: Make) -> None:
    worker = make(TOGETHER)
    worker.issue(issue())
    worker.advance(3_000)
    worker.issue(issue(resolved=True))
    worker.advance(500)
    worker.issue(issue().model_copy(update={"times": 2}))
    worker.issue(issue(rule="loss_spike"))
    worker.issue(issue(rule="loss_spike", resolved=True))
    worker.advance(10_000)
    assert {one.state for one in worker.entries().values()} == {"delivered"}
    assert len(worker.entries()) == 5


def test_a_notice_is_repeated_until_somebody_acknowledges_it(make: Make) -> None:
    worker = make(DAILY)
    worker.issue(issue())
    worker.advance(25_000)
    assert ids(worker) == [(0, 1), (10, 1), (20, 1)]
    # A repeat that waits keeps nobody from leaving.
    assert worker.service.unfinished() == []
    worker.restart()
    worker.give(feedback_record(TOPICS, feedback(FeedbackAcknowledged, issue())))
    worker.advance(60_000)
    assert len(worker.sent) == 3
    last = worker.entries()[f"{issue().issue_id}/mail/firing/repeat/3"]
    assert (last.state, last.reason) == ("suppressed", "acknowledged by ana@node")

    worse = issue(raised_from="warning")
    worker.issue(worse)
    worker.advance(10_000)
    assert ids(worker)[3:] == [(85, 1), (95, 1)]


@pytest.mark.parametrize("how", ["rule", "person", "run"])
def test_a_notice_is_not_repeated_after_the_end(make: Make, how: str) -> None:
    worker = make(DAILY)
    worker.issue(issue())
    worker.advance(1_000)
    if how == "rule":
        worker.issue(issue(resolved=True))
    elif how == "person":
        worker.give(feedback_record(TOPICS, feedback(FeedbackFalseAlarm, issue())))
    else:
        worker.service._runs.follow(view(ended=True), START_MS)
    worker.advance(60_000)
    assert ids(worker) == [(0, 1)] if how == "run" else [(0, 1), (1, 1)]
    assert {one.state for one in worker.entries().values()} == {"delivered", "suppressed"}


def test_an_urgent_notice_is_repeated_often_at_first(make: Make) -> None:
    urgent = UrgentConfig.model_validate({"every": "10s", "for": "25s"})
    worker = make(NoticeTimes(repeat_ms=60_000, urgent={"mail": urgent}))
    worker.issue(issue())
    worker.issue(issue(rule="loss_spike", severity="warning"))
    worker.advance(100_000)
    assert ids(worker) == [(0, 1), (0, 1), (10, 1), (20, 1), (30, 1), (60, 1), (90, 1)]


def test_repeats_of_a_group_are_one_message(make: Make) -> None:
    worker = make(NoticeTimes(group_by=("run",), wait_ms=2_000, repeat_ms=10_000))
    worker.issue(issue())
    worker.advance(1_000)
    worker.issue(issue(rule="loss_spike"))
    worker.advance(22_000)
    assert ids(worker) == [(2, 2), (12, 2), (22, 2)]


def test_a_silenced_repeat_is_left_out_and_comes_again_after_the_silence(make: Make) -> None:
    worker = make(NoticeTimes(group_by=("run",), wait_ms=2_000, repeat_ms=10_000))
    silence = Silence(
        match={"rule": ("loss_spike",)}, from_ms=START_MS + 5_000, until_ms=START_MS + 15_000,
        mutes=["notify"], by="ana", why="known", decided_by="tocsin.yaml:9:3",
    )  # fmt: skip
    worker.silences = (silence,)
    worker.restart()
    worker.issue(issue())
    worker.issue(issue(rule="loss_spike"))
    worker.advance(23_000)

    assert ids(worker) == [(2, 2), (12, 1), (22, 2)]
    held = [one for one in worker.entries().values() if one.state == "suppressed"]
    assert [one.reason.startswith("silenced by ana until") for one in held] == [True]


def test_a_repeat_has_what_the_issue_says_by_then(make: Make) -> None:
    worker = make(DAILY)
    worker.issue(issue())
    later = issue(raised_from="info", severity="warning").model_copy(update={"reason": "1e9 now"})
    worker.issue(later)
    pending = worker.entries()[f"{issue().issue_id}/mail/firing/repeat/1"]
    assert pending.event is not None
    assert pending.event["data"]["reason"] == "1e9 now"


def test_a_receiver_that_is_away_is_not_flooded_with_repeats(make: Make) -> None:
    worker = make(DAILY)
    worker.answers = [BUSY] * 4
    worker.issue(issue())
    worker.advance(120_000)
    firsts = [one for one in worker.sent if not one.keys[0].rpartition("/")[2].isdigit()]
    assert len(firsts) == 5
    repeated = [one.at_ms for one in worker.sent if one not in firsts]
    assert min(repeated) >= firsts[-1].at_ms


@pytest.mark.parametrize("restarted", [False, True])
def test_repeats_go_on_after_a_late_notice_and_a_worse_one(make: Make, restarted: bool) -> None:
    worker = make(NoticeTimes(repeat_ms=60_000))
    worker.silences = (
        Silence(
            match={}, from_ms=START_MS, until_ms=START_MS + 30_000, mutes=["notify"], by="ana",
            why="known", decided_by="tocsin.yaml:9:3",
        ),
    )  # fmt: skip
    worker.restart()
    worker.issue(issue(severity="warning"))
    worker.advance(40_000)
    worker.issue(IssueOngoing(**dict(issue(severity="warning"))))
    worker.advance(10_000)
    worker.issue(issue(raised_from="warning"))
    worker.advance(5_000)
    if restarted:
        worker.restart()
    worker.advance(120_000)
    assert ids(worker) == [(40, 1), (50, 1), (110, 1), (170, 1)]
