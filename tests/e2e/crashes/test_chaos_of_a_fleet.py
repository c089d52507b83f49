"""All that a fleet runs at once, on each kind of bus, with everything done to it that goes wrong.

Rules, action services and trainings are processes of their own; a rule's findings depend on each
number of each training and on their order. Each finding is delivered to a receiver that fails now
and then, and some stop their run. `support.chaos.model` says what must come of it.

The long forms kill `TOCSIN_KILLS` processes, in rounds, from `TOCSIN_KILL_SEED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.buses import World
from support.chaos import disturbances
from support.chaos.disturbances import DISTURBANCES, Where, chosen
from support.chaos.model import Model, wrong_findings
from support.chaos.stage import Stage
from support.servers.fault_server import fault_server
from support.servers.kafka_broker import Broker, running_quorum, skip_or_fail, unavailable
from support.servers.tcp_proxy import TcpProxy
from tocsin.bus.kafka.bus import KafkaBus
from tocsin.schemas.topics import Topics

KILLS = int(os.environ.get("TOCSIN_KILLS", "1000"))
SEED = int(os.environ.get("TOCSIN_KILL_SEED", "20261126"))
ROUND = 40
"""Kills after which all comes to rest and is compared, and topics of their own begin."""

SHORT: dict[str, Sequence[str]] = {
    "embedded": [
        "a rules worker is killed",
        "an action service is killed",
        "a training is killed",
        "a rules worker is frozen",
        "the machine sleeps",
        "records come twice",
        "records come in another order",
        "twenty kinds of poison",
        "a clock is wrong",
        "what was not read has expired",
        "the states are lost under those who have them",
        "the states are lost",
        "all are killed at once",
    ],
    "broker": [
        "a rules worker is killed",
        "a rules worker is frozen",
        "connections are cut",
        "a training is killed",
        "an action service is killed",
        "all comes late",
        "a rebalance each second",
        "the states are lost",
        "the broker is killed",
        "all are killed at once",
    ],
    "torture": [
        "a rules worker is killed",
        "a training is killed",
        "an action service is killed",
        "a broker is frozen",
        "connections are silent",
        "records come twice",
        "records come in another order",
        "twenty kinds of poison",
        "a disk is slow",
        "what was not read has expired",
    ],
}
"""What is done once each: in CI on a bus file, and on a broker behind a proxy; the last of these
only in `make torture`."""


@asynccontextmanager
async def embedded_stage(folder: Path, seed: str, mutation: str = "none") -> AsyncIterator[Stage]:
    """Processes of one machine."""
    topics = Topics()
    async with (
        fault_server() as receiver,
        World("embedded", f"embedded:{folder}/bus.db").bus() as bus,
    ):
        await bus.init(topics.specs())
        stage = Stage(
            bus.url, bus, topics, folder, random.Random(seed), receiver, mutation=mutation
        )
        try:
            yield stage
        finally:
            await stage.close()


@asynccontextmanager
async def kafka_stage(
    folder: Path,
    seed: str,
    brokers: Sequence[Broker] = (),
    proxies: Sequence[TcpProxy] = (),
    *,
    shared: str = "",
) -> AsyncIterator[Stage]:
    """Processes that reach the brokers through proxies, or without that a `shared` one, by its URL;
    the topics are deleted afterwards."""
    # The driver is patient: what it waits for is what the others are hindered from.
    servers = [broker.server for broker in brokers] or [shared.removeprefix("kafka://")]
    own = KafkaBus(servers, request_s=20.0)
    url = shared or "kafka://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    topics = Topics(f"fleet-{uuid.uuid4().hex[:8]}")
    async with fault_server() as receiver, own as bus:
        await bus.init(topics.specs())
        stage = Stage(
            url,
            bus,
            topics,
            folder,
            random.Random(seed),
            receiver,
            brokers=brokers,
            proxies=proxies,
            slow_disk=slow_disk_of(brokers),
        )
        try:
            yield stage
        finally:
            await stage.close()
            await disturbances.delete_topics(stage)


def slow_disk_of(brokers: Sequence[Broker]) -> Path | None:
    """The file by which the disks of these are made slow."""
    named = brokers[0].environ.get("TOCSIN_SLOW_DISK") if brokers else None
    return None if named is None else Path(named)


def with_slow_disk(folder: Path) -> dict[str, str]:
    """The environment of a process whose disk can be made slow; empty without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    library, control = folder / "slow_disk.so", folder / "slow_disk"
    source = Path(disturbances.__file__).with_name("slow_disk.c")
    options = ["-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *options], check=True, timeout=60)
    control.write_bytes(bytes(4))
    return {"LD_PRELOAD": str(library), "TOCSIN_SLOW_DISK": str(control)}


@asynccontextmanager
async def one_broker(
    folder: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[list[Broker], list[TcpProxy]]]:
    """A broker behind a proxy."""
    if (reason := unavailable()) is not None:
        skip_or_fail(reason)
    async with TcpProxy() as proxy:
        broker = Broker(
            folder / "kafka",
            advertised_port=proxy.port,
            environ=environ or {},
        )
        try:
            broker.start()
            proxy.target = broker.proxied_port
            yield [broker], [proxy]
        finally:
            broker.stop(hard=True)


@asynccontextmanager
async def three_brokers(folder: Path) -> AsyncIterator[tuple[list[Broker], list[TcpProxy]]]:
    """Three brokers, each behind a proxy, with three copies of everything."""
    if (reason := unavailable()) is not None:
        skip_or_fail(reason)
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(TcpProxy()) for _ in range(3)]
        brokers = stack.enter_context(running_quorum(folder, [proxy.port for proxy in proxies]))
        for broker, proxy in zip(brokers, proxies, strict=True):
            proxy.target = broker.proxied_port
        yield brokers, proxies


