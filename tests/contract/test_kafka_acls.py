"""What Kafka's permissions keep from those who train: the table of docs/how-to/secure-kafka.md.

A broker of its own with the authorizer that brokers have, two teams with a prefix each, and the
principal of those who train in the team `vision`, who logs in with and without TLS.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.processes.archive import QUICK
from support.records.issues import issue, issue_record, view, view_record
from support.records.on_bus import read_all, send, work
from support.records.stops import StopSigner, outgoing
from support.servers.certificates import Authority, authority
from support.servers.kafka_broker import LASTING_MS, Broker, skip_or_fail, unavailable
from tocsin.actions.composition import build_actions_service
from tocsin.bus.kafka.bus import KafkaBus
from tocsin.bus.kafka.permissions import Permission, Role, permissions
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import EARLIEST, Bus, BusError, Outgoing, Partition, Producer, UnusableBus
from tocsin.bus.urls import open_bus
from tocsin.console.__main__ import app
from tocsin.console.dead_letters.redrive import read_contents, redrive
from tocsin.console.fleet.quarantines import release_record
from tocsin.console.views.bus_view import read_view
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.key_folder import own_key
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.store import open_store
from tocsin.store.archive.service import ArchiveService
from tocsin.store.archive.upkeep import Upkeep
from tocsin.store.manifest import FAMILIES
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

pytestmark = pytest.mark.kafka

VISION, SPEECH = Topics("vision"), Topics("speech")
TRAINER, WORD = "trainer", "trainer-word"
RUN = "run-1"

SERVICE = "service-word"
TEAMS = {VISION: "vision-train", SPEECH: "speech-train"}
"""Who trains in each team, to whom an administrator gives the rights by the command."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    reason = unavailable()
    if reason is not None:
        skip_or_fail(reason)
    others = ("rules", "actions", "archive", "reader", "operator")
    users = {TRAINER: WORD, **dict.fromkeys((*others, *TEAMS.values()), SERVICE)}
    broker = Broker(
        tmp_path_factory.mktemp("acls"),
        users=users,
        acls=True,
        certificates=authority(tmp_path_factory.mktemp("certificates"), "127.0.0.1"),
        session_ms=LASTING_MS,
    )
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
    await grant(broker, "trainer", TRAINER)
    security = KafkaSecurity("SCRAM-SHA-256", TRAINER, WORD)
    async with open_bus(broker.guarded_url, security=security) as trainers:
        yield trainers


async def grant(broker: Broker, role: Role, user: str) -> None:
    """Give a user the rights of a role in the team `vision`, as `tocsin bus acls --apply` does."""
    async with open_bus(broker.url) as administrator:
        assert isinstance(administrator, KafkaBus)
        await administrator.grant(permissions(VISION, role, f"User:{user}"))


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


async def test_the_rights_of_the_workers_are_enough_for_them_and_keep_them_in_their_team(
    broker: Broker, bus: Bus, tmp_path: Path
) -> None:
    run = RunBuilder(RUN)
    run.started()
    run.steps([0, 1], loss=1.0)
    run.steps([2], loss=math.nan)
    place = Partition(VISION.telemetry, telemetry_partition(RUN))
    await send(bus, [replace(record, partition=place) for record in run.records])
    for role in ("rules", "actions"):
        await grant(broker, role, role)

    async with open_bus(broker.guarded_url, security=login("rules")) as rules_bus:
        service = build_rules_service(VISION)
        group = f"{VISION.prefix}-rules"
        assert await work(Worker(rules_bus, service, topics=VISION, group=group))
        with pytest.raises(BusError, match="speech"):
            await rules_bus.reader({Partition(SPEECH.telemetry, 0): EARLIEST})
    async with open_bus(broker.guarded_url, security=login("actions")) as actions_bus:
        actions = build_actions_service(
            VISION, Config(), bus=actions_bus, key=own_key(tmp_path), secrets={}, embedded=False
        )
        group = f"{VISION.prefix}-actions"
        assert await work(Worker(actions_bus, actions, topics=VISION, group=group))
        found = await read_all(actions_bus, VISION.issues, issue_partition(RUN))
        assert await read_all(actions_bus, VISION.actions, issue_partition(RUN)), "its ledger"
        assert await read_all(actions_bus, VISION.telemetry, telemetry_partition(RUN)), "reports"
        producer = await actions_bus.producer()
        await producer.publish([command(VISION)])
        state = moved(command(VISION), VISION.state, telemetry_partition(RUN))
        assert VISION.state in await refused(producer, state), "states are the rules' alone"
    assert b"nonfinite" in b"".join(record.value or b"" for record in found)


