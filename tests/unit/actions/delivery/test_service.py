"""The action service in a worker on a real bus, with a real HTTP receiver."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import SecretStr
from standardwebhooks.webhooks import Webhook

from support.records.issues import (
    NOW_MS,
    TOPICS,
    feedback,
    incarnation,
    issue,
    issue_record,
    view,
    view_record,
)
from support.servers.certificates import authority
from support.servers.editable_chats import BOT, editable_chats
from support.servers.fault_server import FaultServer, fault_server
from support.servers.smtp_server import smtp_server
from support.waiting import SOON_S, until
from tocsin.actions.composition import build_actions_service
from tocsin.actions.decision.retry import RetryPolicy
from tocsin.actions.delivery.order import SUPERSEDED
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.receivers.chat import kind as chat_kind
from tocsin.actions.receivers.chat.editable import Telegram
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Outgoing, Partition, Record
from tocsin.console.dead_letters.letters import letter_text, letters_json
from tocsin.console.dead_letters.redrive import read_contents
from tocsin.console.feedback.send import feedback_record
from tocsin.console.views.bus_view import read_view
from tocsin.console.views.status import status_json
from tocsin.console.views.why import story_facts, story_lines, story_of
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config, SectionRegistry, check_config
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.deliveries import ACKNOWLEDGED, Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.feedback import (
    FeedbackAcknowledged,
    FeedbackFalseAlarm,
    FeedbackResolved,
)
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.stops.commands import StopRequested, stop_key
from tocsin.schemas.records.wire import read_signature
from tocsin.schemas.signing import SigningKey, TrustedKeys
from tocsin.schemas.topics import DLQ_PARTITIONS, issue_partition

KEY = SigningKey.generate()
SECRETS = {"hook": SecretStr("planted-SECRET-1"), "url": SecretStr("")}
QUICK = RetryPolicy(first_ms=20, most_ms=40, least_ms=5)


@dataclass
class Bench:
    """A bus, a receiver, and workers on demand."""

    bus: EmbeddedBus
    server: FaultServer

    def config(self, path: str = "/status/200", *, more: str = "", actions: str = "[ml]") -> Config:
        text = f"""version: 1
secrets: {{hook: {{env: H}}, url: {{env: U}}}}
receivers:
  ml:
    type: webhook
    url: "{self.server.url(path)}?token=planted-SECRET-2"
    sign: {{key: {{secret: hook}}}}
    {more}
rules:
  - nonfinite: {actions}
"""
        config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
        assert config is not None, problems
        return config

    def pager(self, path: str) -> Config:
        """With a receiver of the type pagerduty in place of the webhook."""
        config = self.config(path)
        text = f"""version: 1
secrets: {{hook: {{env: H}}}}
receivers:
  ml: {{type: pagerduty, routing_key: {{secret: hook}}, url: "{self.server.url(path)}"}}
