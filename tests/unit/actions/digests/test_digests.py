"""Digests in virtual time: once in an interval, whatever happens to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from support.records.issues import NOW_MS, TOPICS, delivery, issue, runs_view, view
from tocsin.actions.decision.decide import Decisions
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.decision.routing import Routing
from tocsin.actions.decision.time_windows import TimeWindows
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.actions.digests.facts import digest_of
from tocsin.actions.digests.intervals import ALL_RUNS, DigestReceiver, DueDigest
from tocsin.actions.receivers.message import message_for
from tocsin.bus.port import BusUnavailable, Outgoing, Record
from tocsin.runtime.leased_runs import Skip
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.routing.time_windows import TimeWindow
from tocsin.schemas.records.deliveries import DIGEST, Delivery
from tocsin.schemas.records.digests import Digest
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.topics import ISSUE_PARTITIONS, issue_partition

DAY_MS = 86_400_000
MIDNIGHT_MS = NOW_MS // DAY_MS * DAY_MS
ALL = frozenset(range(ISSUE_PARTITIONS))
TO = DigestReceiver("email", DAY_MS, "tocsin.yaml:4:5")


def well(at_ms: int = NOW_MS) -> RunsView:
    """One run, which has been running for a long time and is so then."""
    known = RunsView()
    running = {"started_ms": 1, "last_step": 1200, "last_loss": 0.25}
    known.add(view().model_copy(update=running), append_ms=at_ms)
    return known


@dataclass
class Worker:
    """One worker of the service; the ledger is the bus's."""

    ledger: list[Outgoing]
    owned: frozenset[int] = ALL
    only: Collection[str] | None = None
    known: RunsView | None = None
    """None: one run is running at any time."""
    away: int = 0
    """How many reads of the bus fail."""
    windows: bool = False
    sent: list[Notice] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    reads: int = 0

    def __post_init__(self) -> None:
        receivers, windows = {}, TimeWindows({})
        if self.windows:
            morning = TimeWindow.model_validate({"weekly": ["08:00-09:00"], "time_zone": "UTC"})
            windows = TimeWindows({"morning": morning})
            receivers["mail"] = ReceiverConfig(type="email", active=("morning",))
        decisions = Decisions(Routing({}), windows=windows, receivers=receivers)
        setup = Setup(decisions, {"mail": ReceiverQueue(self._attempt)}, digests={"mail": TO})
        self.service = ActionsService(TOPICS, setup, read_digest=self._read)
        only = None if self.only is None else frozenset(self.only)
        self.service.attached(Attachment(nudge=lambda: None, only_runs=only))
        records = [self._record(one) for one in self.ledger]
        for number in self.owned:
            mine = [one for one in records if one.partition.number == number]
            self.service.restore(number, mine)

    async def at(self, now_ms: int) -> None:
        """Work until there is nothing to do at this time."""
        for _ in range(6):
            assert not self.service.apply([], Tick(now_ms, self.owned))
            self.ledger += self.service.outputs()
            await self.service.checkpointed(now_ms)
            for _ in range(3):
                await asyncio.sleep(0)

    def entries(self) -> list[Delivery]:
        """The newest state of each entry of the ledger."""
        found: dict[str, Delivery] = {}
        for one in self.ledger:
            data = EVENT_TYPES.decode(one.value or b"").data
            assert isinstance(data, Delivery)
            found[data.key] = data
        return list(found.values())

    async def _attempt(self, notice: Notice) -> Outcome:
        self.sent.append(notice)
        return self.outcomes.pop(0) if self.outcomes else Outcome(done="ok")

    async def _read(self, due: DueDigest, skip: Skip | None) -> Digest:
        self.reads += 1
        if self.away:
            self.away -= 1
            raise BusUnavailable("away")
        return digest_of(well(due.until_ms) if self.known is None else self.known, due)

    def _record(self, one: Outgoing) -> Record:
        return Record(one.partition, 1, NOW_MS, one.key, one.value, one.headers)


@pytest.fixture
def ledger() -> list[Outgoing]:
    return []


async def test_one_message_for_each_interval_over_restarts(ledger: list[Outgoing]) -> None:
    seen: list[str] = []
    for day in range(3):
        for hour in (0, 1, 13, 23):
            worker = Worker(ledger)
            await worker.at(MIDNIGHT_MS + day * DAY_MS + hour * 3_600_000)
            seen += [one.delivery.delivery_id for one in worker.sent]

    assert len(seen) == 3
    days = [MIDNIGHT_MS + (day - 1) * DAY_MS for day in range(3)]
    assert seen == [
        DueDigest("mail", ALL_RUNS, from_ms, from_ms + DAY_MS).delivery_id for from_ms in days
    ]
    assert {one.state for one in worker.entries()} == {"delivered"}


async def test_a_worker_that_stays_awakes_at_the_end_of_the_interval(
    ledger: list[Outgoing],
) -> None:
    worker = Worker(ledger)
    await worker.at(MIDNIGHT_MS + 1)
    assert len(worker.sent) == 1
    assert worker.service.next_due_ms() == MIDNIGHT_MS + DAY_MS
    await worker.at(MIDNIGHT_MS + DAY_MS)
    assert (len(worker.sent), worker.reads) == (2, 2)


