"""Issues that others explain, and receivers that were not told: over their time, by the service."""

from __future__ import annotations

from datetime import UTC, datetime

from support.actions.virtual_actions import VirtualActions
from support.records.issues import NOW_MS, feedback, issue, view
from tocsin.actions.decision.decide import START_NOT_SENT
from tocsin.actions.decision.inhibitions import WAIT_MS
from tocsin.actions.decision.open_issues import OpenIssues
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.simulation import Simulation
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.feedback import FeedbackAcknowledged
from tocsin.schemas.records.issues import Issue, IssueFiring, IssueOngoing
from tocsin.schemas.topics import issue_partition

INHIBIT = """- loss_spike: [chat]
inhibit: [{when: {rule: nonfinite}, mute: {rule: loss_spike}}]
"""
SPIKE = issue(rule="loss_spike", severity="warning")
CAUSE = issue()
GOES_ON = IssueOngoing(**dict(SPIKE))
OVER = issue(rule="loss_spike", severity="warning", resolved=True)


def accept(notice: Notice) -> Outcome:
    return Outcome(status=200)


def virtual(more: str = INHIBIT) -> VirtualActions:
    return VirtualActions({"chat": accept}, more=more)


def again(found: Issue) -> Issue:
    """A state of the issue when its condition has come back."""
    return found.model_copy(update={"times": 2})


def event_of(data: Data) -> Event[Data]:
    return Event.wrap(data, id="1", source="/test", time_ms=NOW_MS)


def became(actions: VirtualActions, found: IssueFiring) -> list[Delivery]:
    """The newest states of the deliveries about an issue."""
    return [one for one in actions.last("chat") if one.issue_id == found.issue_id]


async def test_a_cause_that_comes_shortly_after_withdraws_the_notice() -> None:
    actions = virtual()
    await actions.take(SPIKE)
    await actions.until(WAIT_MS - 1)
    assert actions.attempts == []
    await actions.take(CAUSE)
    await actions.until(60_000)

    (spike,) = became(actions, SPIKE)
    assert (spike.state, spike.held, spike.attempts) == ("suppressed", "inhibition", 0)
    assert spike.reason.startswith("explained by the open issue ")
    assert [one.state for one in became(actions, CAUSE)] == ["delivered"]


async def test_a_cause_that_comes_later_withdraws_nothing_that_was_sent() -> None:
    actions = virtual()
    await actions.take(SPIKE)
    await actions.until(WAIT_MS)
    await actions.take(CAUSE, OVER)
    await actions.until(60_000)
    assert [one.state for one in became(actions, SPIKE)] == ["delivered", "delivered"]


async def test_what_outlives_its_cause_is_told_when_it_goes_on() -> None:
    actions = virtual()
    await actions.take(CAUSE, SPIKE, GOES_ON)
    await actions.until(60_000)
    assert [one.state for one in became(actions, SPIKE)] == ["suppressed"]

    await actions.take(issue(resolved=True), GOES_ON)
    await actions.until(120_000)
    _held, late = became(actions, SPIKE)
    assert (late.state, late.occasion, late.key) == (
        *("delivered", "late"),
        f"{SPIKE.issue_id}/chat/late",
    )
    await actions.take(GOES_ON, OVER)
    await actions.until(180_000)
    assert [one.state for one in became(actions, SPIKE)] == [
        *("suppressed", "delivered", "delivered")
    ]
    assert all(count == 1 for count in actions.finals.values())


async def test_who_did_not_get_the_start_does_not_get_the_end() -> None:
    actions = virtual()
    await actions.take(CAUSE, SPIKE, OVER)
    await actions.until(60_000)
    start, end = became(actions, SPIKE)
    assert start.held == "inhibition"
    assert (end.state, end.reason, end.held) == ("suppressed", START_NOT_SENT, None)


async def test_an_answer_that_waits_to_be_shown_does_not_hinder_a_cause() -> None:
    text = """version: 1
secrets: {pd: {env: PD}}
receivers: {oncall: {type: pagerduty, routing_key: {secret: pd}}}
routes: [{notify: [oncall]}]
inhibit: [{when: {rule: nonfinite}, mute: {rule: loss_spike}}]
"""
    config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
    assert config is not None, problems
    actions = Simulation(config, path=None, now_ms=NOW_MS)
    await actions.apply(event_of(SPIKE))
    await actions.until(NOW_MS + 5_000)

    answer = feedback(FeedbackAcknowledged, SPIKE)
    await actions.apply(event_of(answer), event_of(CAUSE))
    await actions.until(NOW_MS + 60_000)

    found = {(one.rule, one.action): one.state for one in actions.deliveries.values()}
    assert found["nonfinite", "oncall"] == "delivered"
    assert ("nonfinite", "stop") in found


async def test_an_issue_that_comes_back_and_is_held_is_told_when_it_goes_on() -> None:
    actions = virtual()
    await actions.take(SPIKE)
    await actions.until(60_000)
    await actions.take(OVER, CAUSE, again(SPIKE))
    await actions.until(120_000)
    assert [one.state for one in became(actions, SPIKE)] == ["delivered", "delivered", "suppressed"]

    await actions.take(issue(resolved=True), again(GOES_ON))
    await actions.until(180_000)
    late = became(actions, SPIKE)[-1]
    assert (late.state, late.occasion, late.issue_times) == ("delivered", "late", 2)
    await actions.take(again(OVER))
    await actions.until(240_000)
    end = became(actions, SPIKE)[-1]
    assert (end.state, end.occasion, end.issue_times) == ("delivered", "resolved", 2)


