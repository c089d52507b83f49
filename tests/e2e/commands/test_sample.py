"""`tocsin sample` as it is started on a node: beside a run that registers, and for one by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.records.issues import view_record
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Outgoing, Partition
from tocsin.emitter.node.registry import NODE_FOLDER
from tocsin.schemas.records.frames import SystemFrame
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.topics import Topics, telemetry_partition

TOCSIN = [sys.executable, "-m", "tocsin.console"]

# A training that says that it is here, as `start()` does.
REGISTERS = """
import os, sys, time
from tocsin.emitter.node.registry import NodeFolder, Registration
entry = NodeFolder.from_environ(os.environ).leave(Registration(
    run_id="gpt-1", incarnation="i1", bus=sys.argv[1], prefix="tocsin", job_pid=os.getpid(),
    folder=os.getcwd(),
))
time.sleep(120)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, NODE_FOLDER: str(tmp_path / "node")}


@contextlib.contextmanager
def started(
    command: list[str], folder: Path, environ: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def make(folder: Path, *records: Outgoing) -> None:
    async with EmbeddedBus(folder / "bus.db") as bus:
        await bus.init(Topics().specs())
        producer = await bus.producer()
        await producer.publish(records)
        await producer.close()


async def samples_with(folder: Path, run_id: str, columns: set[str]) -> list[SystemFrame]:
    """What came until these columns had come."""
    found: list[SystemFrame] = []
    at = Partition(Topics().telemetry, telemetry_partition(run_id))
    async with EmbeddedBus(folder / "bus.db") as bus, asyncio.timeout(60):
        reader = await bus.reader({at: EARLIEST})
        while not columns <= {column for frame in found for column in frame.columns}:
            for record in await reader.poll(timeout_s=1.0):
                assert record.value is not None
                found.append(SystemFrame.decode(record.value))
        await reader.close()
    return found


def test_a_run_that_registers_is_sampled_until_it_leaves(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    asyncio.run(make(tmp_path))
    config = tmp_path / "tocsin.yaml"
    config.write_text("version: 1\ncapture: {system: {interval: 100ms, folders: [/dev/shm]}}\n")
    registers = [sys.executable, "-c", REGISTERS, f"embedded:{tmp_path}/bus.db"]
    samples = [*TOCSIN, "sample", "--config", str(config)]
    disks = {"disk.free_bytes", "disk./dev/shm.free_bytes"}
    wanted = {"cpu.percent", "memory.process_tree_bytes", *disks}
    with (
        started(registers, tmp_path, environ) as training,
        started(samples, tmp_path, environ) as agent,
    ):
        found = asyncio.run(samples_with(tmp_path, "gpt-1", wanted))
        training.kill()
        training.wait()
        assert agent.stderr is not None
        log = b""
        for line in agent.stderr:
            log += line
            if b"has left this node" in line:
                break
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 0
    assert b"samples for run gpt-1" in log
    assert list((tmp_path / "node").iterdir()) == []
    assert {frame.origin.incarnation for frame in found} == {"i1"}
    assert len(found[-1].at_us) > 1


def test_a_run_by_name_is_found_on_the_bus(tmp_path: Path, environ: dict[str, str]) -> None:
    view = RunView(run_id="gpt-2", incarnation="i7", state="running")
    asyncio.run(make(tmp_path, view_record(view)))
    command = [*TOCSIN, "sample", "--run-id", "gpt-2", "--interval", "100ms"]
    command += ["--bus", f"embedded:{tmp_path}/bus.db"]
    with started(command, tmp_path, environ) as agent:
        found = asyncio.run(samples_with(tmp_path, "gpt-2", {"cpu.percent"}))
        agent.send_signal(signal.SIGINT)
        assert agent.wait(30) == 0
    assert {frame.origin.incarnation for frame in found} == {"i7"}


def test_an_interval_that_is_none_is_said(tmp_path: Path) -> None:
    command = [*TOCSIN, "sample", "--interval", "often"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "tocsin: --interval often: expected a duration from 100ms to 60s, for example 500ms\n",
    )
