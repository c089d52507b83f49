"""`tocsin rules --workers 2`: real workers share the runs; one that is killed is started again."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.buses import World
from support.configured_buses import context_on
from support.records.on_bus import data_of, send
from support.waiting import wait_until
from tocsin.bus.port import Partition
from tocsin.schemas.process.own_python import python_command
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import issue_partition
from tocsin.stream_rules.testing import RunBuilder


def two_ports() -> int:
    """The first of two neighbouring ports of loopback that were free a moment ago."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
        return port


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def bad_run(name: str) -> RunBuilder:
    run = RunBuilder(name)
    run.started()
    run.steps(range(5), loss=1.0)
    run.steps([5], loss=math.nan)
    return run


# On Kafka only by `make torture`: the command takes 20 s of CPU, most of it to start.
@pytest.fixture(
    params=["embedded", pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.torture])]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A bus of each kind."""
    if request.param == "kafka":
        return World("kafka", request.getfixturevalue("kafka_url"))
    return World("embedded", f"embedded:{tmp_path / 'bus.db'}")


def test_a_worker_that_is_killed_is_started_again_and_all_runs_are_watched(
    world: World, tmp_path: Path
) -> None:
    context = context_on(world, tmp_path)
    topics, names, port = context.topics, ("run-1", "run-2", "run-3", "run-4"), two_ports()

    async def create() -> None:
        async with context.open_bus() as bus:
            await bus.init(topics.specs())

    async def publish() -> None:
        records = [record for name in names for record in bad_run(name).records]
        places = [Partition(topics.telemetry, record.partition.number) for record in records]
        async with context.open_bus() as bus:
            own = zip(records, places, strict=True)
            await send(bus, [replace(record, partition=place) for record, place in own])

    async def found() -> set[str]:
        async with context.open_bus() as bus:
            data = [await data_of(bus, topics.issues, issue_partition(name)) for name in names]
        return {one.run_id for row in data for one in row if isinstance(one, IssueFiring)}

    asyncio.run(create())
    command = [*python_command("tocsin.console"), "rules", "--workers", "2"]
    command += ["--config", str(tmp_path / "tocsin.yaml"), "--http", f"127.0.0.1:{port}"]
    if world.kind == "kafka":
        # Each of them comes back under its own name.
        command += ["--member", "node-17"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(command, cwd=tmp_path, stderr=log)
    try:
        wait_until(lambda: is_ready(port) and is_ready(port + 1), what="both own partitions")
        workers = psutil.Process(parent.pid).children()
        assert len(workers) == 2
        workers[0].kill()
        wait_until(
            lambda: (
                {one.pid for one in psutil.Process(parent.pid).children()}
                not in ({workers[1].pid}, {one.pid for one in workers})
            ),
            what="another worker in its place",
        )
        wait_until(lambda: is_ready(port) and is_ready(port + 1), what="both own partitions again")
        workers = psutil.Process(parent.pid).children()
        asyncio.run(publish())
        wait_until(lambda: asyncio.run(found()) == set(names), what="an issue of each run")
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 0, (tmp_path / "log").read_text()
        assert not any(one.is_running() for one in workers)
    finally:
        parent.kill()
        parent.wait(10)
