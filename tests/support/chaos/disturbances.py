"""What is done to a fleet, each by its name. `Stage.undisturbed` takes back what lasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from support.chaos.stage import Role, Stage
from support.servers.kafka_broker import DELETED_MS, Broker
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition
from tocsin.schemas.monotonic_clock import unix_ms

Where = Literal["embedded", "broker", "cluster"]
DAY_MS: Final = 86_400_000
ZOMBIE_S: Final[Mapping[Where, float]] = {"embedded": 3.5, "broker": 2.5, "cluster": 2.5}
"""After so long a frozen member of a group has lost its partitions."""


@dataclass(frozen=True)
class Disturbance:
    """One of them.

    Attributes:
        act: does it; may take some seconds.
        where: the kinds of bus that it can happen to.
        weight: how often it is chosen, beside the others.
    """

    name: str
    act: Callable[[Stage], Awaitable[None]]
    where: frozenset[Where]
    weight: int


DISTURBANCES: Final[dict[str, Disturbance]] = {}
"""All, by name."""

_ANYWHERE: Final[tuple[Where, ...]] = ("embedded", "broker", "cluster")
_ON_KAFKA: Final[tuple[Where, ...]] = ("broker", "cluster")

Act = Callable[[Stage], Awaitable[None]]


def disturbance(
    name: str, *, where: Sequence[Where] = _ANYWHERE, weight: int = 1
) -> Callable[[Act], Act]:
    """Register a function under that name."""

    def register(act: Act) -> Act:
        assert name not in DISTURBANCES
        DISTURBANCES[name] = Disturbance(name, act, frozenset(where), weight)
        return act

    return register


def chosen(where: Where, dice: random.Random) -> Disturbance:
    """One of those that can happen there."""
    found = [one for one in DISTURBANCES.values() if where in one.where]
    return dice.choices(found, [one.weight for one in found])[0]


# -- processes die, freeze, come and go -------------------------------------------------------


def used_s(pid: int) -> float:
    """Processor seconds of a process; -1 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def has_worked(pid: int, seconds: float, *, at_most_s: float = 2.0) -> None:
    """Until a process has used so much of the processor, is gone, or has nothing to do."""
    start_s = used_s(pid)
    # One that has read all waits for input, which the next turn brings.
    with contextlib.suppress(AssertionError):
        await until(lambda: not 0 <= used_s(pid) < start_s + seconds, at_most_s)


async def _kill_one(stage: Stage, role: Role) -> None:
    running = stage.of(role)
    if not running:
        return
    victim = stage.dice.choice(running)
    await has_worked(victim.pid, stage.dice.choice((0.0, 0.01, 0.03, 0.08, 0.2)))
    await stage.kill(victim)


async def _freeze_one(stage: Stage, role: Role) -> None:
    running = stage.of(role)
    if not running:
        return
    victim = stage.dice.choice(running)
    await has_worked(victim.pid, stage.dice.choice((0.0, 0.02, 0.1)))
    if victim.process.poll() is not None:
        return
    stage.freeze(victim)
    if role != "emitter":
        stage.start(role)
    # Frozen in the middle of a write, it has an embedded bus locked until it wakes up.
    feeding = asyncio.create_task(stage.feed())
    # Now and then it wakes up while all still wait for it.
    long_s = ZOMBIE_S["broker" if stage.on_kafka else "embedded"]
    await asyncio.sleep(stage.dice.choice((0.2, long_s)))
    stage.thaw()
    await feeding


@disturbance("a rules worker is killed", weight=8)
async def kill_a_rules_worker(stage: Stage) -> None:
    await _kill_one(stage, "rules")


@disturbance("an action service is killed", weight=6)
async def kill_an_action_service(stage: Stage) -> None:
    await stage.publish(stage.plain.fatal())
    await _kill_one(stage, "actions")


@disturbance("a training is killed", weight=4)
async def kill_a_training(stage: Stage) -> None:
    victim = stage.start("emitter")
    await asyncio.sleep(stage.dice.choice((0.05, 0.2, 0.6, 1.0)))
    await stage.kill(victim)
    # As a scheduler does: the job is started again, and is another training of its run.
    stage.start("emitter", run=victim.run)


@disturbance("all are killed at once", weight=2)
async def kill_all(stage: Stage) -> None:
    for member in [*stage.members]:
        await stage.kill(member)


@disturbance("a rules worker is frozen", weight=2)
async def freeze_a_rules_worker(stage: Stage) -> None:
    await _freeze_one(stage, "rules")


@disturbance("an action service is frozen", weight=2)
async def freeze_an_action_service(stage: Stage) -> None:
    await stage.publish(stage.plain.fatal())
    await _freeze_one(stage, "actions")


