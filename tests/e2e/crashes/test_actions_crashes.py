"""An action worker that is killed at each point between consume and commit loses no delivery.

A process of its own on a real bus file, a real HTTP receiver, a stop that a run answers. The long
form kills at random, at named points and at any line: `TOCSIN_KILLS` times, 20 of them in each
round, from `TOCSIN_KILL_SEED`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.processes.actions import KILL_AFTER_CPU_S, STOP_MODE
from support.processes.forking import AlwaysForked
from support.records.issues import TOPICS, issue, issue_record, view, view_record
from support.records.on_bus import read_all
from support.servers.fault_server import fault_server
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Record
from tocsin.console.publication import publish_signed
from tocsin.runtime.testing import CRASH_AT, CRASH_POINTS
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.key_folder import keys_folder
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.topics import issue_partition

TESTS = Path(__file__).parents[2]
POINTS = (*CRASH_POINTS, "attempting", "attempted")
ISSUES = [issue(episode=str(i)) for i in range(4)]


async def process(
    bus: Path,
    urls: str,
    keys: Path,
    *,
    crash_at: str | None = None,
    kill_after_cpu_s: float | None = None,
    mode: str = "enforce",
    deadline_s: int = 120,
) -> int:
    """How a worker ended that delivers to these URLs; 0 if it had nothing left to do."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), STOP_MODE: mode}
    environment.pop(CRASH_AT, None)
    if crash_at is not None:
        environment[CRASH_AT] = crash_at
    if kill_after_cpu_s is not None:
        environment[KILL_AFTER_CPU_S] = str(kill_after_cpu_s)
    words = (f"embedded:{bus}", urls, str(keys), "run-1", str(deadline_s))
    child = AlwaysForked(
        [sys.executable, "-m", "support.processes.actions", *words], env=environment
    )
    return await asyncio.to_thread(child.wait, 150)


async def read(bus: EmbeddedBus, topic: str) -> list[Record]:
    return await read_all(bus, topic, issue_partition("run-1"))


async def entries(bus: EmbeddedBus) -> list[Delivery]:
    found = [EVENT_TYPES.decode(r.value or b"").data for r in await read(bus, TOPICS.actions)]
    return [data for data in found if isinstance(data, Delivery)]


@pytest.mark.parametrize("point", POINTS)
async def test_no_delivery_is_lost_or_invented(tmp_path: Path, point: str) -> None:
    await crash_and_check(tmp_path, point, "/then/503,429,204", (1,))


@pytest.mark.torture
@pytest.mark.parametrize("path", ["/status/204", "/then/503,429,204", "/status/404"])
@pytest.mark.parametrize("point", POINTS)
async def test_whatever_the_receiver_answers(tmp_path: Path, point: str, path: str) -> None:
    await crash_and_check(tmp_path, point, path, (1, 1, 2, 3))


async def crash_and_check(tmp_path: Path, point: str, path: str, passes: tuple[int, ...]) -> None:
    async with fault_server() as server, EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        await producer.publish([issue_record(found) for found in ISSUES])
        # The run answers the one stop that it will get; its answer waits on the bus.
        stop_id = delivery_id(ISSUES[0].issue_id, "stop", "firing")
        exited = StopView(state="exited", command_id=stop_id, how="edge", exit_code=79)
        await producer.publish([view_record(view(stop=exited))])

        codes = [
            await process(bus.path, server.url(path), tmp_path / "keys", crash_at=f"{point}:{nth}")
            for nth in passes
        ]
        # A later process may have nothing left to do at that point.
        assert codes[0] == 137
        assert set(codes) <= {137, 0}
        assert await process(bus.path, server.url(path), tmp_path / "keys") == 0

        (hook,) = parse_addresses([server.url(path)])
        hooks = {delivery_id(found.issue_id, hook, "firing") for found in ISSUES}
        stops = {delivery_id(found.issue_id, "stop", "firing") for found in ISSUES}
        last: dict[str, Delivery] = {}
        finals: Counter[str] = Counter()
        for entry in await entries(bus):
            last[entry.delivery_id] = entry
            finals[entry.delivery_id] += entry.final
        assert set(last) == hooks | stops
        assert set(finals.values()) == {1}, "each delivery reaches one final state, once"
        wanted = "rejected" if path == "/status/404" else "delivered"
        assert {last[identity].state for identity in hooks} == {wanted}
        assert Counter(last[identity].state for identity in stops) == {
            "delivered": 1,
            "suppressed": 3,
        }
        assert set(server.ids()) == hooks, "equal ids on repeats, and no other"
        commands = {(r.key, r.value, r.headers) for r in await read(bus, TOPICS.control)}
        assert len(commands) == 1, "a stop that is sent again is the same to the byte"