async def test_the_end_of_an_issue_that_came_back_unheard_is_not_told() -> None:
    actions = virtual()
    await actions.take(SPIKE)
    await actions.until(60_000)
    await actions.take(OVER, CAUSE, again(SPIKE), again(OVER))
    await actions.until(120_000)
    end = became(actions, SPIKE)[-1]
    assert (end.state, end.reason) == ("suppressed", START_NOT_SENT)


async def test_what_was_withdrawn_is_late_where_notices_are_repeated_too() -> None:
    actions = virtual(INHIBIT + "defaults: {repeat_interval: 1h}\n")
    await actions.take(SPIKE, CAUSE)
    await actions.until(60_000)
    assert {one.state for one in became(actions, SPIKE)} == {"suppressed"}
    await actions.take(issue(resolved=True), GOES_ON)
    await actions.until(120_000)
    sent = [one for one in became(actions, SPIKE) if one.state == "delivered"]
    assert [one.occasion for one in sent] == ["late"]


async def test_a_cause_that_is_soon_over_does_not_end_the_repeats() -> None:
    actions = virtual(INHIBIT + "defaults: {repeat_interval: 1h}\n")
    await actions.take(SPIKE)
    await actions.until(5_400_000)
    await actions.take(CAUSE)
    await actions.until(5_700_000)
    await actions.take(issue(resolved=True))
    await actions.until(5 * 3_600_000)
    sent = [one for one in became(actions, SPIKE) if one.state == "delivered"]
    assert [one.repeat for one in sent] == [0, 1, 2, 3, 4]


async def test_a_consequence_is_folded_while_its_cause_is_open() -> None:
    actions = virtual("- loss_spike: [chat]\n")
    effect = SPIKE.model_copy(update={"consequence_of": CAUSE.issue_id})
    await actions.take(CAUSE, effect)
    await actions.until(60_000)
    (folded,) = became(actions, SPIKE)
    assert (folded.state, folded.held) == ("suppressed", "cause")

    on = GOES_ON.model_copy(update={"consequence_of": CAUSE.issue_id})
    await actions.take(on, issue(resolved=True), on)
    await actions.until(120_000)
    assert [one.state for one in became(actions, SPIKE)] == ["suppressed", "delivered"]


async def test_what_is_muted_at_night_is_told_in_the_morning_if_it_goes_on() -> None:
    until = datetime.fromtimestamp(NOW_MS / 1000 + 3600, UTC)
    actions = virtual(f"""- loss_spike: [by_route]
routes: [{{notify: [chat], mute: night}}]
time_windows: {{night: {{weekly: ["00:00-{until:%H:%M}"], time_zone: UTC}}}}
""")
    await actions.take(SPIKE)
    (held,) = became(actions, SPIKE)
    assert (held.state, held.held) == ("suppressed", "time_window")
    await actions.until(3_600_000)
    await actions.take(GOES_ON)
    await actions.until(3_700_000)
    assert [one.state for one in became(actions, SPIKE)] == ["suppressed", "delivered"]


async def test_a_route_that_is_muted_at_night_repeats_nothing_then() -> None:
    opened = datetime.fromtimestamp(NOW_MS / 1000 + 1800, UTC)
    actions = virtual(f"""- loss_spike: [by_route]
routes: [{{notify: [chat], mute: night}}]
defaults: {{repeat_interval: 1h}}
time_windows: {{night: {{weekly: ["{opened:%H:%M}-24:00"], time_zone: UTC}}}}
""")
    await actions.take(SPIKE)
    await actions.until(7_200_000)
    assert [name for _, name in actions.attempts] == ["chat"]


def test_after_a_restart_what_was_read_is_open_and_what_was_not_is_not() -> None:
    entry = InhibitEntry(when={"rule": ("nonfinite",)}, mute={"rule": ("loss_spike",)})
    issues = OpenIssues([entry])
    partition = issue_partition("run-1")
    over = issue(episode="2", resolved=True)
    later = issue(episode="3")
    states = (CAUSE, issue(episode="2"), over, SPIKE, later)
    for offset, state in enumerate(states):
        issues.restore(partition, offset, state)
    assert list(issues.in_training("run-1", CAUSE.incarnation)) == []
    issues.restored(partition, 4)
    known = list(issues.in_training("run-1", CAUSE.incarnation))
    assert [one.issue_id for one in known] == [CAUSE.issue_id]
    assert issues.explains(CAUSE)
    assert not issues.explains(later)
    issues.release([partition])
    assert not issues.explains(CAUSE)


def test_open_issues_are_bounded_and_forgotten_with_their_training() -> None:
    entry = InhibitEntry(when={"severity": ("critical",)}, mute={"severity": ("warning",)})
    issues = OpenIssues([entry])
    for number in range(300):
        issues.note(issue(episode=str(number)))
    assert len(list(issues.in_training("run-1", CAUSE.incarnation))) == 256
    issues.follow(view())
    assert list(issues.in_training("run-1", CAUSE.incarnation))
    issues.follow(view(ended=True))
    assert not list(issues.in_training("run-1", CAUSE.incarnation))