@disturbance("a training is frozen")
async def freeze_a_training(stage: Stage) -> None:
    await _freeze_one(stage, "emitter")


@disturbance("the machine sleeps")
async def freeze_all(stage: Stage) -> None:
    """All processes at once, for longer than a claim on anything lives."""
    for member in stage.members:
        if member.process.poll() is None:
            stage.freeze(member)
    await asyncio.sleep(4.0)
    stage.thaw()


@disturbance("a rebalance each second", weight=2)
async def rebalance(stage: Stage) -> None:
    for _ in range(3):
        member = stage.start("rules")
        await stage.feed()
        await asyncio.sleep(1.0)
        await stage.kill(member)


# -- what comes is not what should -----------------------------------------------------------


@disturbance("records come twice")
async def send_twice(stage: Stage) -> None:
    await stage.feed(twice=True)


@disturbance("records come in another order")
async def swap(stage: Stage) -> None:
    await stage.feed(swapped=True)


@disturbance("twenty kinds of poison")
async def send_poison(stage: Stage) -> None:
    await stage.feed()
    made = stage.plain.poison()
    stage.model.poison |= {(one.key, one.value or b"", one.headers) for one in made}
    await stage.publish(made)


@disturbance("a run that must be stopped", weight=2)
async def send_a_fatal_run(stage: Stage) -> None:
    await stage.publish(stage.plain.fatal())


@disturbance("a clock is wrong", weight=2)
async def set_a_clock(stage: Stage) -> None:
    """That of a worker's node. A process looks at the clock when it starts, and counts from there.

    On Kafka append times are the brokers'; the processes of an embedded bus are of one machine, and
    differ by how much its clock was set between their starts.
    """
    most_ms = 3 * DAY_MS if stage.on_kafka else 3_600_000
    stage.set_clock(stage.dice.choice((-most_ms, most_ms)))
    await _kill_one(stage, "rules")
    member = stage.start("rules")
    await stage.feed()
    await has_worked(member.pid, 0.1)
    await stage.undisturbed()


# -- what is remembered is gone --------------------------------------------------------------


@disturbance("what was not read has expired")
async def let_records_expire(stage: Stage) -> None:
    """The workers were away for longer than records are kept."""
    await stage.calm()
    await stage.feed()
    await stage.feed()
    bus = stage.bus
    if isinstance(bus, EmbeddedBus):
        done = await bus.maintain(5_000, unix_ms() + DAY_MS + 1_000)
        assert not done.more
    else:
        ends = await stage.ends(stage.telemetry())
        async with stage.without_reader(), _admin(stage) as admin:
            gone = {
                TopicPartition(*place): RecordsToDelete(end) for place, end in ends.items() if end
            }
            await admin.delete_records(gone)
            # Whoever kills a broker from now on brings none of them back.
            await asyncio.sleep(2 * DELETED_MS / 1000)
    await stage.feed()


@disturbance("the states are lost")
async def lose_the_states(stage: Stage) -> None:
    """The topic of the states is deleted, and made anew."""
    await stage.calm()
    if stage.on_kafka:
        async with stage.without_reader():
            async with _admin(stage) as admin:
                await admin.delete_topics([stage.topics.state])
                # It is there for a while yet, and would be taken for the new one.
                await _until_gone(admin, stage.topics.state)
            await _made_anew(stage)
    else:
        await _delete_states(stage)
    stage.forget_states()
    await stage.feed()


@disturbance("the states are lost under those who have them")
async def lose_the_states_under_workers(stage: Stage) -> None:
    """Each is deleted while workers run. They know them, and save them as their runs go on."""
    await stage.rest()
    await _delete_states(stage)
    await stage.feed()
    # Who dies before that takes with it what nobody else knows.
    await stage.taken()


async def _delete_states(stage: Stage) -> None:
    topic = stage.topics.state
    gone = [Outgoing(Partition(topic, number), key, None) for number, key in stage.seen.keys]
    await stage.publish(gone)


async def _until_gone(admin: Any, topic: str) -> None:
    deadline = time.monotonic() + 60
    while topic in await admin.list_topics():
        assert time.monotonic() < deadline, "the topic was not deleted"
        await asyncio.sleep(0.2)


async def _made_anew(stage: Stage) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(KafkaError):
            states = await stage.bus.init(stage.topics.specs())
            if all(state.exists for state in states):
                return
        assert time.monotonic() < deadline, "the topic was not made anew"
        await asyncio.sleep(0.2)


# -- the way to Kafka ------------------------------------------------------------------------


@disturbance("connections are cut", where=_ON_KAFKA, weight=2)
async def cut_connections(stage: Stage) -> None:
    for _ in range(stage.dice.randint(1, 4)):
        await stage.feed()
        stage.dice.choice(stage.proxies).cut()
        await asyncio.sleep(stage.dice.choice((0.0, 0.1, 0.5)))