"""
        pager, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
        assert pager is not None, problems
        return config.model_copy(update={"receivers": pager.receivers})

    def sent(self) -> list[str]:
        """What PagerDuty was posted, in its order."""
        return [json.loads(request.body)["event_action"] for request in self.server.seen]

    @asynccontextmanager
    async def worker(
        self, config: Config, *, only_runs: Sequence[str] | None = None, **more: object
    ) -> AsyncIterator[tuple[Worker, ActionsService]]:
        service = build_actions_service(
            TOPICS,
            config,
            bus=self.bus,
            key=KEY,
            **{"secrets": SECRETS, "embedded": True, "policy": QUICK, **more},  # type: ignore[arg-type]
        )
        worker = Worker(
            self.bus,
            service,
            topics=TOPICS,
            group="actions",
            only_runs=only_runs,
            settings=WorkerSettings(checkpoint_s=0.05),
        )
        task = asyncio.create_task(worker.run())
        try:
            yield worker, service
        finally:
            worker.stop()
            await task

    async def send(self, *records: Outgoing) -> None:
        producer = await self.bus.producer()
        await producer.publish(records)
        await producer.close()

    async def read(self, topic: str, number: int) -> list[Record]:
        partition = Partition(topic, number)
        reader = await self.bus.reader({partition: EARLIEST})
        end = (await reader.ends([partition]))[partition]
        records: list[Record] = []
        while await reader.position(partition) < end:
            records += await reader.poll(timeout_s=1.0)
        await reader.close()
        return records

    async def ledger(self, run: str = "run-1") -> dict[str, list[Delivery]]:
        """All states of each delivery of a run, in their order, by action."""
        found: dict[str, list[Delivery]] = {}
        for record in await self.read(TOPICS.actions, issue_partition(run)):
            data = EVENT_TYPES.decode(record.value or b"").data
            assert isinstance(data, Delivery)
            if data.run_id == run:
                again = f"/{data.issue_times}" if data.issue_times > 1 else ""
                about = data.occasion if data.occasion == ACKNOWLEDGED else data.issue_state
                key = f"{data.action}/{about}{again}"
                found.setdefault(key, []).append(data)
        return found

    async def commands(self, run: str = "run-1") -> list[Record]:
        return await self.read(TOPICS.control, issue_partition(run))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with fault_server() as server, EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield Bench(bus, server)


async def test_an_issue_and_its_end_are_delivered_signed_and_recorded(bench: Bench) -> None:
    async with bench.worker(bench.config()) as (worker, service):
        await bench.send(issue_record(issue()), issue_record(issue(resolved=True)))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert len(bench.server.seen) == 2
    for request in bench.server.seen:
        Webhook(b"planted-SECRET-1").verify(request.body, request.headers)
    ledger = await bench.ledger()
    assert {name: [d.state for d in states] for name, states in ledger.items()} == {
        "ml/firing": ["pending", "delivered"],
        "ml/resolved": ["pending", "delivered"],
    }
    assert ledger["ml/firing"][0].decided_by.startswith("config: rules.0")


async def test_an_issue_that_turns_critical_is_told_a_second_time(bench: Bench) -> None:
    states = (
        issue(severity="warning"),
        issue(raised_from="warning", stop_worthy=False),
        issue(resolved=True),
    )
    async with bench.worker(bench.config()) as (worker, service):
        await bench.send(*map(issue_record, states))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert list(await bench.ledger()) == ["ml/firing", "ml/ongoing", "ml/resolved"]
    sent = [json.loads(request.body) for request in bench.server.seen]
    assert sorted((event["type"], event["data"]["severity"]) for event in sent) == [
        ("tocsin.issue.firing", "warning"),
        ("tocsin.issue.ongoing", "critical"),
        ("tocsin.issue.resolved", "critical"),
    ]


async def test_an_unsent_stop_of_one_that_turned_critical_is_withdrawn(bench: Bench) -> None:
    raised = issue(raised_from="warning")
    await bench.send(issue_record(raised), issue_record(issue(resolved=True)))
    async with bench.worker(Config()) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)
    assert (await bench.ledger())["stop/ongoing"][-1].state == "suppressed"
    assert await bench.commands() == []


async def test_an_unsent_stop_is_withdrawn_when_its_issue_is_over_some_times_later(
    bench: Bench,
) -> None:
    over = issue(resolved=True).model_copy(update={"times": 3})
    await bench.send(issue_record(issue()), issue_record(over))
    async with bench.worker(Config()) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)
    assert (await bench.ledger())["stop/firing"][-1].state == "suppressed"
    assert await bench.commands() == []


async def test_an_issue_that_fires_again_has_notices_and_a_stop_of_its_own(bench: Bench) -> None:
    again = issue().model_copy(update={"times": 2})
    states = (issue(), issue(resolved=True), again)
    await bench.send(*map(issue_record, states))
    async with bench.worker(bench.config(actions="[ml, stop]")) as (worker, service):
        assert await worker.caught_up(10)
        assert not await service.drain(1)

    ledger = await bench.ledger()
    assert ledger["stop/firing"][-1].state == "suppressed"
    assert ledger["stop/firing/2"][-1].state == "pending"
    assert ledger["ml/firing/2"][-1].state == "delivered"
    assert len(await bench.commands()) == 1


async def test_it_is_tried_until_it_works_with_one_id(bench: Bench) -> None:
    async with bench.worker(bench.config("/then/503,429,500,200")) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert set(bench.server.ids()) == {delivery_id(issue().issue_id, "ml", "firing")}
    states = (await bench.ledger())["ml/firing"]
    assert [d.attempts for d in states] == [0, 1, 2, 3, 4]
    assert [a.result for a in states[-1].last_attempts] == [
        "503 Service Unavailable",
        "429 Too Many Requests",
        "500 Internal Server Error",
        "200 OK",
    ]


async def test_a_delivery_is_timed_from_the_append_of_its_issue_to_the_end(bench: Bench) -> None:
    metrics = PrometheusMetrics()
    config = bench.config("/then/503,200")
    async with bench.worker(config, metrics=metrics) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    [appended] = await bench.read(TOPICS.issues, issue_partition("run-1"))
    took_s = ((await bench.ledger())["ml/firing"][-1].updated_ms - appended.append_ms) / 1000
    assert metrics.value(f"{names.DELIVERY}_count", kind="webhook") == 1
    assert metrics.value(f"{names.DELIVERY}_sum", kind="webhook") == pytest.approx(took_s)
    assert metrics.value(names.ATTEMPTS, kind="webhook") == 2


async def test_what_is_given_up_is_not_timed_as_delivered(bench: Bench) -> None:
    metrics = PrometheusMetrics()
    async with bench.worker(bench.config("/status/400"), metrics=metrics) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert metrics.value(names.DELIVERIES, kind="webhook", state="rejected") == 1
    assert metrics.value(f"{names.DELIVERY}_count", kind="webhook") == 0


async def test_what_is_given_up_becomes_a_dead_letter_with_its_event(bench: Bench) -> None:
    config = bench.config("/status/503", more="retry: {give_up_after: 1s}")
    async with bench.worker(config) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    final = (await bench.ledger())["ml/firing"][-1]
    assert (final.state, final.event) == ("expired", None)
    letters = [r for n in range(DLQ_PARTITIONS) for r in await bench.read(TOPICS.dlq, n)]
    assert [DeadLetter.read(letter.headers).error for letter in letters] == ["Expired"]
    data = EVENT_TYPES.decode(letters[0].value or b"").data
    assert isinstance(data, Delivery)
    assert data.event is not None


async def failures(bench: Bench) -> list[IssueFiring]:
    """The issues that say so, each once."""
    records = await bench.read(TOPICS.issues, issue_partition("run-1"))
    found = [EVENT_TYPES.decode(record.value or b"").data for record in records]
    issues = [one for one in found if isinstance(one, IssueFiring) and one.rule == "action_failed"]
    return list({one.issue_id: one for one in issues}.values())


async def test_what_is_given_up_is_an_issue_that_the_other_receivers_tell(bench: Bench) -> None:
    more = f"""retry: {{give_up_after: 1s}}
  other:
    type: webhook
    url: "{bench.server.url("/status/500")}"
    retry: {{give_up_after: 1s}}
  well: {{type: webhook, url: "{bench.server.url("/status/200")}"}}"""
    config = bench.config("/status/503", more=more)
    names = ("ml", "other", "well")
    actions = tuple(ActionEntry(kind="receiver", receiver=name) for name in names)
    entry = RuleEntry(name="action_failed", use="action_failed", actions=actions)
    config = config.model_copy(update={"rules": (*config.rules, entry)})
    async with bench.worker(config) as (worker, service):
        await bench.send(issue_record(issue()), issue_record(issue(episode="2")))
        assert await worker.caught_up(10)
        assert await service.drain(10)
        assert await worker.caught_up(10)
        assert await service.drain(10)

    (told,) = await failures(bench)
    assert (told.severity, told.subject.name, told.run_id) == ("warning", "ml", "run-1")
    assert "503" in told.reason
    # Both rules notify `ml`, and a notice of the other one may be given up last.
    about = {
        name: state.state
        for name, states in (await bench.ledger()).items()
        for state in states
        if state.rule == "action_failed"
    }
    # The one that it is about is not asked to tell it; that another fails, too, tells nobody.
    assert about == {
        "ml/firing": "suppressed",
        "other/firing": "expired",
        "well/firing": "delivered",
    }


async def test_switched_off_a_failure_is_a_dead_letter_only(bench: Bench) -> None:
    config = bench.config("/status/503", more="retry: {give_up_after: 1s}")
    entry = RuleEntry(name="action_failed", use="action_failed", off=True)
    config = config.model_copy(update={"rules": (*config.rules, entry)})
    async with bench.worker(config) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)
    assert await failures(bench) == []


async def test_a_dead_receiver_delays_neither_another_one_nor_a_stop(bench: Bench) -> None:
    more = f"""retry: {{give_up_after: 1h}}
  quick: {{type: webhook, url: "{bench.server.url("/status/200")}"}}"""
    config = bench.config("/timeout", more=more, actions="[ml, quick, stop]")
    async with bench.worker(config) as (_, _service):
        started = time.monotonic()
        await bench.send(*(issue_record(issue(episode=str(i))) for i in range(40)))
        quick = "/status/200"
        await until(lambda: sum(s.path == quick for s in bench.server.seen) == 40)
        assert await bench.commands()
        # One after another, forty attempts at the dead one would take minutes.
        assert time.monotonic() - started < SOON_S


async def test_a_stop_is_signed_sent_once_and_done_when_the_run_says_so(bench: Bench) -> None:
    command_id = delivery_id(issue().issue_id, "stop", "firing")
    async with bench.worker(Config()) as (worker, service):
        await bench.send(view_record(view()), issue_record(issue()))
        assert await worker.caught_up(10)
        await bench.send(issue_record(issue(episode="2")))
        assert await worker.caught_up(10)
        assert not await service.drain(0.1)
        assert [d.delivery_id for d in service.unfinished("run-1")] == [command_id]
        exited = StopView(state="exited", command_id=command_id, how="edge", exit_code=79)
        await bench.send(view_record(view(ended=True, stop=exited, next_offset=2)))
        assert await service.drain(10, "run-1")

    (record,) = await bench.commands()
    assert record.key == stop_key("run-1", incarnation()).encode()
    TrustedKeys([KEY.public]).verify(
        record.key, record.value or b"", read_signature(record.headers)
    )
    command = EVENT_TYPES.decode(record.value or b"").data
    assert isinstance(command, StopRequested)
    assert command.incarnation == incarnation()
    states = (await bench.ledger())["stop/firing"]
    assert [(d.state, d.reason) for d in states if d.delivery_id == command_id] == [
        ("pending", "to be sent"),
        ("pending", "sent, waiting for the run's answer"),
        ("delivered", "the job exited cleanly with exit code 79"),
    ]
    assert [(d.state, d.reason) for d in states if d.delivery_id != command_id] == [
        ("suppressed", "the run is being stopped already, for another issue"),
    ]


async def test_a_refused_stop_is_rejected_and_the_next_incarnation_is_another_matter(
    bench: Bench,
) -> None:
    command_id = delivery_id(issue().issue_id, "stop", "firing")
    async with bench.worker(Config()) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        refused = StopView(state="refused", command_id=command_id, reason="no trusted key")
        await bench.send(view_record(view(stop=refused)))
        assert await service.drain(10)
        await bench.send(view_record(view(training=1, next_offset=2)))
        await bench.send(issue_record(issue(training=1)))
        assert await worker.caught_up(10)
        await until(lambda: any(stop.attempts for stop in service.unfinished()))

    states = (await bench.ledger())["stop/firing"]
    assert [d.state for d in states][2] == "rejected"
    assert "no trusted key" in states[2].reason
    assert {r.key for r in await bench.commands()} == {
        stop_key("run-1", incarnation()).encode(),
        stop_key("run-1", incarnation(training=1)).encode(),
    }


async def test_a_person_acknowledges_and_resolves_at_those_who_were_notified(bench: Bench) -> None:
    found = issue(stop_worthy=False)
    acked, closed = (feedback(kind, found) for kind in (FeedbackAcknowledged, FeedbackResolved))
    async with bench.worker(bench.pager("/status/202")) as (worker, service):
        # Nobody was notified of this one.
        await bench.send(feedback_record(TOPICS, feedback(FeedbackResolved, issue(episode="2"))))
        await bench.send(issue_record(found), feedback_record(TOPICS, acked))
        await bench.send(*[feedback_record(TOPICS, closed)] * 2)
        assert await worker.caught_up(10)
        assert await service.drain(10)
        # The rule comes to the same end later: receivers have it already.
        await bench.send(issue_record(issue(stop_worthy=False, resolved=True)))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    ledger = await bench.ledger()
    assert ledger.keys() == {"ml/firing", "ml/acknowledged", "ml/resolved"}
    assert "resolve" in bench.sent()
    assert ledger["ml/resolved"][-1].decided_by.startswith("resolved by ana@node; config: ")


async def test_pagerduty_shows_that_an_alert_is_acknowledged(bench: Bench) -> None:
    found = issue(stop_worthy=False)
    async with bench.worker(bench.pager("/status/202")) as (worker, service):
        await bench.send(issue_record(found))
        await until(lambda: bench.sent() == ["trigger"])
        await bench.send(feedback_record(TOPICS, feedback(FeedbackAcknowledged, found)))
        await until(lambda: bench.sent() == ["trigger", "acknowledge"])
        assert await worker.caught_up(10)
        assert await service.drain(10)
    assert json.loads(bench.server.seen[1].body)["dedup_key"] == found.issue_id


async def test_an_issue_that_a_person_calls_a_false_alarm_stops_nothing(bench: Bench) -> None:
    await bench.send(
        issue_record(issue()), feedback_record(TOPICS, feedback(FeedbackFalseAlarm, issue()))
    )
    async with bench.worker(bench.config(actions="[ml, stop]")) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)
    assert (await bench.ledger())["stop/firing"][-1].state == "suppressed"
    over = next(
        data
        for request in bench.server.seen
        if (data := json.loads(request.body)["data"])["reason"].endswith("false alarm by ana@node)")
    )
    assert over["issue_id"] == issue().issue_id
    assert await bench.commands() == []


async def test_a_run_that_has_ended_is_not_stopped(bench: Bench) -> None:
    async with bench.worker(Config()) as (worker, service):
        await bench.send(view_record(view(ended=True)))
        await asyncio.sleep(0.02)
        await until(lambda: "run-1" in service._runs)
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert [d.state for d in (await bench.ledger())["stop/firing"]] == ["suppressed"]
    assert await bench.commands() == []


async def test_a_run_whose_view_is_taken_away_is_forgotten(bench: Bench) -> None:
    async with bench.worker(Config()) as (_, service):
        last = view_record(view(ended=True))
        await bench.send(last)
        await until(lambda: "run-1" in service._runs)
        await bench.send(Outgoing(last.partition, last.key, None))
        await until(lambda: "run-1" not in service._runs)


async def test_the_end_of_an_earlier_incarnation_does_not_forbid_the_stop_of_the_next(
    bench: Bench,
) -> None:
    async with bench.worker(Config()) as (worker, service):
        await bench.send(view_record(view(ended=True)))
        await until(lambda: "run-1" in service._runs)
        await bench.send(issue_record(issue(training=1)))
        assert await worker.caught_up(10)
        await until(lambda: any(d.attempts for d in service.unfinished()))

    (command,) = await bench.commands()
    assert command.key == stop_key("run-1", incarnation(training=1)).encode()


async def test_a_later_incarnation_is_not_stopped_for_an_earlier_one(bench: Bench) -> None:
    later = view_record(view(training=1), time_ms=NOW_MS + 1)
    async with bench.worker(Config()) as (worker, service):
        await bench.send(later)
        await until(lambda: "run-1" in service._runs)
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    (delivery,) = (await bench.ledger())["stop/firing"]
    assert (delivery.state, delivery.reason) == (
        "suppressed",
        "another incarnation of the run has begun",
    )


async def test_an_issue_older_than_its_receiver_waits_is_not_sent(bench: Bench) -> None:
    await bench.send(issue_record(issue()))
    await asyncio.sleep(0.02)
    async with bench.worker(bench.config(more="retry: {give_up_after: 10ms}")) as (_, service):
        await until(
            lambda: bool(service._ledger.knows(delivery_id(issue().issue_id, "ml", "firing")))
        )
        assert await service.drain(10)

    (delivery,) = (await bench.ledger())["ml/firing"]
    assert delivery.state == "suppressed"
    assert "old, and a notice is given up after" in delivery.reason
    assert bench.server.seen == []


async def test_no_stop_says_so_in_the_ledger(bench: Bench) -> None:
    async with bench.worker(Config(), stop=False) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    (only,) = (await bench.ledger())["stop/firing"]
    assert (only.state, "--no-stop" in only.reason) == ("suppressed", True)


async def test_the_next_worker_goes_on_where_the_ledger_is(bench: Bench) -> None:
    async with bench.worker(bench.config("/then/503,200")) as (worker, _):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        await until(lambda: bool(bench.server.seen))
    async with bench.worker(bench.config("/then/503,200")) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert len(set(bench.server.ids())) == 1
    assert (await bench.ledger())["ml/firing"][-1].state == "delivered"


async def test_an_issue_that_is_read_with_its_end_stops_nothing(bench: Bench) -> None:
    await bench.send(issue_record(issue()), issue_record(issue(resolved=True)))
    async with bench.worker(Config()) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)

    last = (await bench.ledger())["stop/firing"][-1]
    assert (last.state, last.reason) == (
        "suppressed",
        "the issue was resolved before the stop was sent",
    )
    assert await bench.commands() == []


async def known(service: ActionsService, state: str, attempts: int = 0) -> None:
    """Wait until the ledger has the delivery of the issue in this state, with such attempts."""
    identity = delivery_id(issue().issue_id, "ml", state)

    def there() -> bool:
        found = service._ledger.get(identity)
        return found is not None and found.attempts >= attempts

    await until(there)


LATER = RetryPolicy(first_ms=1_000, most_ms=1_000, least_ms=1_000)


async def test_an_alert_that_was_resolved_is_not_opened_again_by_a_retry(bench: Bench) -> None:
    async with bench.worker(bench.pager("/then/503,202"), policy=LATER) as (worker, service):
        await bench.send(issue_record(issue()))
        await known(service, "firing", attempts=1)
        await bench.send(issue_record(issue(resolved=True)))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert bench.sent() == ["trigger", "resolve"]
    ledger = await bench.ledger()
    assert [d.state for d in ledger["ml/firing"]] == ["pending", "pending", "suppressed"]
    last = ledger["ml/firing"][-1]
    assert (last.reason, last.attempts, last.event) == (SUPERSEDED, 1, None)
    assert ledger["ml/resolved"][-1].state == "delivered"


async def test_a_restart_does_not_open_an_alert_that_was_resolved(bench: Bench) -> None:
    bench.server.answers.clear()
    async with bench.worker(bench.pager("/status/202")) as (_, service):
        await bench.send(issue_record(issue()))
        await until(lambda: len(bench.server.seen) == 1)
        await bench.send(issue_record(issue(resolved=True)))
        await known(service, "resolved")
    # The first attempt was cut off: nothing has come of it, and both are pending.
    assert {states[-1].state for states in (await bench.ledger()).values()} == {"pending"}

    bench.server.answers.set()
    async with bench.worker(bench.pager("/status/202")) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)
    assert bench.sent() == ["trigger", "resolve"]
    ledger = await bench.ledger()
    assert (ledger["ml/firing"][-1].state, ledger["ml/firing"][-1].reason) == (
        "suppressed",
        SUPERSEDED,
    )
    assert ledger["ml/resolved"][-1].state == "delivered"


async def test_an_alert_that_waits_for_its_retry_over_a_restart_is_superseded(
    bench: Bench,
) -> None:
    async with bench.worker(bench.pager("/then/503,202"), policy=LATER) as (_, service):
        await bench.send(issue_record(issue(severity="warning")))
        await known(service, "firing", attempts=1)
    await bench.send(issue_record(issue(raised_from="warning", stop_worthy=False)))
    async with bench.worker(bench.pager("/then/503,202"), policy=LATER) as (worker, service):
        assert await worker.caught_up(10)
        assert await service.drain(10)

    severities = [json.loads(one.body)["payload"]["severity"] for one in bench.server.seen]
    assert severities == ["warning", "critical"]
    assert (await bench.ledger())["ml/firing"][-1].reason == SUPERSEDED


@pytest.mark.parametrize(("first", "last"), [("202", "delivered"), ("503", "suppressed")])
async def test_the_end_of_an_alert_waits_for_the_attempt_under_way(
    bench: Bench, first: str, last: str
) -> None:
    bench.server.answers.clear()
    config = bench.pager(f"/then/{first},202")
    async with bench.worker(config, policy=LATER) as (worker, service):
        await bench.send(issue_record(issue()))
        await until(lambda: len(bench.server.seen) == 1)
        await bench.send(issue_record(issue(resolved=True)))
        await known(service, "resolved")
        await asyncio.sleep(0.3)
        assert bench.sent() == ["trigger"]
        bench.server.answers.set()
        assert await worker.caught_up(10)
        assert await service.drain(10)

    assert bench.sent() == ["trigger", "resolve"]
    ledger = await bench.ledger()
    assert ledger["ml/firing"][-1].state == last
    assert ledger["ml/resolved"][-1].state == "delivered"


async def test_a_message_is_sent_after_the_first_attempt_of_the_one_before(bench: Bench) -> None:
    bench.server.answers.clear()
    async with bench.worker(bench.config("/then/503,200"), policy=LATER) as (worker, service):
        await bench.send(issue_record(issue()), issue_record(issue(resolved=True)))
        await known(service, "resolved")
        await until(lambda: len(bench.server.seen) == 1)
        await asyncio.sleep(0.3)
        assert len(bench.server.seen) == 1
        bench.server.answers.set()
        assert await worker.caught_up(10)
        assert await service.drain(10)

    # Both are delivered, and the retry of one does not keep the other.
    kinds = [json.loads(request.body)["type"].split(".")[-1] for request in bench.server.seen]
    assert kinds == ["firing", "resolved", "firing"]
    states = {name: found[-1].state for name, found in (await bench.ledger()).items()}
    assert states == {"ml/firing": "delivered", "ml/resolved": "delivered"}


async def test_a_repeated_issue_does_nothing_more(bench: Bench) -> None:
    async with bench.worker(bench.config()) as (worker, service):
        await bench.send(issue_record(issue()), issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)

    assert len(bench.server.seen) == 1


async def test_a_helper_leaves_other_runs_alone(bench: Bench) -> None:
    other = next(r for i in range(99) if issue_partition(r := f"x{i}") == issue_partition("run-1"))
    async with bench.worker(bench.config("/status/503")) as (worker, _):
        await bench.send(issue_record(issue(other)))
        assert await worker.caught_up(10)
    before = len(bench.server.seen)
    async with bench.worker(bench.config(), only_runs=["run-1"]) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    new = bench.server.seen[before:]
    assert [b'"run-1"' in request.body for request in new] == [True]


async def test_a_worker_finds_addresses_that_were_kept_while_it_runs(bench: Bench) -> None:
    kept: dict[str, list[str]] = {}
    async with bench.worker(bench.config(), kept_addresses=lambda: kept) as (worker, service):
        await bench.send(issue_record(issue()))
        assert await worker.caught_up(10)
        kept[incarnation("run-2")] = [bench.server.url("/status/200?kept")]
        await bench.send(issue_record(issue("run-2")), issue_record(issue("run-3")))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    notified = [request for request in bench.server.seen if request.path.endswith("?kept")]
    assert [json.loads(request.body)["data"]["run_id"] for request in notified] == ["run-2"]


async def test_two_workers_share_and_nothing_is_sent_twice(bench: Bench) -> None:
    runs = [f"run-{i}" for i in range(24)]
    config = bench.config()
    async with bench.worker(config) as (_, first), bench.worker(config) as (_, second):
        await until(lambda: len(first._owned) == len(second._owned) == 6, 20)
        await bench.send(*(issue_record(issue(run)) for run in runs))
        await until(lambda: len(bench.server.seen) >= 24)
        assert await first.drain(10)
        assert await second.drain(10)

    assert len(bench.server.ids()) == len(set(bench.server.ids())) == 24


POSTED = {
    "webhook": "sign: {key: {secret: hook}}, headers: {x-key: {secret: hook}}",
    "pagerduty": "routing_key: {secret: hook}",
    "incident_io": "token: {secret: hook}",
    "goalert": "",
    "alertmanager": "token: {secret: hook}",
}
"""The kinds that are posted to, each with all its secrets."""


async def test_planted_secrets_are_nowhere(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path = "/cycle/503,reset,307,400?token=planted-SECRET-2"
    receivers = "\n".join(
        f'  {kind}: {{type: {kind}, url: "{bench.server.url(path)}", {more}}}'
        for kind, more in POSTED.items()
    )
    text = f"""version: 1
