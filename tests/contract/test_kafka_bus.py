"""What only a Kafka bus meets: a broker that goes away, credentials, and settings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import (
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
    NotLeaderForPartitionError,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.group import HeartbeatRequest

from support.buses import Notes, World, assigned, collect, partitions, record, until
from support.rules.fold_service import FoldService
from support.servers.kafka_broker import Broker, skip_or_fail, unavailable
from support.waiting import SOON_S
from tocsin.bus.kafka import topic_admin
from tocsin.bus.kafka.bus import KafkaBus
from tocsin.bus.kafka.clients import (
    MAX_PARTITION_FETCH_BYTES,
    MEMBER_OPTIONS,
    KafkaProducer,
    KafkaReader,
)
from tocsin.bus.kafka.consumer import KafkaConsumer
from tocsin.bus.kafka.permissions import permissions
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import (
    EARLIEST,
    BusError,
    BusUnavailable,
    Consumer,
    FencedMember,
    Outgoing,
    Partition,
    Record,
    UnknownTopic,
    UnusableBus,
)
from tocsin.bus.urls import open_bus
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import Topics, telemetry_partition

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def shaken_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that tests freeze, kill and start again, or log in to; each leaves it running."""
    reason = unavailable()
    if reason is not None:
        skip_or_fail(reason)
    broker = Broker(tmp_path_factory.mktemp("shaken"), users={"trainer": "trainer-word"})
    try:
        broker.start()
        yield broker
    finally:
        broker.stop(hard=True)


async def test_a_broker_that_goes_away_and_comes_back(shaken_broker: Broker) -> None:
    world = World("kafka", shaken_broker.url)
    spec = world.spec()
    place = Partition(spec.name, 0)
    async with world.bus() as bus:
        await bus.init([spec])
        producer = await bus.producer()
        reader = await bus.reader({place: EARLIEST})
        consumer = await bus.consumer("away", [spec.name])
        await producer.publish([record(place, b"k", b"before")])
        await collect(consumer, 1)
        await consumer.commit({place: 1})
        await collect(reader, 1)

        shaken_broker.stop(hard=True)
        began = time.monotonic()
        with pytest.raises(BusUnavailable):
            await producer.publish([record(place, b"k", b"lost")])
        assert time.monotonic() - began < SOON_S
        for part in (reader, consumer):
            began = time.monotonic()
            assert await _polled(part.poll(timeout_s=0.2)) == 0
            assert time.monotonic() - began < SOON_S
        shaken_broker.start()

        async def published() -> bool:
            try:
                await producer.publish([record(place, b"k", b"after")])
            except BusUnavailable:
                return False
            return True

        async def committed() -> bool:
            await assigned(consumer, 4)
            try:
                await consumer.commit({place: 2})
            except (BusUnavailable, FencedMember):
                return False  # the group of a broker that has just started is still forming
            return True

        await until(published, "publishing works again")
        for part in (reader, consumer):
            # What was not acknowledged may have been written all the same.
            values: set[bytes | None] = set()
            while b"after" not in values:
                values |= {each.value for each in await collect(part, 1)}
            assert values <= {b"lost", b"after"}
        await until(committed, "the place is committed")


OUTAGE_S = 10.0
LOGGED_BYTES = 2_000
"""In all of an outage. aiokafka logs twenty times as much in 35 s, if it may."""