async def disturbed(stage: Stage, names: Sequence[str]) -> list[str]:
    """Each of these once; what is wrong afterwards."""
    for name in names:
        await stage.populate()
        await stage.feed()
        await DISTURBANCES[name].act(stage)
        stage.done[name] += 1
    await stage.populate()
    wrong = await stage.settle()
    print(stage.report())
    return wrong


async def a_round(stage: Stage, where: Where, kills: int) -> list[str]:
    """Whatever comes, until so many processes are dead; what is wrong afterwards."""
    while sum(stage.killed.values()) < kills and not stage.faults:
        await stage.populate()
        await stage.feed()
        one = chosen(where, stage.dice)
        await one.act(stage)
        stage.done[one.name] += 1
    wrong = await stage.settle()
    print(stage.report(), flush=True)
    return wrong


async def comes_through(stage: Stage, where: str) -> None:
    assert await disturbed(stage, SHORT[where]) == []
    assert stage.seen.commands
    assert {"rules", "actions", "emitter"} <= stage.killed.keys()


async def test_a_fleet_on_one_bus_file(tmp_path: Path) -> None:
    async with embedded_stage(tmp_path, "short") as stage:
        await comes_through(stage, "embedded")


@pytest.mark.kafka
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("what", ["broker", pytest.param("torture", marks=pytest.mark.torture)])
async def test_a_fleet_on_kafka(tmp_path: Path, what: str) -> None:
    environ = with_slow_disk(tmp_path) if what == "torture" else None
    async with (
        one_broker(tmp_path, environ) as (brokers, proxies),
        kafka_stage(tmp_path, "short", brokers, proxies) as stage,
    ):
        await comes_through(stage, what)


async def after_a_crash(folder: Path, mutation: str, point: str | None) -> list[str]:
    """What is wrong with the issues and states after a worker has died there, and another has done
    its work; with no point, after records have come twice."""
    async with embedded_stage(folder, "crash", mutation) as stage:
        for _ in range(8):
            await stage.feed(twice=point is None)
        if point is not None:
            assert await stage.died(stage.start("rules", crash_at=point)) == 137
            if mutation != "no-guard":
                stage.mutation = "none"
        stage.start("rules")
        await stage.look()
        await stage.taken()
        await stage.look()
        return list(wrong_findings(stage.model, stage.seen))


