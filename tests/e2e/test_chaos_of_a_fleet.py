"""All that a fleet runs at once, on each kind of bus, with everything done to it that goes wrong.

Rules, action services and trainings are processes of their own; a rule's findings depend on each
number of each training and on their order. Each finding is delivered to a receiver that fails now
and then, and some stop their run. `support.chaos.model` says what must come of it.

The long forms kill `TOCSIN_KILLS` processes, in rounds, from `TOCSIN_KILL_SEED`.
"""

from __future__ import annotations

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
from support.chaos.stage import Stage
from support.fault_server import fault_server
from support.kafka_broker import Broker, running_quorum, skip_or_fail, unavailable
from support.tcp_proxy import TcpProxy
from tocsin.bus.kafka.bus import KafkaBus
from tocsin.schemas.topics import Topics

KILLS = int(os.environ.get("TOCSIN_KILLS", "1000"))
SEED = int(os.environ.get("TOCSIN_KILL_SEED", "20261126"))
ROUND = 40
"""Kills after which all comes to rest and is compared, and topics of their own begin."""

SHORT: dict[Where, Sequence[str]] = {
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
        "the states are lost",
        "all are killed at once",
    ],
    "broker": [
        "a rules worker is killed",
        "a training is killed",
        "connections are cut",
        "an action service is killed",
        "a broker is frozen",
        "connections are silent",
        "what was not read has expired",
    ],
}
"""What CI does, once each."""


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
    folder: Path, seed: str, brokers: Sequence[Broker], proxies: Sequence[TcpProxy]
) -> AsyncIterator[Stage]:
    """Processes that reach the brokers through proxies; the topics are deleted afterwards."""
    # The driver is patient: what it waits for is what the others are hindered from.
    own = KafkaBus([broker.server for broker in brokers], request_s=20.0)
    url = "kafka://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
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
    named = brokers[0].environ.get("TOCSIN_SLOW_DISK")
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


async def test_a_fleet_on_one_bus_file(tmp_path: Path) -> None:
    async with embedded_stage(tmp_path, "short") as stage:
        assert await disturbed(stage, SHORT["embedded"]) == []
        assert stage.seen.commands
        assert {"rules", "actions", "emitter"} <= stage.killed.keys()


@pytest.mark.torture
@pytest.mark.kafka
@pytest.mark.timeout(1_800)
async def test_a_fleet_on_kafka(tmp_path: Path) -> None:
    async with (
        one_broker(tmp_path) as (brokers, proxies),
        kafka_stage(tmp_path, "short", brokers, proxies) as stage,
    ):
        assert await disturbed(stage, SHORT["broker"]) == []
        assert stage.seen.commands
        assert {"rules", "actions", "emitter"} <= stage.killed.keys()


async def test_an_engine_that_takes_repeats_is_found(tmp_path: Path) -> None:
    async with embedded_stage(tmp_path, "repeats", mutation="repeats") as stage:
        await stage.populate(("rules", "actions"))
        await stage.feed(twice=True)
        await stage.undisturbed()
        wrong = await stage.comes_to(lambda found: any("wrong state" in one for one in found))
        assert wrong, "a suite that finds nothing here finds nothing at all"


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