async def test_a_worker_logs_little_while_its_broker_is_dead(
    shaken_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topics, service = Topics("quiet"), FoldService(Topics("quiet"))
    place = Partition(topics.telemetry, telemetry_partition("run-1"))
    caplog.set_level(logging.INFO)
    async with open_bus(shaken_broker.url) as bus:
        await bus.init(topics.specs())
        settings = WorkerSettings(checkpoint_s=0.2, standby_bytes=1 << 20)
        worker = Worker(bus, service, topics=topics, group="quiet", settings=settings)
        running = asyncio.create_task(worker.run())
        await (await bus.producer()).publish([Outgoing(place, b"run-1", b"1")])
        assert await worker.caught_up(SOON_S)
        caplog.clear()
        shaken_broker.stop(hard=True)
        await asyncio.sleep(OUTAGE_S)
        shaken_broker.start()
        while not await worker.caught_up(SOON_S):
            pass
        worker.stop()
        await running
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the bus does not answer" in message for message in messages) <= 1, messages
    assert sum(map(len, messages)) < LOGGED_BYTES, messages


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("what", ["the bus", "a producer", "a reader", "a consumer"])
async def test_a_client_that_is_told_of_no_broker_waits_or_is_not_kept(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch, what: str, lasts: bool
) -> None:
    """A broker that was just started, or woken up, names none; who has no other address than that
    connection has none once it is lost."""
    world = World("kafka", kafka_url)
    spec = world.spec()
    place = Partition(spec.name, 0)
    update, answers = ClusterMetadata.update_metadata, itertools.count()

    def without_brokers(self: ClusterMetadata, metadata: Any) -> None:
        if lasts or next(answers) < 3:
            metadata.brokers = []
        update(self, metadata)

    servers = [kafka_url.removeprefix("kafka://")]

    async def opened() -> None:
        async with KafkaBus(servers, request_s=2.0):
            pass

    async with KafkaBus(servers, request_s=2.0) as bus:
        await bus.init([spec])
        made: dict[str, Callable[[], Awaitable[object]]] = {
            "the bus": opened,
            "a producer": bus.producer,
            "a reader": lambda: bus.reader({place: EARLIEST}),
            "a consumer": lambda: bus.consumer("early", [spec.name]),
        }
        with monkeypatch.context() as patch:
            patch.setattr(ClusterMetadata, "update_metadata", without_brokers)
            refused = pytest.raises(BusUnavailable, match="no answer in time")
            with refused if lasts else contextlib.nullcontext():
                await made[what]()
        assert lasts or next(answers) > 3, "it asked until it was told"


@pytest.mark.parametrize("error", [GroupLoadInProgressError, NotCoordinatorForGroupError])
async def test_a_coordinator_that_is_not_ready_is_not_one_that_has_no_offsets(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch, error: type[KafkaError]
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    place = Partition(spec.name, 0)
    send, answers = AIOKafkaConnection.send, iter([True, True])

    def not_ready(self: AIOKafkaConnection, request: object, *more: Any, **options: Any) -> Any:
        if not isinstance(request, OffsetFetchRequest) or not next(answers, False):
            return send(self, request, *more, **options)

        async def refused() -> Any:
            response = await send(self, request, *more, **options)
            assert response.error_code == 0
            return type(response)(0, [], error.errno)

        return refused()

    async with world.bus() as bus:
        await bus.init([spec])
        producer = await bus.producer()
        await producer.publish([record(place, b"k", b"%d" % n) for n in range(4)])
        before = await bus.consumer("loading", [spec.name], only=[place])
        await collect(before, 4)
        await before.commit({place: 3})
        await before.close()
        with monkeypatch.context() as patch:
            patch.setattr(AIOKafkaConnection, "send", not_ready)
            after = await bus.consumer("loading", [spec.name], only=[place])
            assert await after.committed(place) == 3
            assert [r.value for r in await collect(after, 1)] == [b"3"]
        assert next(answers, None) is None, "it was asked while it was not ready"


async def why_fenced(consumer: Consumer) -> str:
    """With which words a poll says that it is no member any more; empty: it is one."""
    try:
        await consumer.poll(timeout_s=0.2)
    except FencedMember as error:
        return str(error)
    return ""


async def test_a_member_that_is_assigned_nothing_is_told_to_join_again(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    monkeypatch.setattr("tocsin.bus.kafka.consumer.UNASSIGNED_S", 1.0)

    async def joins_never(*_: object) -> None:
        await asyncio.sleep(0.1)

    async with world.bus() as bus:
        await bus.init([spec])
        with monkeypatch.context() as patch:
            patch.setattr(GroupCoordinator, "ensure_active_group", joins_never)
            consumer = await bus.consumer("never", [spec.name])

            async def is_fenced() -> bool:
                return "assigned nothing for 1 s" in await why_fenced(consumer)

            await until(is_fenced, "it is told so")
            await consumer.close()
        # More members than partitions: some are assigned nothing, which is an answer.
        several = [await bus.consumer("never", [spec.name]) for _ in range(5)]
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s or sum(len(m.assigned()) for m in several) < 4:
            await asyncio.gather(*(member.poll(timeout_s=0.2) for member in several))
        assert sorted(len(member.assigned()) for member in several) == [0, 1, 1, 1, 1]


async def test_a_group_whose_leader_did_not_know_its_topic_is_assigned_anew(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    update = ClusterMetadata.update_metadata
    assert MEMBER_OPTIONS["metadata_max_age_ms"] <= 10_000
    often = {**MEMBER_OPTIONS, "metadata_max_age_ms": 500}
    monkeypatch.setattr("tocsin.bus.kafka.bus.MEMBER_OPTIONS", often)

    def without_topics(self: ClusterMetadata, metadata: Any) -> None:
        metadata.topics = []
        update(self, metadata)

    async with world.bus() as bus:
        await bus.init([spec])
        with monkeypatch.context() as patch:
            patch.setattr(ClusterMetadata, "update_metadata", without_topics)
            notes = Notes()
            consumer = await bus.consumer("unknown", [spec.name], listener=notes)

            async def has_joined() -> bool:
                await consumer.poll(timeout_s=0.2)
                return bool(notes.assigned)

            await until(has_joined, "it is assigned nothing")
            assert consumer.assigned() == frozenset()
        await assigned(consumer, 4)


@pytest.mark.parametrize("by", ["coordination", "heartbeat", "an unknown error", "a lost answer"])
async def test_a_member_whose_client_has_given_up_is_told_to_join_again(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    async with world.bus() as bus:
        await bus.init([spec])
        consumer = await bus.consumer("given up", [spec.name])
        await assigned(consumer, 4)
        assert isinstance(consumer, KafkaConsumer)
        insides = consumer._client._coordinator
        send = insides._send_req

        async def answered(request: object) -> object:
            if not isinstance(request, HeartbeatRequest):
                return await send(request)
            if by == "a lost answer":
                raise KeyError((1, 0))
            return SimpleNamespace(error_code=-1)

        with monkeypatch.context() as patch:
            if by in ("coordination", "heartbeat"):
                # As with metadata that name no broker.
                patch.setattr(AIOKafkaClient, "get_random_node", lambda _: None)
            else:
                patch.setattr(insides, "_send_req", answered)
            if by == "coordination":
                insides.coordinator_dead()
            elif by == "heartbeat":
                insides.coordinator_id = None

            async def is_fenced() -> bool:
                return bool(await why_fenced(consumer))

            await until(is_fenced, "the client gives up")
        for _ in range(2 if by == "coordination" else 0):
            with pytest.raises(FencedMember, match="create a new one"):
                await consumer.poll(timeout_s=0.2)
        await consumer.close()
        again = await bus.consumer("given up", [spec.name])
        await assigned(again, 4)


async def test_a_producer_whose_client_has_given_up_goes_on_with_another(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    place = Partition(spec.name, 0)

    async def fails(*_: object) -> None:
        raise ValueError("what aiokafka does not expect")

    async with world.bus() as bus:
        await bus.init([spec])
        producer = await bus.producer()
        await producer.publish([record(place, b"k", b"before")])
        assert isinstance(producer, KafkaProducer)
        first = producer._client
        with monkeypatch.context() as patch:
            patch.setattr(first._sender, "_send_produce_req", fails)
            with pytest.raises(BusUnavailable):
                await producer.publish([record(place, b"k", b"lost")])
        assert await producer.publish([record(place, b"k", b"after")]) == [1]
        assert producer._client is not first
        found = await collect(await bus.reader({place: EARLIEST}), 2)
    assert [r.value for r in found] == [b"before", b"after"]


async def test_a_topic_that_no_broker_describes_in_time_is_not_taken_for_a_missing_one(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    spec, gone = world.spec(), world.spec()

    async def in_vain(*_: object) -> None:
        raise UnknownTopicOrPartitionError

    async with world.bus() as bus:
        await bus.init([spec, gone])
        producer = await bus.producer()
        assert isinstance(producer, KafkaProducer)
        for one in (spec, gone):
            await producer.publish([record(Partition(one.name, 0), b"k", b"v")])
        admin = await world._admin()
        await admin.delete_topics([gone.name])
        await admin.close()
        monkeypatch.setattr(producer._client.client, "_wait_on_metadata", in_vain)
        with pytest.raises(BusUnavailable, match="no broker sent the topic's metadata in time"):
            await producer.publish([record(Partition(spec.name, 0), b"k", b"v")])
        with pytest.raises(UnknownTopic, match="bus has no topic"):
            await producer.publish([record(Partition(gone.name, 0), b"k", b"v")])


async def test_a_broker_that_does_not_know_a_new_topic_yet_is_asked_again(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    configs, asked = topic_admin._configs, []

    async def too_early(admin: Any, names: Sequence[str]) -> Any:
        asked.append(names)
        if len(asked) == 1:
            raise UnknownTopic("reading the configuration: UnknownTopicOrPartitionError")
        return await configs(admin, names)

    monkeypatch.setattr(topic_admin, "_configs", too_early)
    spec = world.spec()
    async with world.bus() as bus:
        (state,) = await bus.init([spec])
    assert state.exists
    assert asked == [[spec.name]] * 2


async def test_a_broker_that_does_not_know_a_changed_setting_yet_is_asked_again(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    configs = topic_admin._configs
    answers: list[Any] = []

    async def late(admin: Any, names: Sequence[str]) -> Any:
        answers.append(await configs(admin, names))
        # The first answer after the change is that of before.
        return answers[0] if len(answers) == 2 else answers[-1]

    async with world.bus() as bus:
        assert isinstance(bus, KafkaBus)
        await bus.init([spec])
        await world.configure(spec.name, {"retention.ms": "5000"})
        monkeypatch.setattr(topic_admin, "_configs", late)
        (state,), changed = await bus.set_up([spec], replication=1, apply=True)
    assert f"{spec.name}: retention.ms was 5000, is {spec.retention_ms}" in changed
    assert state.differs == ()
    assert len(answers) == 3


async def test_a_broker_that_does_not_lead_a_new_topic_yet_is_asked_again(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    proc, began = Fetcher._proc_offset_request, time.monotonic()

    async def too_early(fetcher: Fetcher, *arguments: Any) -> Any:
        if time.monotonic() < began + 3.5:
            raise NotLeaderForPartitionError
        return await proc(fetcher, *arguments)

    monkeypatch.setattr(Fetcher, "_proc_offset_request", too_early)
    servers = world.url.removeprefix("kafka://").split(",")
    async with KafkaBus(servers, request_s=3.0) as bus:
        began = time.monotonic()
        (state,) = await bus.init([world.spec()])
    assert state.exists


async def test_new_topics_that_get_no_leader_in_time_are_named(
    kafka_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("kafka", kafka_url)
    led, leaderless = world.spec(), world.spec()
    describe = AIOKafkaAdminClient.describe_topics

    async def described(admin: AIOKafkaAdminClient, names: list[str]) -> Any:
        topics: Any = await describe(admin, names)
        for topic in topics:
            for partition in topic["partitions"]:
                if topic["topic"] == leaderless.name and partition["partition"] in (1, 3):
                    partition["leader"] = -1
        return topics

    monkeypatch.setattr(AIOKafkaAdminClient, "describe_topics", described)
    monkeypatch.setattr(topic_admin, "SETTLE_S", 0.5)
    async with world.bus() as bus:
        with pytest.raises(BusUnavailable) as caught:
            await bus.init([led, leaderless])
    assert str(caught.value) == (
        f"the topics were created, but are not ready after 0.5 s: partition 1 of {leaderless.name} "
        "(and 1 more) has no leader: check that all brokers are up, "
        "then run 'tocsin bus init' again"
    )


async def test_fetches_that_fail_do_not_end_who_closes(kafka_url: str) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    async with world.bus() as bus:
        await bus.init([spec])
        reader = await bus.reader({Partition(spec.name, 0): EARLIEST})
        assert isinstance(reader, KafkaReader)
        # As a fetch of aiokafka waits after the connection to its broker was lost.
        failing = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
        reader._client._fetcher._pending_tasks.update(failing)
        await reader.close()
        assert all(fetch.cancelled() for fetch in failing)


async def test_a_frozen_broker_holds_nothing_up_for_long(shaken_broker: Broker) -> None:
    world = World("kafka", shaken_broker.url)
    spec = world.spec()
    place = Partition(spec.name, 0)
    bus = world.bus()
    await bus.__aenter__()
    await bus.init([spec])
    producer = await bus.producer()
    reader = await bus.reader({place: EARLIEST})
    consumer = await bus.consumer("frozen", [spec.name])
    await assigned(consumer, 4)
    with shaken_broker.frozen():
        for part in (reader, consumer):
            began = time.monotonic()
            assert await _polled(part.poll(timeout_s=0.2)) == 0
            assert time.monotonic() - began < SOON_S
        for work in (
            reader.ends([place]),
            producer.close(),
            reader.close(),
            consumer.close(),
            bus.__aexit__(None, None, None),
        ):
            began = time.monotonic()
            with suppress(BusUnavailable):
                await work
            # Without bounds of ours, the client would wait for as long as the broker is frozen.
            assert time.monotonic() - began < SOON_S


async def _polled(poll: Awaitable[Sequence[Record]]) -> int:
    try:
        return len(await poll)
    except BusUnavailable:
        return 0


async def test_no_broker_there_is_said_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:9"):
        async with open_bus("kafka://127.0.0.1:9"):
            pass
    assert time.monotonic() - began < SOON_S


async def test_settings_that_differ_are_changed_if_asked_for_and_only_these(kafka_url: str) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec("compact")
    async with world.bus() as bus:
        assert isinstance(bus, KafkaBus)
        await bus.init([spec])
        other = {"delete.retention.ms": "5000", "segment.ms": "777777"}
        await world.configure(spec.name, other)

        (state,), changed = await bus.set_up([spec], replication=None, apply=False)
        assert not changed
        assert any("delete.retention.ms is 5000" in text for text in state.differs)
        with pytest.raises(UnusableBus, match="expected 1 to 1, as many as there are brokers"):
            await bus.set_up([spec], replication=3, apply=True)

        (state,), changed = await bus.set_up([spec], replication=1, apply=True)
        assert state.differs == ()
        assert f"{spec.name}: delete.retention.ms was 5000, is {spec.tombstone_ms}" in changed
        assert (await world.configuration(spec.name))["segment.ms"] == "777777", "what else is set"
        assert (await bus.set_up([spec], replication=1, apply=True))[1] == []


async def test_a_member_with_a_name_gets_its_partitions_back_after_a_restart(
    kafka_url: str,
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    group = f"{world.prefix}-named"
    notes = Notes()
    async with world.bus() as bus:
        await bus.init([spec])
        stays = await bus.consumer(group, [spec.name], listener=notes, member="a")
        goes = await bus.consumer(group, [spec.name], member="b")

        async def shared() -> bool:
            await asyncio.gather(stays.poll(timeout_s=0.05), goes.poll(timeout_s=0.05))
            return len(stays.assigned()) == len(goes.assigned()) == 2

        await until(shared, "two members share four partitions")
        before, told = goes.assigned(), len(notes.revoked)
        await goes.close()
        again = await bus.consumer(group, [spec.name], member="b")

        async def back() -> bool:
            await asyncio.gather(stays.poll(timeout_s=0.05), again.poll(timeout_s=0.05))
            return bool(again.assigned())

        await until(back, "its partitions are back")
        assert again.assigned() == before
        assert len(notes.revoked) == told, "nobody else was disturbed"


async def test_brokers_without_an_authorizer_give_no_permissions(kafka_url: str) -> None:
    wanted = permissions(Topics("nobody"), "reader", "User:ana")
    async with open_bus(kafka_url) as bus:
        assert isinstance(bus, KafkaBus)
        with pytest.raises(UnusableBus, match="of User:ana: the brokers have no authorizer"):
            await bus.grant(wanted)


async def test_a_partition_with_a_backlog_does_not_hold_up_another(kafka_url: str) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec()
    busy, quiet = Partition(spec.name, 0), Partition(spec.name, 1)
    size, count = 10_000, 2_000
    async with world.bus() as bus:
        await bus.init([spec])
        producer = await bus.producer()
        for _ in range(0, count, 100):
            await producer.publish([record(busy, value=os.urandom(size)) for _ in range(100)])
        consumer = await bus.consumer(f"{world.prefix}-fair", [spec.name])
        read: list[Partition] = [one.partition for one in await collect(consumer, 1)]
        await producer.publish([record(quiet)])
        while quiet not in read:
            read += [r.partition for r in await consumer.poll(timeout_s=SOON_S, max_records=50)]
    # What was fetched of the one before, and once more if the next answer has it first.
    assert len(read) * size < 3 * MAX_PARTITION_FETCH_BYTES < count * size


async def test_nobody_asks_for_leases_on_kafka(kafka_url: str) -> None:
    async with open_bus(kafka_url) as bus:
        lease = await bus.lease("run")
        assert lease is not None
        assert await bus.lease("run") is not None
        assert not await bus.leased("run")
        await lease.release()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
async def test_a_user_with_a_password_gets_in(shaken_broker: Broker, mechanism: str) -> None:
    world = World("kafka", shaken_broker.guarded_url)
    spec = world.spec()
    place = Partition(spec.name, 0)
    security = KafkaSecurity(mechanism, "trainer", "trainer-word")  # type: ignore[arg-type]
    async with open_bus(shaken_broker.guarded_url, security=security) as bus:
        await bus.init([spec])
        await (await bus.producer()).publish([record(place)])
        consumer = await bus.consumer("guarded", [spec.name])
        assert [r.offset for r in await collect(consumer, 1)] == [0]
        assert consumer.assigned() == set(partitions(spec))
    assert "trainer-word" not in repr(security)
    assert "trainer" not in bus.url


async def test_a_wrong_password_is_said(shaken_broker: Broker) -> None:
    security = KafkaSecurity("SCRAM-SHA-256", "trainer", "wrong-word")
    with pytest.raises(BusError) as caught:
        async with open_bus(shaken_broker.guarded_url, security=security):
            pass
    assert isinstance(caught.value, UnusableBus)
    assert "wrong-word" not in str(caught.value)


async def test_a_member_that_restores_gives_its_partitions_up_when_another_joins(
    kafka_url: str,
) -> None:
    world, notes = World("kafka", kafka_url), Notes()
    spec, group = world.spec(), f"{world.prefix}-slow"
    cut_off: list[frozenset[Partition]] = []

    async def restore(partitions: frozenset[Partition]) -> None:
        if not cut_off:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cut_off.append(partitions)
                raise

    notes.when_assigned = restore
    async with world.bus() as bus:
        await bus.init([spec])
        restores = await bus.consumer(group, [spec.name], listener=notes)

        async def work() -> None:
            while True:
                await restores.poll(timeout_s=0.2)

        working = asyncio.create_task(work())

        async def has_begun() -> bool:
            return bool(notes.assigned)

        try:
            await until(has_begun, "the first member restores")
            joins = await bus.consumer(group, [spec.name])
            await assigned(joins, 2)
        finally:
            working.cancel()
            await asyncio.wait({working})
        assert cut_off == notes.assigned[:1] == notes.revoked
        for part in (restores, joins):
            await part.close()


async def test_a_topic_that_is_deleted_under_its_clients_is_not_created_by_them(
    kafka_url: str,
) -> None:
    world = World("kafka", kafka_url)
    spec = world.spec("compact")
    place = Partition(spec.name, 3)
    async with world.bus() as bus:
        await bus.init([spec])
        producer, reader = await bus.producer(), await bus.reader({place: EARLIEST})
        consumer = await bus.consumer(f"{world.prefix}-deleted", [spec.name])
        await producer.publish([record(place)])
        await collect(reader, 1)
        await collect(consumer, 1)
        await world.delete(spec.name)
        # The brokers are asked about it again after an error, and each half a minute.
        for _ in range(2):
            for used in (
                reader.poll(timeout_s=0.3),
                consumer.poll(timeout_s=0.3),
                producer.publish([record(place)]),
            ):
                with suppress(BusError):
                    await used
        assert [state.exists for state in await bus.show([spec])] == [False]