@pytest.mark.parametrize(
    ("mutation", "point", "what"),
    [
        ("no-guard", "snapshots_acknowledged:2", "invented"),
        ("commits-first", "outputs_acknowledged:2", "invented"),
        ("unacknowledged", "committed:2", "lost"),
        ("states-unacknowledged", "committed:2", "invented"),
        ("repeats", None, "invented"),
    ],
)
async def test_a_mutation_of_the_rules_worker_is_found(
    tmp_path: Path, mutation: str, point: str | None, what: str
) -> None:
    (tmp_path / "sound").mkdir()
    assert await after_a_crash(tmp_path / "sound", "none", point) == []
    wrong = await after_a_crash(tmp_path, mutation, point)
    kinds = {one.partition(":")[0] for one in wrong}
    assert what in kinds, "a suite that finds nothing here finds nothing at all"


@pytest.mark.kafka
async def test_two_versions_of_a_rule_share_the_runs_of_a_rolling_restart(
    tmp_path: Path, kafka_url: str
) -> None:
    async with kafka_stage(tmp_path, "versions", shared=kafka_url) as stage:
        stage.model = Model(versions=("1", "2"))
        await stage.look()
        before = [stage.start("rules"), stage.start("rules")]
        await stage.feed()
        await stage.taken()
        stage.mutation = "next-version"
        for member in before:
            stage.start("rules")
            for _ in range(3):
                await stage.feed()
                await asyncio.sleep(0.5)
            await stage.kill(member)
            await stage.feed()
        await stage.taken()
        await stage.look()
        assert list(wrong_findings(stage.model, stage.seen)) == []
        firsts = stage.seen.issues.keys() & stage.model.issues.keys()
        assert firsts, "the version before has found some"
        assert stage.seen.issues.keys() - firsts, "and so has the next one"


@pytest.mark.kafka
async def test_a_version_that_cannot_read_the_state_of_the_one_before_starts_cold_and_says_so(
    tmp_path: Path, kafka_url: str
) -> None:
    async with kafka_stage(tmp_path, "cold", shared=kafka_url) as stage:
        stage.model = Model(versions=("1", "2"))
        await stage.look()
        before = stage.start("rules")
        for _ in range(3):
            await stage.feed()
        await stage.taken()
        await stage.look()
        stage.model.forget()
        stage.seen.states.clear()
        stage.mutation = "cold-version"
        stage.start("rules")
        await stage.kill(before)
        for _ in range(3):
            await stage.feed()
        await stage.taken()
        await stage.look()
        said, stage.seen.unexpected = stage.seen.unexpected, []
        assert len(said) == len(stage.model.runs)
        for one in said:
            assert one.startswith("an issue of cold_start")
            assert "version 2 cannot read that of version 1" in one
        assert list(wrong_findings(stage.model, stage.seen)) == []


async def rounds(
    where: Where, tmp_path: Path, brokers: Sequence[Broker], proxies: Sequence[TcpProxy]
) -> None:
    killed = number = 0
    while killed < KILLS:
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        seed = f"{SEED}/{where}/{number}"
        opened = (
            kafka_stage(folder, seed, brokers, proxies) if brokers else embedded_stage(folder, seed)
        )
        async with opened as stage:
            wrong = await a_round(stage, where, min(ROUND, KILLS - killed))
            assert wrong == [], f"round {number} of seed {SEED}"
            killed += sum(stage.killed.values())
        shutil.rmtree(folder)
        number += 1
        print(f"{where}: {killed} kills in {number} rounds", flush=True)


@pytest.mark.torture
@pytest.mark.timeout(86_400)
async def test_a_fleet_on_one_bus_file_for_long(tmp_path: Path) -> None:
    await rounds("embedded", tmp_path, (), ())


@pytest.mark.torture
@pytest.mark.kafka
@pytest.mark.timeout(86_400)
async def test_a_fleet_on_one_broker_for_long(tmp_path: Path) -> None:
    environ = with_slow_disk(tmp_path)
    async with one_broker(tmp_path, environ=environ) as (brokers, proxies):
        await rounds("broker", tmp_path, brokers, proxies)


@pytest.mark.torture
@pytest.mark.kafka
@pytest.mark.timeout(86_400)
async def test_a_fleet_on_three_brokers_for_long(tmp_path: Path) -> None:
    async with three_brokers(tmp_path) as (brokers, proxies):
        await rounds("cluster", tmp_path, brokers, proxies)
