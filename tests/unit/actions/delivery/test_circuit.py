"""A receiver that fails is left alone: nobody else waits for it, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from support.actions.notices import notice
from support.actions.virtual_actions import VirtualActions
from support.records.issues import issue
from tocsin.actions.decision.retry import Decision, Outcome
from tocsin.actions.delivery.circuit import GONE, CircuitPolicy
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue, ReceiverQueues
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics

OK = Outcome(status=200, phrase="OK")
DOWN = Outcome(status=503, phrase="Service Unavailable")
HOUR_MS = 3_600_000
ISSUES = [issue(episode=str(nth), stop_worthy=False) for nth in range(60)]
MORE = "- action_failed: [ml, other]\n"


class Receiver:
    """Answers nothing but 503 while it is `down`."""

    def __init__(self, *, down: bool) -> None:
        self.down = down
        self.ids: list[str] = []

    def __call__(self, notice: Notice) -> Outcome:
        self.ids.append(notice.delivery.delivery_id)
        return DOWN if self.down else OK


async def test_it_opens_probes_and_closes_and_everything_arrives() -> None:
    ml, other = Receiver(down=True), Receiver(down=False)
    metrics = PrometheusMetrics()
    actions = VirtualActions({"ml": ml, "other": other}, metrics=metrics)
    for one in ISSUES:
        await actions.take(one)
    assert len(other.ids) == len(ISSUES), "the other receiver does not wait"

    await actions.until(HOUR_MS)
    assert metrics.value(names.SUSPENDED, receiver="ml") == 1
    assert metrics.value(names.SUSPENDED, receiver="other") == 0
    # The five that opened it; then one in 30 s, whoever it is.
    assert 100 <= len(ml.ids) <= 130
    waiting = actions.last("ml")
    assert {delivery.state for delivery in waiting} == {"pending"}
    last = max(waiting, key=lambda delivery: delivery.updated_ms)
    assert last.suspended_until_ms == last.updated_ms + 30_000

    ml.down = False
    # The next probe, and then each when its own wait is over.
    await actions.until(HOUR_MS + 331_000)
    assert {delivery.state for delivery in actions.last("ml")} == {"delivered"}
    assert set(actions.finals.values()) == {1}
    assert len(set(ml.ids)) == len(ISSUES)
    assert metrics.value(names.SUSPENDED, receiver="ml") == 0


async def test_one_that_never_comes_back_ends_all_its_deliveries_in_time() -> None:
    ml = Receiver(down=True)
    actions = VirtualActions({"ml": ml}, give_up_ms=HOUR_MS)
    for nth, one in enumerate(ISSUES):
        await actions.until(nth * 1_000)
        await actions.take(one)
    await actions.until(2 * HOUR_MS)

    ended = actions.last("ml")
    assert {delivery.state for delivery in ended} == {"expired"}
    assert set(actions.finals.values()) == {1}
    assert len(ended) == len(ISSUES)
    for delivery in ended:
        assert delivery.give_up_ms <= delivery.updated_ms <= delivery.give_up_ms + 31_000
    # It is not stormed when time is up: a failure counts for all that end before it.
    assert len(ml.ids) <= 2 * HOUR_MS / 30_000 + len(ISSUES) + 5


async def test_one_that_is_back_before_the_time_is_up_gets_all() -> None:
    ml = Receiver(down=True)
    actions = VirtualActions({"ml": ml}, give_up_ms=HOUR_MS)
    await actions.take(*ISSUES)
    await actions.until(HOUR_MS - 1)
    ml.down = False
    await actions.until(HOUR_MS + 2_000)
    assert {delivery.state for delivery in actions.last("ml")} == {"delivered"}


async def test_one_delivery_that_it_cannot_process_holds_up_no_other() -> None:
    sick = ISSUES[0].issue_id
    actions = VirtualActions({"ml": lambda n: DOWN if n.delivery.issue_id == sick else OK})
    await actions.take(ISSUES[0])
    await actions.until(HOUR_MS)
    before = len(actions.attempts)
    await actions.take(*ISSUES[1:])
    assert len(actions.attempts) - before == len(ISSUES) - 1
    states = [delivery.state for delivery in actions.last("ml")]
    assert states == ["pending", *["delivered"] * (len(ISSUES) - 1)]


async def test_what_is_not_sent_does_not_show_that_a_receiver_works() -> None:
    sick = ISSUES[5].issue_id
    refused = Outcome(forbidden="the ledger's entry holds no issue")
    actions = VirtualActions({"ml": lambda n: refused if n.delivery.issue_id == sick else DOWN})
    for one in ISSUES[:7]:
        await actions.take(one)
    assert actions.attempted == 5, "the circuit is open"
    await actions.until(HOUR_MS)
    assert actions.attempted <= 5 + 1 + HOUR_MS / 30_000
    assert {one.state for one in actions.last("ml")} == {"pending", "rejected"}


async def test_it_opens_after_as_many_deliveries_as_are_configured() -> None:
    ml = Receiver(down=True)
    circuit = CircuitPolicy(failures=2, probe_every_ms=5_000)
    actions = VirtualActions({"ml": ml}, circuit=circuit)
    for one in ISSUES[:3]:
        await actions.take(one)
    assert len(ml.ids) == 2
    await actions.until(4_999)
    assert len(ml.ids) == 2
    await actions.until(5_000)
    assert len(ml.ids) == 3


@pytest.mark.parametrize("more", [MORE, ""], ids=["configured", "by default"])
async def test_one_that_is_gone_is_asked_no_more_and_others_report_it(more: str) -> None:
    asked: list[str] = []

    def gone(notice: Notice) -> Outcome:
        asked.append(notice.delivery.rule)
        return Outcome(status=410, phrase="Gone")

    reports: list[str] = []

    def other(notice: Notice) -> Outcome:
        reports.append(notice.delivery.rule)
        return OK

    actions = VirtualActions({"ml": gone, "other": other}, more=more)
    await actions.take(ISSUES[0])
    await actions.take(*ISSUES[1:3])
    await actions.until(HOUR_MS)

    assert asked == ["nonfinite"]
    states = [(one.state, one.reason) for one in actions.last("ml") if one.rule == "nonfinite"]
    assert states == [("rejected", "410 Gone"), ("rejected", GONE), ("rejected", GONE)]
    (report,) = {one.issue_id: one for one in actions.issues}.values()
    assert (report.rule, report.subject.name) == ("action_failed", "ml")
    assert "410 Gone" in report.reason
    assert sorted(reports) == ["action_failed", "nonfinite", "nonfinite", "nonfinite"]
    assert actions.outputs["tocsin.dlq.v1"] == 3, "each can be sent once more"


async def test_one_that_is_gone_is_tried_again_when_its_configuration_is_read_again() -> None:
    async def gone(notice: Notice) -> Outcome:
        return Outcome(status=410, phrase="Gone")

    metrics = PrometheusMetrics()
    ml = ReceiverQueue(gone, circuit=CircuitPolicy())
    queues = ReceiverQueues({"ml": ml}, lambda _: None, crash=lambda _: None, metrics=metrics)
    given = notice(ISSUES[0], kind="ml")
    queues.start(given)
    await asyncio.sleep(0)
    assert queues.gate(given.delivery, given.now_ms) == Decision("rejected", GONE)
    assert metrics.value(names.SUSPENDED, receiver="ml") == 1
    queues.add({"ml": ml})
    assert queues.gate(given.delivery, given.now_ms) is None
    assert metrics.value(names.SUSPENDED, receiver="ml") == 0
