"""The processes of a fleet on one bus, who sends what, and how one finds that all is as it must be.

What the driver itself sends and reads goes to the bus directly; the processes may have a proxy in
between. It answers stops as a launcher would, which is the one thing that it makes of what it sees.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from support.chaos.emitter_process import number
from support.chaos.model import Model, Seen, differences, partitions
from support.chaos.plain_runs import PlainRuns
from support.processes.forking import AlwaysForked
from support.servers.fault_server import FaultServer
from support.servers.kafka_broker import Broker
from support.servers.tcp_proxy import TcpProxy
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.bus.port import (
    EARLIEST,
    Bus,
    BusUnavailable,
    From,
    Outgoing,
    Partition,
    Producer,
    Reader,
)
from tocsin.bus.reading import read_to_end
from tocsin.runtime.testing import CRASH_AT
from tocsin.schemas.ids import incarnation_id
from tocsin.schemas.topics import Topics

TESTS: Final = Path(__file__).parents[2]
Role = Literal["rules", "actions", "emitter"]

MAX_PROCESSES: Final[Mapping[Role, int]] = {"rules": 3, "actions": 2, "emitter": 3}
"""Processes of a kind; the oldest of more is killed."""

MIN_PROCESSES: Final[Mapping[Role, int]] = {"rules": 2, "actions": 1, "emitter": 1}

NAMES: Final = frozenset(f"node-{number}" for number in range(8))
"""Of rules workers in their group, where they have one."""

EMITTED: Final = 60
"""Steps of a training: no more findings than people are notified of."""

ANSWERS: Final = "/cycle/204,503,204,reset,204"
SETTLED_S: Final = 180.0
"""How long all may take to be as it must be, once nothing disturbs any more."""


@dataclass(eq=False)
class Member:
    """A process. An emitter has a run, an incarnation, and a file with what was acknowledged; a
    rules worker may have a name in its group."""

    role: Role
    process: AlwaysForked
    run: str = ""
    incarnation: str = ""
    said: Path | None = None
    name: str = ""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid


@dataclass
class Stage:
    """One round. `url` is the bus for the processes, `bus` the driver's own, which is open.

    Attributes:
        slow_disk: the file that says how slow the brokers' disks are, in microseconds.
        killed: how many processes were killed, by role; brokers are `broker`.
        done: how often each disturbance happened.
        faults: what was seen to go wrong on the way.
        mutation: of the rules' workers.
    """

    url: str
    bus: Bus
    topics: Topics
    folder: Path
    dice: random.Random
    receiver: FaultServer
    brokers: Sequence[Broker] = ()
    proxies: Sequence[TcpProxy] = ()
    slow_disk: Path | None = None
    mutation: str = "none"
    killed: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    members: list[Member] = field(default_factory=list)
    frozen: list[Member] = field(default_factory=list)
    ended: list[Member] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen = Seen(self.topics)
        self.plain = PlainRuns(self.topics, self.dice)
        self.clock = self.folder / "clock"
        self.set_clock(0)
        self._reader: Reader | None = None
        self._producer: Producer | None = None
        self._emitters = 0
        self._answered: set[str] = set()

    # -- processes ---------------------------------------------------------------------------

    def start(
        self, role: Role, *, run: str = "", end: str = "never", crash_at: str | None = None
    ) -> Member:
        """A new process; an emitter is a job of a new run, or of one whose job is started again. A
        rules worker dies at the crash point `crash_at`."""
        prefix = self.topics.prefix
        member_run = incarnation = name = ""
        said: Path | None = None
        if role == "rules":
            words = ["support.chaos.rules_process", self.url, prefix, str(self.clock), end]
            name = self._name()
            words += [self.mutation, name or "-"]
        elif role == "actions":
            urls, keys = self.receiver.url(ANSWERS), str(self.folder / "keys")
            words = ["support.processes.actions", self.url, urls, keys, "-", "600"]
        else:
            self._emitters += 1
            member_run = run or f"emitted-{self._emitters}"
            incarnation = incarnation_id(member_run, str(self._emitters), 0, 0)
            said = self.folder / f"emitter-{self._emitters}"
            words = ["support.chaos.emitter_process", self.url, prefix, member_run, incarnation]
            words.append(str(EMITTED))
        environ = {**os.environ, "PYTHONPATH": str(TESTS), "TOCSIN_PREFIX": prefix}
        if crash_at is not None:
            environ[CRASH_AT] = crash_at
        log = said or self.folder / f"{role}.log"
        with log.open("ab") as out, (self.folder / f"{role}.log").open("ab") as errors:
            process = AlwaysForked(
                [sys.executable, "-m", *words], env=environ, stdout=out, stderr=errors
            )
        member = Member(role, process, member_run, incarnation, said, name)
        self.members.append(member)
        return member

    def _name(self) -> str:
        """Of the next rules worker, none of those that run: on Kafka two of three have one, and
        whoever comes after one that was killed is the same member of the group."""
        free = NAMES - {one.name for one in self.members}
        return min(free) if self.on_kafka and self.dice.random() < 2 / 3 else ""

    @property
    def on_kafka(self) -> bool:
        """Whether the bus is Kafka."""
        return self.bus.url.startswith("kafka:")

    def of(self, role: Role) -> list[Member]:
        """Those that run now, frozen ones left out."""
        return [one for one in self.members if one.role == role and one not in self.frozen]

    async def kill(self, member: Member) -> None:
        """SIGKILL."""
        self.members.remove(member)
        if member in self.frozen:
            self.frozen.remove(member)
        if member.process.poll() is None:
            member.process.kill()
            self.killed[member.role] += 1
        await self._wait(member)
        self.ended.append(member)

    def freeze(self, member: Member) -> None:
        """SIGSTOP; `thaw` lets it go on, when others have its work by then, or not yet."""
        _signal(member, signal.SIGSTOP)
        self.frozen.append(member)

    def thaw(self) -> None:
        """SIGCONT to all that were frozen."""
        for member in self.frozen:
            _signal(member, signal.SIGCONT)
        self.frozen.clear()

    async def populate(self, roles: Sequence[Role] = ("rules", "actions", "emitter")) -> None:
        """As many processes as there should be; those that have ended by themselves are taken out,
        and one that should not have is a fault."""
        for member in list(self.members):
            if member not in self.frozen and (code := member.process.poll()) is not None:
                self.members.remove(member)
                self.ended.append(member)
                if member.role != "emitter" or code != 0:
                    log = (self.folder / f"{member.role}.log").read_text(errors="replace")
                    self.faults.append(f"{member.role} ended with {code}: {log[-1500:]}")
        for role in roles:
            while len(self.of(role)) < MIN_PROCESSES[role]:
                self.start(role)
            while (
                len(every := [one for one in self.members if one.role == role])
                > MAX_PROCESSES[role]
            ):
                await self.kill(every[0])

    async def _wait(self, member: Member) -> int:
        return await asyncio.to_thread(member.process.wait, 120)

    # -- what the driver sends ---------------------------------------------------------------

    async def publish(self, records: Sequence[Outgoing]) -> None:
        """Until it is acknowledged; so some of it may be there twice."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            try:
                if self._producer is None:
                    self._producer = await self.bus.producer()
                await self._producer.publish(records)
                return
            except BusUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)

    async def feed(self, *, twice: bool = False, swapped: bool = False) -> None:
        """Some more of each plain run."""
        await self.publish(self.plain.more(twice=twice, swapped=swapped))

    # -- what the driver sees ----------------------------------------------------------------

    async def look(self) -> None:
        """Take in what has come to the bus, and answer the stops among it.

        Raises BusUnavailable: not all of it was read, and the next look goes on.
        """
        if self._reader is None:
            self._reader = await self.bus.reader(dict.fromkeys(partitions(self.topics), EARLIEST))
        ends = await self._reader.ends(partitions(self.topics))
        async for records in read_to_end(self._reader, ends, quiet_s=20.0):
            for record in records:
                if record.partition.topic == self.topics.telemetry:
                    self.model.read(record)
                else:
                    self.seen.read(record)
        for command, request in self.seen.requests.items():
            if command not in self._answered:
                self._answered.add(command)
                await self.publish([self.plain.leaves(request)])

    def differences(self) -> list[str]:
        """How the bus and the receivers differ from what must be."""
        urls = [self.receiver.url(ANSWERS)]
        found = differences(self.model, self.seen, list(parse_addresses(urls)), self.receiver.ids())
        return [*self.faults, *found, *self._wrong_emitters()]

    def _wrong_emitters(self) -> list[str]:
        """Each training's steps are there from the first on, in order, without a hole, as far as
        the bus has acknowledged them at least."""
        wrong: list[str] = []
        for member in (*self.ended, *self.members):
            if member.said is None:
                continue
            there = self.model.steps.get((member.run, member.incarnation), [])
            wanted = [
                (step, number(member.run, member.incarnation, step)) for step in range(len(there))
            ]
            if there != wanted:
                steps = [step for step, _ in there]
                wrong.append(f"{member.run} of a training: the steps {steps}")
            acknowledged = [int(line) for line in member.said.read_text().split()]
            least = EMITTED if member.process.poll() == 0 else max(acknowledged, default=-1) + 1
            if len(there) < least:
                wrong.append(f"lost: steps {len(there)} to {least - 1} of {member.run}")
        return wrong

    async def settle(self) -> list[str]:
        """Let all come to its end, with nothing disturbed; what is wrong then."""
        self.thaw()
        await self.undisturbed()
        wrong = await self.comes_to(lambda found: not found)
        if wrong:
            for broker in self.brokers:
                wrong += broker.failed_coordinators()
        return wrong

    async def comes_to(self, wanted: Callable[[list[str]], bool]) -> list[str]:
        """Look until the trainings are over and what is wrong is as wanted, or there was time
        enough; what is wrong then."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            await self.populate(("rules", "actions"))
            try:
                await self.look()
                found = self.differences()
            except BusUnavailable as error:
                found = [f"the bus cannot be read: {error}"]
            if any(one.role == "emitter" for one in self.members):
                found.append("a training has not ended")
            if wanted(found) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.5 if self.on_kafka else 0.2)

    async def taken(self) -> None:
        """Until the rules have committed all that is there, and so have said all of it."""
        group, topic = f"{self.topics.prefix}-rules", self.topics.telemetry
        places = self.telemetry()
        consumer = await self.bus.consumer(group, [topic], only=places)
        try:
            ends = await consumer.ends(places)
            deadline = time.monotonic() + SETTLED_S
            for place, end in ends.items():
                while end and (await consumer.committed(place) or 0) < end:
                    assert time.monotonic() < deadline, f"not all is committed of {place}"
                    await asyncio.sleep(0.1)
        finally:
            await consumer.close()

    async def died(self, member: Member) -> int:
        """With which code a process ended that ends by itself."""
        self.members.remove(member)
        return await self._wait(member)

    def set_clock(self, ahead_ms: int) -> None:
        """How far a rules worker that starts from now on is ahead, in a file that is never half
        written."""
        part = self.clock.with_suffix(".part")
        part.write_text(str(ahead_ms))
        part.replace(self.clock)

    def set_slow_disk(self, more_us: int) -> None:
        """How much longer each write of a broker takes. In place: the brokers have mapped it."""
        if self.slow_disk is not None:
            with self.slow_disk.open("r+b") as file:
                file.write(more_us.to_bytes(4, "little"))

    async def undisturbed(self) -> None:
        """Take back all that lasts."""
        self.set_clock(0)
        for proxy in self.proxies:
            proxy.refuses, proxy.delay_s = False, 0.0
            proxy.release()
        self.set_slow_disk(0)
        for broker in self.brokers:
            if broker.process is None:
                await asyncio.to_thread(broker.start)
            else:
                os.kill(broker.pid, signal.SIGCONT)

    async def rest(self) -> None:
        """All is read, written and committed; rules run, and no emitter."""
        wrong = await self.settle()
        assert wrong == [], wrong
        await self.taken()

    async def calm(self) -> None:
        """All is read, written and committed; no rules run any more, and no emitter."""
        wrong = await self.settle()
        assert wrong == [], wrong
        for member in [one for one in self.members if one.role == "rules"]:
            await self.kill(member)
        last = self.start("rules", end="caught-up")
        assert await self.died(last) == 0, "the last of the rules' workers has not caught up"

    def forget_states(self) -> None:
        """The topic of the states was emptied, or is another one."""
        self.model.forget()
        self.seen.states.clear()

    @asynccontextmanager
    async def without_reader(self) -> AsyncIterator[None]:
        """Within the block nothing is read; what was fetched ahead is forgotten. Afterwards it goes
        on where it was, with the states from their beginning."""
        assert self._reader is not None
        places = {
            place: EARLIEST
            if place.topic == self.topics.state
            else From.offset(await self._reader.position(place))
            for place in partitions(self.topics)
        }
        await self._reader.close()
        yield
        self._reader = await self.bus.reader(places)

    async def ends(self, places: Sequence[Partition]) -> Mapping[Partition, int]:
        """Where the next records come."""
        assert self._reader is not None
        return await self._reader.ends(places)

    def telemetry(self) -> list[Partition]:
        """The partitions that runs write to."""
        return [one for one in partitions(self.topics) if one.topic == self.topics.telemetry]

    async def close(self) -> None:
        """End all processes."""
        for member in list(self.members):
            member.process.kill()
            await self._wait(member)
        self.members.clear()
        if self._reader is not None:
            await self._reader.close()
        if self._producer is not None:
            await self._producer.close()

    def report(self) -> str:
        """One line: what happened, and how much was right."""
        return json.dumps(
            {
                "killed": dict(sorted(self.killed.items())),
                "disturbances": dict(sorted(self.done.items())),
                "issues": len(self.model.issues),
                "deliveries": len(self.seen.finals),
                "stops": len(self.seen.commands),
                "runs": len(self.model.runs),
                "dead_letters": len(self.seen.letters),
            }
        )


def _signal(member: Member, number: signal.Signals) -> None:
    # A training may have come to its end by itself.
    with suppress(ProcessLookupError):
        os.kill(member.pid, number)
