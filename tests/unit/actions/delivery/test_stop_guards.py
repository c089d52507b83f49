"""Stops that are not sent at once: by the mode, by limits, by the switch, by what people answer."""

from __future__ import annotations

import pytest

from support.actions.virtual_actions import VirtualActions
from support.records.issues import incarnation, issue, view, view_record
from support.records.signed import answer_record, switch_record
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.followed_stops import NEEDS_NOBODY
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.signing import SigningKey, TrustedKeys

KEY = SigningKey.generate()
MINUTE_MS = 60_000
ASK = "defaults: {mode: ask}\n"


class Bench:
    """A service with a receiver and stops, and what it sent."""

    def __init__(self, more: str = "") -> None:
        self.said: list[str] = []
        self.sent: list[Delivery] = []
        self.outcomes: list[Outcome] = []
        self.actions = VirtualActions(
            {"chat": self._chat},
            more=more,
            stops=self._stop,
            trusted=TrustedKeys([KEY.public]),
        )

    def _chat(self, notice: Notice) -> Outcome:
        self.said += notice.did
        return Outcome(status=200)

    def _stop(self, notice: Notice) -> Outcome:
        self.sent.append(notice.delivery)
        return self.outcomes.pop(0) if self.outcomes else Outcome(sent=True)

    @property
    def stops(self) -> list[Delivery]:
        return self.actions.last("stop")

    async def answer(self, verdict: str = "approve", by: str = "ana") -> None:
        (stop,) = self.stops
        data = StopAnswered.model_validate(
            {
                "run_id": stop.run_id,
                "incarnation": stop.incarnation,
                "delivery_id": stop.delivery_id,
                "verdict": verdict,
                "by": by,
                "at_ms": 1,
            }
        )
        await self.actions.follow(answer_record(data, KEY))


async def test_shadow_mode_sends_notices_and_no_stop() -> None:
    bench = Bench("defaults: {mode: shadow}\n")
    await bench.actions.take(issue())
    await bench.actions.until(MINUTE_MS)

    (stop,) = bench.stops
    assert (stop.state, stop.held) == ("suppressed", "shadow")
    assert bench.sent == []
    assert bench.said == ["It sent no stop: mode: shadow: the run would have been stopped."]


async def test_a_stop_waits_for_an_approval_and_notices_do_not() -> None:
    bench = Bench(ASK)
    await bench.actions.take(issue())
    await bench.actions.until(MINUTE_MS)

    (stop,) = bench.stops
    assert stop.waits_for_people
    assert bench.sent == []
    (said,) = bench.said
    assert said.startswith("It asks whether to stop the run: mode: ask: waits for `tocsin approve ")

    await bench.answer()
    assert [sent.delivery_id for sent in bench.sent] == [stop.delivery_id]
    # It is asked for now; nobody has answered that it is too late.
    await bench.actions.until(2 * MINUTE_MS)
    assert bench.stops[0].state == "pending"
    assert bench.stops[0].reason != ""


async def test_a_stop_that_is_rejected_is_never_sent() -> None:
    bench = Bench(ASK)
    await bench.actions.take(issue())
    await bench.answer("reject")
    await bench.actions.until(60 * MINUTE_MS)

    (stop,) = bench.stops
    assert (stop.state, stop.held, stop.reason) == (
        "suppressed",
        "rejected",
        "ana rejected the stop",
    )
    assert bench.sent == []


@pytest.mark.parametrize("on_timeout", ["skip", "stop"])
async def test_what_happens_if_nobody_answers(on_timeout: str) -> None:
    bench = Bench(
        "- loss_diverged: [{stop: {mode: ask, approve: "
        f"{{timeout: 5m, on_timeout: {on_timeout}}}}}}}]\n"
    )
    await bench.actions.take(issue(rule="loss_diverged"))
    await bench.actions.until(5 * MINUTE_MS - 1)
    assert bench.sent == []
    await bench.actions.until(6 * MINUTE_MS)

    (stop,) = bench.stops
    if on_timeout == "stop":
        assert len(bench.sent) == 1
        assert stop.state == "pending"
    else:
        assert bench.sent == []
        assert (stop.state, stop.held) == ("suppressed", "unanswered")


async def test_the_question_also_goes_to_a_receiver_of_its_own() -> None:
    bench = Bench("- loss_diverged: [{stop: {mode: ask, approve: {via: chat}}}]\n")
    await bench.actions.take(issue(rule="loss_diverged"))
    await bench.actions.until(MINUTE_MS)

    assert [said.partition(":")[0] for said in bench.said] == ["It asks whether to stop the run"]


