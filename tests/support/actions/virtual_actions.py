"""The action service without a worker, a bus or a socket, whose clock is moved by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from support.records.issues import NOW_MS, TOPICS, issue_record
from tocsin.actions.config import decisions_of, routing_of
from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.circuit import CircuitPolicy
from tocsin.actions.delivery.failure_reports import FailureReports
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.bus.port import Outgoing, Record
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.wire import read_event
from tocsin.schemas.signing import TrustedKeys
from tocsin.schemas.topics import ISSUE_PARTITIONS

Answer = Callable[[Notice], Outcome]


class VirtualActions:
    """An action service whose receivers answer as the functions of these names say.

    Attributes:
        states: of each delivery, in their order.
        finals: how many final states each delivery has had.
        attempts: when (milliseconds since the start), and at which receiver.
        attempted: how many attempts were made. Without `keep` nothing but this and `outputs`.
        outputs: how many records were written to each topic.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer],
        *,
        rule: str = "nonfinite",
        more: str = "",
        give_up_ms: int = 24 * 3_600_000,
        circuit: CircuitPolicy | None = CircuitPolicy(),  # noqa: B008  (frozen)
        metrics: Metrics | None = None,
        keep: bool = True,
        stops: Answer | None = None,
        trusted: TrustedKeys = TrustedKeys(()),  # noqa: B008  (nobody changes it)
    ) -> None:
        receivers = "".join(
            f"  {name}: {{type: webhook, url: https://{name}.test/}}\n" for name in answers
        )
        listed = ", ".join(["stop"] * (stops is not None) + list(answers))
        text = f"version: 1\nreceivers:\n{receivers}rules:\n- {rule}: [{listed}]\n{more}"
        config, problems = check_config(text, "tocsin.yaml", SectionRegistry(ReceiverKinds()))
        assert config is not None, problems
        self.now_ms = NOW_MS
        self.attempts: list[tuple[int, str]] = []
        self.attempted = 0
        self.states: dict[str, list[Delivery]] = {}
        self.finals: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()
        self.issues: list[Issue] = []
        self._keep = keep
        self._offset = 0
        stop = {} if stops is None else {STOP: stops}
        self.service = ActionsService(
            TOPICS,
            Setup(
                decisions_of(config, routing_of(config)),
                {
                    name: ReceiverQueue(self._attempt(name, answer), give_up_ms, circuit=circuit)
                    for name, answer in {**answers, **stop}.items()
                },
                FailureReports.from_config(config),
            ),
            metrics=metrics,
            trusted=lambda: trusted,
        )
        self.service.attached(Attachment(nudge=lambda: None))

    async def take(self, *issues: Issue) -> None:
        """Read these issues from the bus."""
        records = []
        for one in issues:
            made = issue_record(one)
            self._offset += 1
            records.append(
                Record(
                    made.partition, self._offset, self.now_ms, made.key, made.value, made.headers
                )
            )
        await self._round(records)

    async def follow(self, *records: Record | Outgoing) -> None:
        """Read records of other topics from the bus."""
        await self._round(
            [
                one
                if isinstance(one, Record)
                else Record(one.partition, 1, self.now_ms, one.key, one.value, one.headers)
                for one in records
            ]
        )

    async def until(self, passed_ms: int) -> None:
        """Go on to a time, counted from the start, attempt by attempt."""
        end_ms = NOW_MS + passed_ms
        while (due_ms := self.service.next_due_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            await self._round([])
        self.now_ms = max(self.now_ms, end_ms)
        await self._round([])

    def last(self, action: str) -> list[Delivery]:
        """The newest states of the deliveries to a receiver, the first created first."""
        return [states[-1] for states in self.states.values() if states[-1].action == action]

    def _attempt(self, name: str, answer: Answer) -> Callable[[Notice], Awaitable[Outcome]]:
        async def attempt(notice: Notice) -> Outcome:
            self.attempted += 1
            if self._keep:
                self.attempts.append((self.now_ms - NOW_MS, name))
            return answer(notice)

        return attempt

    async def _round(self, records: list[Record]) -> None:
        while True:
            tick = Tick(self.now_ms, frozenset(range(ISSUE_PARTITIONS)))
            assert not self.service.apply(records, tick)
            records = []
            wrote, attempted = False, self.attempted
            for made in self.service.outputs():
                wrote = True
                self.outputs[made.partition.topic] += 1
                if made.value is None:
                    continue
                if made.partition.topic == TOPICS.issues:
                    self._offset += 1
                    records.append(
                        Record(
                            made.partition, self._offset, self.now_ms, made.key, made.value,
                            made.headers,
                        )
                    )  # fmt: skip
                elif self._keep and made.partition.topic == TOPICS.actions:
                    data = EVENT_TYPES.decode(made.value).data
                    assert isinstance(data, Delivery)
                    self.finals[data.delivery_id] += data.final
                    self.states.setdefault(data.delivery_id, []).append(data)
            for record in [one for one in records if one.partition.topic == TOPICS.issues]:
                event = read_event(record)
                assert event is not None
                assert isinstance(event.data, Issue)
                self.issues.append(event.data)
            await self.service.checkpointed(self.now_ms)
            # The attempts wait for nothing, so each ends in one turn of the event loop.
            await asyncio.sleep(0)
            if not wrote and self.attempted == attempted:
                return