secrets: {{hook: {{env: H}}}}
receivers:
{receivers}
rules:
  - nonfinite: [{", ".join(POSTED)}]
"""
    config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
    assert config is not None, problems
    async with bench.worker(config) as (worker, service):
        await bench.send(issue_record(issue(stop_worthy=False)))
        assert await worker.caught_up(10)
        assert await service.drain(10)

    ledger = await bench.ledger()
    assert {states[-1].state for states in ledger.values()} == {"rejected"}
    assert {states[-1].kind for states in ledger.values()} == set(POSTED)
    assert len([*bench.server.seen]) > len(POSTED), "some were tried again"
    written = [
        record
        for spec in TOPICS.specs()
        for number in range(spec.partitions)
        for record in await bench.read(spec.name, number)
    ]
    assert len(written) >= 3 * len(POSTED), "dead letters, too"
    view, dead = await read_view(bench.bus, TOPICS), await read_contents(bench.bus, TOPICS)
    story = story_of(view, {}, view.issues[0])
    shown = [
        caplog.text,
        *map(str, story_lines(story)),
        json.dumps(story_facts(story)),
        status_json(view),
        letters_json(dead.letters, dead.ledger),
        *(line for letter in dead.letters for line in letter_text(letter, dead.ledger)),
    ]
    assert len(dead.letters) == len(POSTED)
    assert "SECRET" not in "\n".join(shown)
    for record in written:
        assert b"SECRET" not in record.key + (record.value or b"")
        assert all(b"SECRET" not in value for _, value in record.headers)


@pytest.mark.slow
async def test_planted_secrets_of_mail_and_chat_are_nowhere(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    trusted = authority(tmp_path / "tls", "localhost")
    async with smtp_server(starttls=trusted.context, login=True) as mailbox:
        text = f"""version: 1
