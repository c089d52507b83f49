"""`tocsin rules --workers 2`: real workers share the runs; one that is killed is started again."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from support.bus_records import data_of, send
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.process.own_python import python_command
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import Topics, issue_partition
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()


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


def test_a_worker_that_is_killed_is_started_again_and_all_runs_are_watched(tmp_path: Path) -> None:
    url, names, port = tmp_path / "bus.db", ("run-1", "run-2", "run-3", "run-4"), two_ports()

    async def publish() -> None:
        async with EmbeddedBus(url) as bus:
            await bus.init(TOPICS.specs())
            for name in names:
                await send(bus, bad_run(name).records)

    async def found() -> set[str]:
        async with EmbeddedBus(url) as bus:
            data = [await data_of(bus, TOPICS.issues, issue_partition(name)) for name in names]
        return {one.run_id for row in data for one in row if isinstance(one, IssueFiring)}

    command = [*python_command("tocsin.console"), "rules", "--workers", "2"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [*command, "--bus", f"embedded:{url}", "--http", f"127.0.0.1:{port}"],
            cwd=tmp_path,
            stderr=log,
        )
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