@pytest.mark.parametrize("point", POINTS)
async def test_a_stop_that_people_approve_is_sent_once(tmp_path: Path, point: str) -> None:
    """Workers die at the point while they ask, and again when the answer has come."""
    about, person = ISSUES[0], {"XDG_CONFIG_HOME": str(tmp_path)}
    stop_id = delivery_id(about.issue_id, "stop", "firing")
    async with EmbeddedBus(tmp_path / "bus.db") as bus:

        async def work(crash_at: str | None = None, deadline_s: int = 120) -> int:
            return await process(
                bus.path,
                "",
                keys_folder(person),
                mode="ask",
                crash_at=crash_at,
                deadline_s=deadline_s,
            )

        async def newest() -> Delivery | None:
            found = await entries(bus)
            return found[-1] if found else None

        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        await producer.publish([issue_record(about)])
        crash_at: str | None = f"{point}:1"
        while (asked := await newest()) is None or not asked.waits_for_people:
            assert await work(crash_at, deadline_s=1) in (137, 1)
            crash_at = None
        assert not await read(bus, TOPICS.control), "nothing is sent before somebody answers"

        exited = StopView(state="exited", command_id=stop_id, how="edge", exit_code=79)
        await producer.publish([view_record(view(stop=exited))])
        answer = StopAnswered(
            run_id=asked.run_id,
            incarnation=asked.incarnation,
            delivery_id=stop_id,
            verdict="approve",
            by="ana@node-1",
            at_ms=unix_ms(),
        )
        await publish_signed(bus, TOPICS, answer, answer.key, person, now_ms=unix_ms())
        # With the issue behind it, a worker may come to no further point of its own loop.
        assert await work(f"{point}:1") in ((137,) if point.startswith("attempt") else (137, 0))
        assert await work() == 0

        found = [entry for entry in await entries(bus) if entry.delivery_id == stop_id]
        assert [entry.state for entry in found if entry.final] == ["delivered"]
        commands = {
            (r.key, r.value, r.headers)
            for r in await read(bus, TOPICS.control)
            if r.key.endswith(b"/stop")
        }
        assert len(commands) == 1, "a stop that is sent again is the same to the byte"


ANSWERS = {
    "/status/204": "delivered",
    "/cycle/503,reset,204,429,204": "delivered",
    "/status/404": "rejected",
}
KILLS = 20
"""In one round. A process begins with all that the bus holds of its round, so short rounds are
cheap; their last process still finishes what twenty dead ones have left."""
ROUNDS = max(1, int(os.environ.get("TOCSIN_KILLS", "10000")) // KILLS)
SEED = int(os.environ.get("TOCSIN_KILL_SEED", "1"))


@pytest.mark.torture
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_random_kills_lose_and_invent_nothing(tmp_path: Path, number: int) -> None:
    chance = random.Random(f"{SEED}/{number}")
    killed = 0
    issues: list[IssueFiring] = []
    async with fault_server() as server, EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        producer = await bus.producer()
        urls, keys = " ".join(map(server.url, ANSWERS)), tmp_path / "keys"
        while killed < KILLS:
            some = [
                issue(episode=str(len(issues) + nth), severity="warning")
                for nth in range(chance.randint(1, 3))
            ]
            issues += some
            await producer.publish([issue_record(one) for one in some])
            at_a_point = chance.random() < 0.5
            code = await process(
                bus.path,
                urls,
                keys,
                crash_at=f"{chance.choice(POINTS)}:{chance.randint(1, 4)}" if at_a_point else None,
                kill_after_cpu_s=None if at_a_point else chance.uniform(0.01, 0.12),
            )
            assert code in (0, 137, -signal.SIGPROF)
            killed += code != 0
        assert await process(bus.path, urls, keys) == 0

        hooks = list(parse_addresses([server.url(path) for path in ANSWERS]))
        wanted = {
            delivery_id(one.issue_id, hook, "firing"): state
            for one in issues
            for hook, state in zip(hooks, ANSWERS.values(), strict=True)
        }
        finals: dict[str, list[str]] = {}
        for entry in await entries(bus):
            finals.setdefault(entry.delivery_id, []).extend([entry.state] * entry.final)
        assert finals == {identity: [state] for identity, state in wanted.items()}
        assert set(server.ids()) == set(wanted), "equal ids on repeats, and no other"
        repeats = len(server.ids()) - len(wanted)
        print(f"round {number}: {killed} kills, {len(wanted)} deliveries, {repeats} attempts more")
