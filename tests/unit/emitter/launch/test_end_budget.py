"""How long the launcher takes after the job, whatever hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from support.processes.launches import environment
from tocsin.emitter.launch.end_budget import LET_GO_S, MIN_PART_S, EndBudget


def test_the_parts_of_the_end_share_one_budget() -> None:
    now = [100.0]
    budget = EndBudget(2.0, now_s=lambda: now[0])
    now[0] += 50
    assert (budget.drain_s(), budget.left_s(5.0)) == (2.0, 5.0)
    budget.start()
    assert (budget.drain_s(), budget.left_s(9.0)) == (2.0, 2.0 + LET_GO_S)
    now[0] += 1.5
    assert (budget.drain_s(), budget.left_s(9.0)) == (0.5, 0.5 + LET_GO_S)
    assert budget.left_s(0.2) == 0.2
    now[0] += 60
    assert (budget.drain_s(), budget.left_s(9.0)) == (0.0, MIN_PART_S)


DIES_WITH_THE_JOB = """
import asyncio, sys
from pathlib import Path
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.emitter.launch.launcher import launch
from tocsin.emitter.launch.options import LaunchOptions

folder = Path(sys.argv[1])

async def dead():
    while (folder / "over").exists():
        await asyncio.sleep(3600)

class Part:
    def __init__(self, part):
        self._part = part
    def __getattr__(self, name):
        method = getattr(self._part, name)
        async def call(*args, **more):
            await dead()
            return await method(*args, **more)
        return call

class Dying:  # no EmbeddedBus, so the launcher uses it as it is, as one of Kafka
    def __init__(self, path):
        self._bus = EmbeddedBus(path)
    def __getattr__(self, name):
        return getattr(self._bus, name)
    async def __aenter__(self):
        await self._bus.__aenter__()
        return self
    async def __aexit__(self, *error):
        await dead()
        return await self._bus.__aexit__(*error)
    async def producer(self):
        return Part(await self._bus.producer())
    async def reader(self, start):
        return Part(await self._bus.reader(start))

path = folder / "bus.db"
ended = launch(LaunchOptions(
    command=("touch", str(folder / "over")), run_id="r1", job_id="j1",
    bus_url=f"embedded:{path}", open_bus=lambda: Dying(path), drain_s=0.5,
))
sys.exit(ended.exit_code)
"""


def test_a_bus_that_dies_with_the_job_holds_its_end_up_by_the_drain_and_little_more(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DIES_WITH_THE_JOB, str(tmp_path)],
        env=environment(tmp_path), cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _, err = process.communicate(timeout=90)
    took_s = time.time() - (tmp_path / "over").stat().st_mtime
    assert process.returncode == 0, err
    assert "1 launcher record not sent" in err
    assert took_s < 0.5 + LET_GO_S + 4, err