@disturbance("connections are refused", where=_ON_KAFKA)
async def refuse_connections(stage: Stage) -> None:
    for proxy in stage.proxies:
        proxy.refuses = True
        proxy.cut()
    await stage.feed()
    await asyncio.sleep(stage.dice.choice((0.5, 3.0)))
    await stage.undisturbed()


@disturbance("all comes late", where=_ON_KAFKA)
async def delay(stage: Stage) -> None:
    for proxy in stage.proxies:
        proxy.delay_s = stage.dice.choice((0.05, 0.2))
    await stage.feed()
    await asyncio.sleep(2.0)
    await stage.undisturbed()


@disturbance("connections are silent", where=_ON_KAFKA)
async def hold(stage: Stage) -> None:
    """As after a cable was pulled: nothing comes, and nobody says that the connection is over."""
    proxy = stage.dice.choice(stage.proxies)
    proxy.hold()
    await stage.feed()
    await asyncio.sleep(stage.dice.choice((1.0, 4.0, 8.0)))
    await stage.undisturbed()


# -- Kafka itself ----------------------------------------------------------------------------


@disturbance("a broker is frozen", where=_ON_KAFKA)
async def freeze_a_broker(stage: Stage) -> None:
    broker = stage.dice.choice(stage.brokers)
    await stage.feed()
    os.kill(broker.pid, signal.SIGSTOP)
    await asyncio.sleep(stage.dice.choice((1.0, 4.0)))
    os.kill(broker.pid, signal.SIGCONT)


@disturbance("the broker is killed", where=("broker",))
async def kill_the_broker(stage: Stage) -> None:
    await stage.feed()
    await _killed_and_back(stage, stage.brokers[0])


@disturbance("the leader of a partition is killed", where=("cluster",), weight=2)
async def kill_a_leader(stage: Stage) -> None:
    await in_sync(stage)
    leaders = {row["leader"] for row in await _partitions(stage)}
    leader = stage.dice.choice(sorted(leaders))
    await stage.feed()
    await _killed_and_back(stage, stage.brokers[leader - 1])


@disturbance("the controller is killed", where=("cluster",))
async def kill_the_controller(stage: Stage) -> None:
    await in_sync(stage)
    await _killed_and_back(stage, controller(stage.brokers))


@disturbance("a disk is slow", where=("broker",))
async def slow_a_disk(stage: Stage) -> None:
    if stage.slow_disk is None:
        return
    stage.set_slow_disk(stage.dice.choice((1_000, 10_000)))
    # What is sent meanwhile may take until the disk is quick again.
    feeding = asyncio.create_task(stage.feed())
    await asyncio.sleep(2.0)
    await stage.undisturbed()
    await feeding


async def _killed_and_back(stage: Stage, broker: Broker) -> None:
    broker.stop(hard=True)
    stage.killed["broker"] += 1
    feeding = asyncio.create_task(stage.feed())
    await asyncio.sleep(stage.dice.choice((0.0, 2.0)))
    await asyncio.to_thread(broker.start)
    await feeding


_ACTIVE: Final = re.compile(r"Becoming the active controller at epoch (\d+)")


def controller(brokers: Sequence[Broker]) -> Broker:
    """The one that became the active controller last, as the brokers' logs have it."""

    def epoch(broker: Broker) -> int:
        found = _ACTIVE.findall(broker.log.read_text(errors="replace"))
        return max(map(int, found), default=-1)

    return max(brokers, key=epoch)


async def in_sync(stage: Stage) -> None:
    """Until each partition has all its copies: the next broker that dies takes nothing with it."""
    deadline = time.monotonic() + 90
    while True:
        with contextlib.suppress(KafkaError, OSError):
            rows = await _partitions(stage)
            if rows and all(len(row["isr"]) == len(stage.brokers) for row in rows):
                return
        assert time.monotonic() < deadline, "the copies do not come into sync"
        await asyncio.sleep(0.5)


async def delete_topics(stage: Stage) -> None:
    """Take all of a round from the brokers."""
    async with _admin(stage) as admin:
        await admin.delete_topics([spec.name for spec in stage.topics.specs()])


async def _partitions(stage: Stage) -> list[dict[str, Any]]:
    names = [spec.name for spec in stage.topics.specs()]
    async with _admin(stage) as admin:
        topics = await admin.describe_topics([*names, "__consumer_offsets"])
    return [row for topic in topics for row in topic["partitions"]]


@contextlib.asynccontextmanager
async def _admin(stage: Stage):  # type: ignore[no-untyped-def]  # aiokafka has no types
    admin = AIOKafkaAdminClient(bootstrap_servers=stage.bus.url.removeprefix("kafka://"))
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()
