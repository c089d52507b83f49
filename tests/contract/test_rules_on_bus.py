"""Rules behind a worker: custom ones, a comparison with another run, one that never returns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.at_work import at_work
from support.buses import World, next_millisecond, until
from support.configured_buses import context_on
from support.processes.children import python_path
from support.records.on_bus import data_of, read_all, send, work
from support.rules.custom import FILE
from tocsin.bus.port import Bus, Partition, Record
from tocsin.console.__main__ import app
from tocsin.console.context import CommandContext
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.exit_codes import FAILED
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import issue_partition
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TESTS = Path(__file__).parents[1]
RULES = f"""\
defaults: {{rules: none}}
rules:
  - {{name: mine, use: "{FILE}:HighLoss", params: {{limit: 2.5}}}}
  - {{name: alike, use: differs_from_run, params: {{other_run: before}}}}
"""


def run_of(name: str, *, jump: float, ended: bool = True) -> RunBuilder:
    run = RunBuilder(name)
    run.started()
    run.steps(range(20), loss=1.0)
    run.steps([20], loss=jump)
    run.steps(range(21, 30), loss=1.0)
    if ended:
        run.ended()
    return run


async def publish(context: CommandContext, bus: Bus, run: RunBuilder) -> None:
    place = Partition(context.topics.telemetry, run.records[0].partition.number)
    await send(bus, [replace(record, partition=place) for record in run.records])


def worker_on(context: CommandContext, bus: Bus, *, poll_records: int = 500) -> Worker:
    service = build_rules_service(context.topics, context.config, folder=context.loaded.folder)
    group, settings = f"{context.topics.prefix}-rules", WorkerSettings(poll_records=poll_records)
    return Worker(bus, service, topics=context.topics, group=group, settings=settings)


async def watched(context: CommandContext) -> set[tuple[str, str]]:
    """Rules and states of the issues that a worker publishes of the second run."""
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        for run in (run_of("before", jump=1.0), run_of("gpt-1", jump=5.0)):
            await publish(context, bus, run)
        assert await work(worker_on(context, bus))
        found = await data_of(bus, context.topics.issues, issue_partition("gpt-1"))
    mine = [one for one in found if isinstance(one, IssueFiring) and one.run_id == "gpt-1"]
    return {(one.issue_id, one.rule) for one in mine}


def test_what_was_found_live_is_found_in_a_replay(world: World, tmp_path: Path) -> None:
    context = context_on(world, tmp_path, RULES)
    live = asyncio.run(watched(context))
    assert {rule for _, rule in live} == {"mine", "alike"}

    config = str(tmp_path / "tocsin.yaml")
    done = CliRunner().invoke(app, ["replay", "--run", "gpt-1", "--config", config, "--json"])

    assert done.exit_code == 0, done.exception
    found = json.loads(done.output)["issues"]
    assert {(one["issue_id"], one["rule"]) for one in found} == live


@pytest.mark.parametrize(
    "world", ["embedded", pytest.param("kafka", marks=pytest.mark.torture)], indirect=True
)
async def test_a_rule_that_never_returns_is_off_for_its_run_in_the_worker_that_comes_next(
    world: World, tmp_path: Path
) -> None:
    context = context_on(world, tmp_path)
    environ = {**os.environ, "PYTHONPATH": python_path(TESTS)}
    log = tmp_path / "rules.log"
    ended: list[int] = []
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        await publish(context, bus, run_of("gpt-1", jump=float("nan")))

        def start() -> subprocess.Popen[bytes]:
            config = str(tmp_path / "tocsin.yaml")
            command = [sys.executable, "-m", "support.rules.hanging_rule", config]
            with log.open("a") as out:
                return subprocess.Popen(command, env=environ, stderr=out)

        process = start()

        async def reported() -> dict[str, IssueFiring]:
            found = await data_of(bus, context.topics.issues, issue_partition("gpt-1"))
            return {one.rule: one for one in found if isinstance(one, IssueFiring)}

        async def restarted_until_reported() -> bool:
            nonlocal process
            if (code := process.poll()) is not None:
                ended.append(code)
                process = start()
            await asyncio.sleep(0.2)
            return {"nonfinite", "rule_failed"} <= (await reported()).keys()

        try:
            await until(restarted_until_reported, "the next worker goes on without the rule")
        finally:
            process.kill()
            process.wait()
        found = await reported()

    assert ended, "no worker of which a rule hangs goes on"
    assert set(ended) == {FAILED}
    assert found["rule_failed"].subject.name == "loss_spike"
    assert "did not return" in found["rule_failed"].reason
    assert "support/rules/hanging_rule.py" in log.read_text(), "it says where the rule was"


async def test_a_stall_is_found_and_none_in_a_run_that_goes_on_while_no_worker_reads(
    world: World, tmp_path: Path
) -> None:
    text = (
        "defaults: {rules: none}\n"
        "rules: [{name: stalls, use: stalled_training, params: {threshold: 5s}}]\n"
    )
    context = context_on(world, tmp_path, text)
    newest = {"silent": 29, "alive": 29}
    silent, alive = run_of("silent", jump=1.0, ended=False), run_of("alive", jump=1.0, ended=False)
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())

        async def sent(run: RunBuilder, since: int = 0) -> int:
            place = Partition(context.topics.telemetry, run.records[0].partition.number)
            await send(bus, [replace(one, partition=place) for one in run.records[since:]])
            return len(run.records)

        async def goes_on(run: RunBuilder, seconds: int, *, steps: bool) -> None:
            at = len(run.records)
            for _ in range(2 * seconds):
                if steps:
                    newest[run.run_id] += 1
                    run.steps([newest[run.run_id]], loss=1.0)
                run.heartbeat(last_step=newest[run.run_id])
                at = await sent(run, at)
                await asyncio.sleep(0.5)

        async def both(seconds: int) -> None:
            await asyncio.gather(
                goes_on(silent, seconds, steps=False), goes_on(alive, seconds, steps=True)
            )

        async def stalled() -> set[str]:
            found = [
                await data_of(bus, context.topics.issues, issue_partition(run.run_id))
                for run in (silent, alive)
            ]
            return {one.run_id for all_ in found for one in all_ if isinstance(one, IssueFiring)}

        await asyncio.gather(sent(silent), sent(alive))
        async with at_work(worker_on(context, bus)):
            await both(2)
        await both(7)  # nobody reads: at its end, no step of `alive` is known for longer than 5 s
        assert await stalled() == set()
        # Record by record: between two of them, timers have their chance.
        async with at_work(worker_on(context, bus, poll_records=1)):
            await both(7)
        assert await stalled() == {"silent"}


async def test_rules_start_cold_on_a_log_that_begins_anew(world: World, tmp_path: Path) -> None:
    before, context = (context_on(World(world.kind, world.url), tmp_path) for _ in range(2))
    run = run_of("gpt-1", jump=1.0, ended=False)
    number = run.records[0].partition.number
    place = Partition(context.topics.telemetry, number)
    async with context.open_bus() as bus:
        await bus.init(before.topics.specs())
        await bus.init(context.topics.specs())
        await publish(before, bus, run)
        assert await work(worker_on(before, bus))
        # As if the telemetry had been deleted, and neither the states nor the group's offsets.
        states = await read_all(bus, before.topics.state, number)
        kept = Partition(context.topics.state, number)
        await send(bus, [replace(record, partition=kept) for record in states])
        consumer = await bus.consumer(f"{context.topics.prefix}-rules", [place.topic], only=[place])
        await consumer.commit({place: len(run.records)})
        await consumer.close()
        await next_millisecond()

        def go_on(steps: Iterable[int], loss: float) -> list[Record]:
            at = len(run.records)
            for step in steps:
                run.steps([step], loss=loss)
            return [replace(record, partition=place) for record in run.records[at:]]

        await send(bus, go_on(range(30, 40), float("nan")))
        assert await work(worker_on(context, bus))
        await send(bus, go_on(range(40, 45), 1.0))
        assert await work(worker_on(context, bus))

        found = await data_of(bus, context.topics.issues, issue_partition("gpt-1"))
    rules = [one.rule for one in found if isinstance(one, IssueFiring)]
    assert rules.count("nonfinite") == 1
    assert rules.count("cold_start") == 1, "its states are of that log then"
