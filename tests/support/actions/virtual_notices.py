"""The action service in virtual time: real decisions and ledger, a receiver that only notes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from support.records.issues import TOPICS, issue_record
from tocsin.actions.decision.decide import Decisions
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.decision.routing import Routing
from tocsin.actions.decision.silences import Silence
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.bus.port import Outgoing, Record
from tocsin.runtime.service import Tick
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import ISSUE_PARTITIONS

ALL = frozenset(range(ISSUE_PARTITIONS))
RECEIVER = "mail"
START_MS = 1_795_258_000_000


async def _asked_to_stop(notice: Notice) -> Outcome:
    return Outcome(sent=True)


@dataclass(frozen=True)
class Sent:
    """A message as the receiver got it: when, under which id, with which deliveries."""

    at_ms: int
    message_id: str
    keys: tuple[str, ...]


@dataclass
class VirtualNotices:
    """One worker of the service on an endless bus, with the receiver `mail`."""

    times: NoticeTimes
    rules: tuple[str, ...] = ("nonfinite",)
    now_ms: int = START_MS
    sent: list[Sent] = field(default_factory=list)
    answers: list[Outcome] = field(default_factory=list)
    """The next ones; when there is none, each message is delivered."""
    ledger: list[Outgoing] = field(default_factory=list)
    one_alert: bool = False
    stops: bool = False
    """Whether issues stop their run, too."""
    edits: bool = False
    """Whether the receiver can edit its messages."""
    notices: list[Notice] = field(default_factory=list)
    """As the receiver got them."""
    silences: tuple[Silence, ...] = ()
    unsaved: int | None = None
    """How long the ledger was when the first message of this moment was sent, if nothing was read
    since."""
    _offset: int = 0

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.service = self._new()

    def close(self) -> None:
        """End the loop."""
        self.loop.run_until_complete(self.service.ended())
        self.loop.close()

    def give(self, value: Outgoing) -> None:
        """A record of the issues topic is read."""
        self.unsaved = None
        self._rounds([self._record(value)])

    def issue(self, value: IssueFiring) -> None:
        """A state of an issue is read."""
        self.give(issue_record(value))

    def advance(self, ms: int, tick_ms: int = 500) -> None:
        """Time passes; the worker has a round in each tick."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + tick_ms)
            self.unsaved = None
            self._rounds([])

    def lose_results(self) -> None:
        """The worker dies before what came of its last messages is in the ledger."""
        del self.ledger[self.unsaved :]
        self.restart()

    def restart(self, *read: Outgoing) -> None:
        """The worker dies without another word; another one continues, and reads these first."""
        self.loop.run_until_complete(self.service.ended())
        self.service = self._new()
        records = [self._record(one) for one in self.ledger]
        for number in sorted(ALL):
            mine = [one for one in records if one.partition.number == number]
            self.service.restore(number, mine)
        self._rounds([self._record(one) for one in read])

    def entries(self) -> Mapping[str, Delivery]:
        """The newest state of each delivery by its key."""
        found: dict[str, Delivery] = {}
        for one in self.ledger:
            data = EVENT_TYPES.decode(one.value or b"").data
            assert isinstance(data, Delivery)
            found[data.key] = data
        return found

    def _new(self) -> ActionsService:
        stop = [ActionEntry(kind="stop")] if self.stops else []
        actions = (*stop, ActionEntry(kind="receiver", receiver=RECEIVER))
        entries = {rule: RuleEntry(name=rule, use=rule, actions=actions) for rule in self.rules}
        queue = ReceiverQueue(
            self._attempt,
            groups=not self.one_alert and not self.edits,
            one_alert=self.one_alert,
            edits=self.edits,
        )
        routing = Routing(entries, kinds={RECEIVER: "email"})
        decisions = Decisions(routing, times=self.times, silences=self.silences)
        queues = {RECEIVER: queue, STOP: ReceiverQueue(_asked_to_stop)}
        return ActionsService(TOPICS, Setup(decisions, queues))

    async def _attempt(self, notice: Notice) -> Outcome:
        deliveries = (notice.delivery, *notice.others)
        self.notices.append(notice)
        if self.unsaved is None:
            self.unsaved = len(self.ledger)
        keys = tuple(sorted(one.key for one in deliveries))
        self.sent.append(Sent(self.now_ms, notice.delivery.message_id, keys))
        assert {one.message_id for one in deliveries} == {notice.delivery.message_id}
        return self.answers.pop(0) if self.answers else Outcome(done="ok")

    def _rounds(self, records: list[Record]) -> None:
        self.loop.run_until_complete(self._until_quiet(records))

    async def _until_quiet(self, records: list[Record]) -> None:
        while True:
            poison = self.service.apply(records, Tick(self.now_ms, ALL))
            assert not poison, poison
            records = []
            outputs = [
                one for one in self.service.outputs() if one.partition.topic == TOPICS.actions
            ]
            self.ledger += outputs
            await self.service.checkpointed(self.now_ms)
            for _ in range(4):
                await asyncio.sleep(0)
            if not outputs and not self.service._inbox:
                return

    def _record(self, value: Outgoing) -> Record:
        self._offset += 1
        key, headers = value.key, value.headers
        return Record(value.partition, self._offset, self.now_ms, key, value.value, headers)