async def acls(broker: Broker, topics: Topics, folder: Path, *words: str) -> str:
    """What `tocsin bus acls --apply` of an administrator prints."""
    config = folder / f"{topics.prefix}.yaml"
    config.write_text(f"version: 1\nbus: {{url: '{broker.url}', prefix: {topics.prefix}}}\n")
    command = ["bus", "acls", "--apply", "--config", str(config), *words]
    done = await asyncio.to_thread(CliRunner().invoke, app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


async def test_the_command_lets_each_team_s_trainers_write_their_telemetry_and_nothing_else(
    broker: Broker, bus: Bus, tmp_path: Path
) -> None:
    granted = {
        topics: await acls(broker, topics, tmp_path, "--trainer", f"User:{user}")
        for topics, user in TEAMS.items()
    }
    count = len(permissions(VISION, "trainer", "User:x"))
    assert set(granted.values()) == {f"permissions given: {count}\n"}

    for topics, user in TEAMS.items():
        (other,) = TEAMS.keys() - {topics}
        record = view_record(view(RUN))
        telemetry = {
            t: moved(record, t.telemetry, telemetry_partition(RUN)) for t in (topics, other)
        }
        forgeries = [
            command(topics),
            moved(issue_record(issue(RUN)), topics.issues, issue_partition(RUN)),
            telemetry[other],
        ]
        async with open_bus(broker.guarded_url, security=login(user)) as trainers:
            await (await trainers.producer()).publish([telemetry[topics]])
            await read_control(trainers, topics)
            for forgery in forgeries:
                assert forgery.partition.topic in await refused(await trainers.producer(), forgery)


async def test_the_command_gives_only_the_permissions_that_are_missing(
    broker: Broker, bus: Bus, tmp_path: Path
) -> None:
    who = "User:again"
    as_trainer = permissions(VISION, "trainer", who)
    both = {*as_trainer, *permissions(VISION, "reader", who)}
    words = ("--trainer", who)
    assert await acls(broker, VISION, tmp_path, *words) == f"permissions given: {len(as_trainer)}\n"
    assert await acls(broker, VISION, tmp_path, *words) == (
        f"permissions given: 0, {len(as_trainer)} were there already\n"
    )
    facts = json.loads(await acls(broker, VISION, tmp_path, *words, "--reader", who, "--json"))
    assert facts["applied"]
    assert {Permission(**one) for one in facts["acls"]} == both
    assert {Permission(**one) for one in facts["given"]} == both - {*as_trainer}
    assert await acls(broker, VISION, tmp_path, *words, "--reader", who) == (
        f"permissions given: 0, {len(both)} were there already\n"
    )


def unreadable(run: str) -> Outgoing:
    """Telemetry that no service can use."""
    place = Partition(VISION.telemetry, telemetry_partition(run))
    return Outgoing(place, run.encode(), b"no record", (("tocsin-type", b"nothing"),))


async def letters(bus: Bus, service: str) -> set[str]:
    """The ids of what that service has set aside."""
    found = (await read_contents(bus, VISION)).letters
    return {one.letter_id for one in found if one.why.service == service}


async def test_an_archive_stores_its_team_s_runs_and_writes_to_no_topic(
    broker: Broker, bus: Bus, tmp_path: Path
) -> None:
    run = RunBuilder("archived")
    run.started()
    run.steps([0, 1], loss=1.0)
    place = Partition(VISION.telemetry, telemetry_partition("archived"))
    await send(bus, [replace(record, partition=place) for record in run.records])
    await (await bus.producer()).publish([unreadable("archived")])
    await grant(broker, "archive", "archive")

    store, crash = open_store(tmp_path / "store"), CrashPoints(None)
    async with open_bus(broker.guarded_url, security=login("archive")) as archive_bus:
        for family in FAMILIES:
            upkeep = Upkeep(store, topics=VISION, crash=crash)
            service = ArchiveService(
                store, family, topics=VISION, upkeep=upkeep, policy=QUICK, crash=crash
            )
            group = f"{VISION.prefix}-{service.name}"
            assert await work(Worker(archive_bus, service, topics=VISION, group=group))
        issue_of_it = moved(
            issue_record(issue("archived")), VISION.issues, issue_partition("archived")
        )
        for record in (issue_of_it, moved(issue_of_it, VISION.dlq, 0)):
            assert record.partition.topic in await refused(await archive_bus.producer(), record)
    assert "archived" in {found.run_id for found in store.runs()}


async def test_an_operator_redrives_releases_and_answers_and_a_reader_only_looks(
    broker: Broker, bus: Bus
) -> None:
    run = "operated"
    await (await bus.producer()).publish([unreadable(run)])
    for role in ("rules", "operator", "reader"):
        await grant(broker, role, role)
    async with open_bus(broker.guarded_url, security=login("rules")) as rules_bus:
        group = f"{VISION.prefix}-rules"
        worker = Worker(rules_bus, build_rules_service(VISION), topics=VISION, group=group)
        assert await work(worker)

    released = release_record(
        VISION,
        RuleReleased(
            release_id="r1",
            run_id=run,
            incarnation="i1",
            rule="loss_spike",
            by="o",
            at_ms=1,
            why="",
        ),
    )
    answer = moved(issue_record(issue(run)), VISION.issues, issue_partition(run))
    async with open_bus(broker.guarded_url, security=login("operator")) as operators:
        wanted = await letters(operators, "rules")
        assert wanted
        assert set((await redrive(operators, VISION, None, by="o", now_ms=1)).sent) >= wanted
        producer = await operators.producer()
        await producer.publish([released, answer, command(VISION)])
        state = moved(command(VISION), VISION.state, telemetry_partition(run))
        assert VISION.state in await refused(producer, state), "states are the rules' alone"
        foreign = moved(released, SPEECH.telemetry, telemetry_partition(run))
        assert SPEECH.telemetry in await refused(await operators.producer(), foreign)
    async with open_bus(broker.guarded_url, security=login("reader")) as readers:
        await read_view(readers, VISION)
        assert await letters(readers, "rules") >= wanted
        for record in (released, answer, command(VISION)):
            assert record.partition.topic in await refused(await readers.producer(), record)


def login(user: str) -> KafkaSecurity:
    return KafkaSecurity("SCRAM-SHA-256", user, SERVICE)


@pytest.fixture
def certificates(broker: Broker) -> Authority:
    assert broker.certificates is not None
    return broker.certificates


async def its_own_and_nothing_else(bus: Bus) -> None:
    """It may send telemetry to its team, and no command."""
    own = moved(view_record(view(RUN)), VISION.telemetry, telemetry_partition(RUN))
    await (await bus.producer()).publish([own])
    assert VISION.control in await refused(await bus.producer(), command(VISION))
    await read_control(bus, VISION)


async def test_who_logs_in_over_tls_has_the_rights_of_the_user(
    broker: Broker, bus: Bus, certificates: Authority
) -> None:
    security = KafkaSecurity("SCRAM-SHA-256", TRAINER, WORD, tls=True, ca_file=certificates.ca)
    async with open_bus(broker.encrypted_url, security=security) as encrypted:
        await its_own_and_nothing_else(encrypted)


async def test_who_has_a_certificate_needs_no_password(
    broker: Broker, bus: Bus, certificates: Authority
) -> None:
    await grant(broker, "trainer", "CN=client")
    security = KafkaSecurity(tls=True, ca_file=certificates.ca, cert_file=certificates.client)
    async with open_bus(broker.certified_url, security=security) as certified:
        await its_own_and_nothing_else(certified)


async def test_an_error_says_what_is_wrong_with_tls(
    broker: Broker, certificates: Authority, tmp_path: Path
) -> None:
    stranger = authority(tmp_path, "127.0.0.1").ca
    by_name = broker.encrypted_url.replace("127.0.0.1", "localhost")
    user = KafkaSecurity("SCRAM-SHA-256", TRAINER, WORD, tls=True, ca_file=certificates.ca)
    nobody = KafkaSecurity(tls=True, ca_file=certificates.ca)
    await unusable(broker.encrypted_url, replace(user, ca_file=stranger), "bus.tls.ca must contain")
    await unusable(by_name, user, "Hostname mismatch.*the host in bus.url must match")
    await unusable(broker.certified_url, nobody, "bus.tls.certificate")
    await unusable(
        broker.certified_url, KafkaSecurity(), "requires TLS at this address: set bus.tls"
    )
    await unusable(broker.encrypted_url, replace(user, password="x"), "check the credentials")


async def unusable(url: str, security: KafkaSecurity, why: str) -> None:
    with pytest.raises(UnusableBus, match=why):
        async with open_bus(url, security=security):
            pass
