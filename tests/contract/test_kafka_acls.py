"""What Kafka's permissions keep from those who train: the table of docs/how-to/secure-kafka.md.

A broker of its own with the authorizer that brokers have, two teams with a prefix each, and the
principal of those who train in the team `vision`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest

from support.issue_records import issue, issue_record, view, view_record
from support.kafka_broker import Broker, skip_or_fail, unavailable
from support.stops import StopSigner, outgoing
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import EARLIEST, Bus, BusError, Outgoing, Partition, Producer
from tocsin.bus.urls import open_bus
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

pytestmark = pytest.mark.kafka

VISION, SPEECH = Topics("vision"), Topics("speech")
TRAINER, WORD = "trainer", "trainer-word"
RUN = "run-1"

TOPIC, LITERAL, ALLOW = 2, 3, 3
READ, WRITE, DESCRIBE = 3, 4, 8


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    reason = unavailable()
    if reason is not None:
        skip_or_fail(reason)
    broker = Broker(tmp_path_factory.mktemp("acls"), users={TRAINER: WORD}, acls=True)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop(hard=True)


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    """The bus as a trainer of `vision` has it, with the rights that the table gives."""
    async with open_bus(broker.url) as administrator:
        for topics in (VISION, SPEECH):
            await administrator.init(topics.specs())
    read = (VISION.control, VISION.runs, VISION.issues, VISION.actions)
    await grant(broker, VISION.telemetry, WRITE, DESCRIBE)
    for topic in read:
        await grant(broker, topic, READ, DESCRIBE)
    security = KafkaSecurity("SCRAM-SHA-256", TRAINER, WORD)
    async with open_bus(broker.guarded_url, security=security) as trainers:
        yield trainers


async def grant(broker: Broker, topic: str, *operations: int) -> None:
    """Permit the trainer's principal these operations on a topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.server)
    await admin.start()
    try:
        client = admin._client  # its own admin client has no call for permissions
        node = client.cluster.controller.nodeId
        for operation in operations:
            request = CreateAclsRequest(
                TOPIC, topic, LITERAL, f"User:{TRAINER}", "*", operation, ALLOW
            )
            response = await client.send(node, request)
            assert [code for code, *_ in response.creation_responses] == [0]
    finally:
        await admin.close()


def command(topics: Topics) -> Outgoing:
    """A stop of the run, signed by a key that its team trusts."""
    signer = StopSigner()
    return outgoing(signer.sign(signer.command(RUN, "i1")), RUN, topics)


def moved(record: Outgoing, topic: str, partition: int) -> Outgoing:
    return Outgoing(Partition(topic, partition), record.key, record.value, record.headers)


async def refused(producer: Producer, record: Outgoing) -> str:
    with pytest.raises(BusError) as caught:
        await producer.publish([record])
    return str(caught.value)


async def test_who_trains_writes_telemetry_and_nothing_that_stops_a_run(
    broker: Broker, bus: Bus
) -> None:
    forged_issue, forged_view = issue_record(issue(RUN)), view_record(view(RUN))
    forgeries = {
        "a command": command(VISION),
        "an issue": moved(forged_issue, VISION.issues, issue_partition(RUN)),
        "a view of the run": moved(forged_view, VISION.runs, telemetry_partition(RUN)),
        "a delivery": moved(forged_issue, VISION.actions, issue_partition(RUN)),
        "a rule's state": moved(forged_view, VISION.state, telemetry_partition(RUN)),
        "a command of another team": command(SPEECH),
        "an issue of another team": moved(forged_issue, SPEECH.issues, issue_partition(RUN)),
        "another team's telemetry": moved(forged_view, SPEECH.telemetry, telemetry_partition(RUN)),
    }
    own = moved(forged_view, VISION.telemetry, telemetry_partition(RUN))
    for what, record in forgeries.items():
        producer = await bus.producer()
        said = await refused(producer, record)
        assert record.partition.topic in said, f"{what}: {said}"
        await producer.close()
    producer = await bus.producer()
    await producer.publish([own])
    await producer.close()

    async with open_bus(broker.url) as administrator:
        topics = {record.partition for record in forgeries.values()}
        reader = await administrator.reader(dict.fromkeys(topics, EARLIEST))
        ends = await reader.ends(sorted(topics))
        await reader.close()
    assert set(ends.values()) == {0}, "none of them is on the bus"


async def test_who_trains_reads_the_commands_to_its_team_alone(bus: Bus) -> None:
    await read_control(bus, VISION)
    with pytest.raises(BusError, match="speech"):
        await read_control(bus, SPEECH)


async def read_control(bus: Bus, topics: Topics) -> None:
    place = Partition(topics.control, issue_partition(RUN))
    reader = await bus.reader({place: EARLIEST})
    await reader.ends([place])
    await reader.poll(timeout_s=1.0)