secrets: {{password: {{env: P}}, chat: {{env: C}}}}
receivers:
  mail:
    type: email
    to: [me@example.com]
    smtp:
      host: localhost
      port: {mailbox.port}
      starttls: true
      ca: {trusted.ca}
      username: planted-SECRET-user
      password: {{secret: password}}
  chat: {{type: chat, url: {{secret: chat}}, retry: {{give_up_after: 1s}}}}
rules:
  - nonfinite: [mail, chat]
"""
        config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
        assert config is not None, problems
        chat = f"mmost://127.0.0.1:{bench.server.port}/status/planted-SECRET-token-in-a-url"
        secrets = {"password": SecretStr("planted-SECRET-wrong"), "chat": SecretStr(chat)}
        async with bench.worker(config, secrets=secrets) as (worker, service):
            await bench.send(issue_record(issue()), issue_record(issue(resolved=True)))
            assert await worker.caught_up(10)
            assert await service.drain(60)

    ledger = await bench.ledger()
    # That it failed is an issue, too.
    mails = [entry for entry in ledger["mail/firing"] if entry.rule == "nonfinite"]
    assert [entry.state for entry in mails] == ["pending", "rejected"]
    assert mails[-1].reason == "535 log-in refused"
    assert {entry.kind for entries in ledger.values() for entry in entries} == {"email", "chat"}
    assert {entries[-1].final for entries in ledger.values()} == {True}
    for spec in TOPICS.specs():
        for number in range(spec.partitions):
            for record in await bench.read(spec.name, number):
                assert b"SECRET" not in record.key + (record.value or b"")
    # What the mail server of the test logs is not ours.
    said = [r.getMessage() for r in caplog.records if not r.name.startswith("mail.")]
    assert "SECRET" not in "\n".join(said)


async def test_one_message_is_edited_by_the_worker_that_comes_after_a_restart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"version: 1\nreceivers: {{ml: {{type: chat, url: 'tgram://{BOT}/42'}}}}\n"
    chat, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
    assert chat is not None, problems
    config = bench.config().model_copy(update={"receivers": chat.receivers})
    async with editable_chats() as chats:
        here = Telegram(SecretStr(BOT), "42", base=chats.url)
        monkeypatch.setattr(chat_kind, "editable_chat", lambda url: here)
        for found in (issue(), issue(resolved=True)):
            async with bench.worker(config) as (worker, service):
                await bench.send(issue_record(found))
                assert await worker.caught_up(10)
                assert await service.drain(10)

    first, answer = chats.messages.items()
    assert first[1].text.startswith("resolved: nonfinite in run-1")
    assert answer[1].to == first[0]
    assert [state.handle for state in (await bench.ledger())["ml/firing"]][-1] == first[0]


async def test_the_message_shows_that_the_run_was_stopped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"version: 1\nreceivers: {{ml: {{type: chat, url: 'tgram://{BOT}/42'}}}}\n"
    chat, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
    assert chat is not None, problems
    config = bench.config(actions="[stop, ml]").model_copy(update={"receivers": chat.receivers})
    command_id = delivery_id(issue().issue_id, "stop", "firing")
    async with editable_chats() as chats:
        here = Telegram(SecretStr(BOT), "42", base=chats.url)
        monkeypatch.setattr(chat_kind, "editable_chat", lambda url: here)
        async with bench.worker(config) as (worker, service):
            await bench.send(view_record(view()), issue_record(issue()))
            assert await worker.caught_up(10)
            assert not await service.drain(0.1)
        async with bench.worker(config) as (worker, service):
            assert await worker.caught_up(10)
            exited = StopView(state="exited", command_id=command_id, how="edge", exit_code=79)
            await bench.send(view_record(view(ended=True, stop=exited, next_offset=2)))
            assert await service.drain(10, "run-1")

    ((_, message),) = chats.messages.items()
    assert message.text.startswith("run stopped; critical: nonfinite in run-1")
    assert "What tocsin did: It stopped the run." in message.text
    view_now = await read_view(bench.bus, TOPICS)
    story = list(story_lines(story_of(view_now, {}, view_now.issues[0])))
    assert any(str(line).strip().startswith("ml (stopped)") for line in story), story


async def test_after_a_restart_an_open_issue_still_explains_others(bench: Bench) -> None:
    entry = InhibitEntry(when={"rule": ("nonfinite",)}, mute={"rule": ("loss_spike",)})
    told = ActionEntry(kind="receiver", receiver="ml")
    spike = RuleEntry(name="loss_spike", use="loss_spike", actions=(told,))
    config = bench.config()
    config = config.model_copy(update={"rules": (*config.rules, spike), "inhibit": (entry,)})
    for states in ([issue()], [issue(rule="loss_spike"), issue(resolved=True)]):
        async with bench.worker(config) as (worker, service):
            await bench.send(*map(issue_record, states))
            assert await worker.caught_up(10)
            assert await service.drain(10)

    held = [
        states[-1] for states in (await bench.ledger()).values() if states[-1].rule == "loss_spike"
    ]
    assert [(one.state, one.held) for one in held] == [("suppressed", "inhibition")]