async def test_only_the_worker_that_has_its_partition_sends_it(ledger: list[Outgoing]) -> None:
    number = issue_partition(ALL_RUNS)
    others = Worker(ledger, owned=ALL - {number})
    mine = Worker(ledger, owned=frozenset({number}))
    for hours in range(30):
        for worker in (others, mine):
            await worker.at(MIDNIGHT_MS + hours * 3_600_000)

    assert (len(others.sent), len(mine.sent), others.reads) == (0, 2, 0)
    # The one that has it dies between its attempt and the entry; the next one repeats the id.
    await mine.at(MIDNIGHT_MS + 2 * DAY_MS)
    del ledger[-1]
    after = Worker(ledger)
    await after.at(MIDNIGHT_MS + 2 * DAY_MS + 1)
    assert after.sent[0].delivery.delivery_id == mine.sent[-1].delivery.delivery_id


async def test_the_helper_of_a_run_tells_of_that_run(ledger: list[Outgoing]) -> None:
    worker = Worker(ledger, only=["run-1"])
    await worker.at(MIDNIGHT_MS)
    (sent,) = worker.sent
    assert sent.delivery.run_id == "run-1"


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (RunsView(), "no run was running in this interval"),
        (
            runs_view(
                view().model_copy(update={"started_ms": 1}),
                delivery(issue(), "mail", state="delivered", updated_ms=MIDNIGHT_MS - 1),
            ),
            "other notices that the receiver got in this interval: 1",
        ),
    ],
)
async def test_what_is_not_sent_is_in_the_ledger(
    ledger: list[Outgoing], known: RunsView, why: str
) -> None:
    worker = Worker(ledger, known=known)
    await worker.at(MIDNIGHT_MS)
    await worker.at(MIDNIGHT_MS + 60_000)
    assert worker.sent == []
    assert [(one.state, one.reason, one.occasion) for one in worker.entries()] == [
        ("suppressed", why, DIGEST)
    ]
    assert worker.reads == 1


async def test_a_window_puts_it_off(ledger: list[Outgoing]) -> None:
    worker = Worker(ledger, windows=True)
    await worker.at(MIDNIGHT_MS)
    await worker.at(MIDNIGHT_MS + 8 * 3_600_000 - 1)
    assert worker.sent == []
    await worker.at(MIDNIGHT_MS + 8 * 3_600_000)
    assert len(worker.sent) == 1


async def test_it_is_tried_again_when_the_bus_or_the_receiver_was_away(
    ledger: list[Outgoing],
) -> None:
    worker = Worker(ledger, away=1, outcomes=[Outcome(status=503)])
    await worker.at(MIDNIGHT_MS)
    assert (worker.reads, worker.sent) == (1, [])
    assert worker.service.next_due_ms() == MIDNIGHT_MS + 60_000
    await worker.at(MIDNIGHT_MS + 60_000)
    await worker.at(MIDNIGHT_MS + 120_000)

    assert len(worker.sent) == 2
    assert len({one.delivery.delivery_id for one in worker.sent}) == 1
    assert [one.state for one in worker.entries()] == ["delivered"]


def due() -> DueDigest:
    return DueDigest.last("mail", ALL_RUNS, DAY_MS, MIDNIGHT_MS + 5)


def test_what_it_says() -> None:
    ended = view("run-2", ended=True).model_copy(
        update={"started_ms": 5, "outcome": "completed", "last_step": 99}
    )
    later = view("run-3").model_copy(update={"started_ms": MIDNIGHT_MS})
    held = delivery(issue(), "mail", state="suppressed", held="silence", updated_ms=MIDNIGHT_MS - 1)
    elsewhere = delivery(
        issue(), "chat", state="suppressed", held="silence", updated_ms=MIDNIGHT_MS - 1
    )
    known = well()
    for each in (ended, later, held, elsewhere):
        known.add(each, append_ms=NOW_MS)

    found = digest_of(known, due())

    assert [(one.run_id, one.state, one.last_step) for one in found.runs] == [
        ("run-2", "ended", 99),
        ("run-1", "running", 1200),
    ]
    assert found.suppressed == {"silence": 1}
    assert digest_of(known, due(), ["run-1"]).all_runs == 1


def test_an_issue_is_never_nothing_wrong() -> None:
    known = well()
    open_issue = issue(severity="warning").model_copy(
        update={"onset_ms": MIDNIGHT_MS - 5, "at_ms": MIDNIGHT_MS - 5}
    )
    known.add(open_issue, append_ms=NOW_MS)
    found = digest_of(known, due())
    assert (found.issues, found.open) == (1, 1)

    known.add(issue(rule="overfit", severity="info"), append_ms=NOW_MS)
    assert digest_of(known, due()) == found


async def test_the_message_is_short_and_counts_what_was_held(ledger: list[Outgoing]) -> None:
    known = well()
    held = delivery(
        issue(), "mail", state="suppressed", held="time_window", updated_ms=MIDNIGHT_MS - 1
    )
    known.add(held, append_ms=NOW_MS)
    worker = Worker(ledger, known=known)
    await worker.at(MIDNIGHT_MS)

    text = message_for(worker.sent[0]).text()

    lines = text.splitlines()
    assert lines[0] == "DIGEST: All is well: 1 run, nothing wrong"
    assert "Run:              run-1: running, step 1,200, loss 0.25" in lines
    assert "Suppressed:       1 (time window)" in lines
    assert lines[-1].endswith("decided by tocsin.yaml:4:5")
    assert worker.sent[0].delivery.key.endswith("/mail/digest")