async def test_a_stop_that_needs_nobody_ends_the_question() -> None:
    bench = Bench("- loss_diverged: [{stop: {mode: ask}}]\n")
    await bench.actions.take(issue(rule="loss_diverged"))
    await bench.actions.take(issue())

    question, stop = bench.stops
    assert (question.state, question.reason) == ("suppressed", NEEDS_NOBODY)
    assert [sent.delivery_id for sent in bench.sent] == [stop.delivery_id]


async def test_one_question_is_enough_for_a_run() -> None:
    bench = Bench(ASK)
    await bench.actions.take(issue(), issue(episode="2"))

    asked, other = bench.stops
    assert asked.waits_for_people
    assert other.reason == "people are asked already whether to stop the run, for another issue"


@pytest.mark.parametrize("how", ["resolved", "ended"])
async def test_a_question_ends_when_there_is_nothing_left_to_stop(how: str) -> None:
    bench = Bench(ASK)
    await bench.actions.take(issue())
    if how == "resolved":
        await bench.actions.take(issue(resolved=True))
    else:
        await bench.actions.follow(view_record(view(ended=True)))

    (stop,) = bench.stops
    assert stop.state == "suppressed"
    assert bench.sent == []


async def test_nothing_is_stopped_while_the_switch_is_off() -> None:
    bench = Bench()
    await bench.actions.follow(switch_record(KEY, at_ms=1))
    await bench.actions.take(issue())
    await bench.actions.follow(switch_record(KEY, off=False, at_ms=2))
    await bench.actions.take(issue("run-2"))

    off, on = bench.stops
    assert (off.state, off.held) == ("suppressed", "switch")
    assert off.reason == "all stops are switched off by ana: a wrong rule"
    assert [sent.delivery_id for sent in bench.sent] == [on.delivery_id]


async def test_the_switch_keeps_an_approved_stop_from_being_sent() -> None:
    bench = Bench(ASK)
    await bench.actions.take(issue())
    await bench.actions.follow(switch_record(KEY))
    await bench.answer()
    await bench.actions.until(MINUTE_MS)

    (stop,) = bench.stops
    assert (stop.state, bench.sent) == ("suppressed", [])
    assert "switched off by ana" in stop.reason


async def test_a_switch_or_an_answer_of_a_stranger_counts_for_nothing() -> None:
    bench = Bench()
    await bench.actions.follow(switch_record(SigningKey.generate()))
    await bench.actions.take(issue())
    assert len(bench.sent) == 1


async def test_limits_count_the_stops_of_the_hour_on_all_runs() -> None:
    bench = Bench("limits: {stops: {per_hour: 2}}\n")
    asked = StopView(state="requested", command_id="c", states={"requested": bench.actions.now_ms})
    await bench.actions.follow(view_record(view("run-9", stop=asked)))
    await bench.actions.take(issue("run-1"))
    await bench.actions.take(issue("run-2"))
    await bench.actions.until(61 * MINUTE_MS)
    await bench.actions.take(issue("run-3"))

    first, second, later = bench.stops
    assert (second.state, second.held) == ("suppressed", "limit")
    assert "stops within an hour: 2, permitted: 2" in second.reason
    assert [sent.delivery_id for sent in bench.sent] == [first.delivery_id, later.delivery_id]
    assert incarnation("run-3") == later.incarnation


async def test_beyond_a_limit_people_may_be_asked() -> None:
    bench = Bench("limits: {stops: {per_hour: 1, on_exceed: ask}}\n")
    await bench.actions.take(issue("run-1"))
    await bench.actions.take(issue("run-2"))

    stop = bench.stops[1]
    assert stop.waits_for_people
    assert stop.reason.startswith("beyond a limit: stops within an hour: 1")


async def test_a_stop_that_was_not_on_the_bus_is_tried_again() -> None:
    """The bus was away for a moment: until the command is on it, nobody can obey it."""
    bench = Bench()
    bench.outcomes = [Outcome(failure="bus away"), Outcome(failure="bus away")]
    await bench.actions.take(issue())
    await bench.actions.until(MINUTE_MS)

    (stop,) = bench.stops
    assert [attempt.result for attempt in stop.last_attempts] == ["bus away", "bus away", "sent"]
    assert len({sent.delivery_id for sent in bench.sent}) == 1
    # It is on the bus: it is not sent once more.
    await bench.actions.until(30 * MINUTE_MS)
    assert len(bench.sent) == 3
