"""Who samples a node: one of the reports of a run, unless an agent does."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from support.trainings.captured import said
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus
from tocsin.emitter.node import agent, publisher
from tocsin.emitter.node.agent import NodeAgent
from tocsin.emitter.node.publisher import NodePlan, NodeReport
from tocsin.emitter.node.registry import NODE_FOLDER, NodeFolder, Registration
from tocsin.emitter.node.sampler import Machine
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.topics import Topics

PLAN = NodePlan(interval_s=0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "CHECK_S", 0.02)
    monkeypatch.setattr(agent, "POLL_S", 0.02)
    monkeypatch.setattr("tocsin.emitter.node.sampler.PACKED_S", 0.05)


class Site:
    """A bus, a node's folder, and reports on them."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.environ = {NODE_FOLDER: str(folder)}
        self.folder = NodeFolder(folder)

    def report(self, run_id: str = "r1", incarnation: str = "i1", pid: int = 0) -> NodeReport:
        origin = RecordOrigin(run_id=run_id, incarnation=incarnation)
        report = NodeReport(
            self.bus, Topics(), origin, folder=None, plan=PLAN, environ=self.environ
        )
        report.node.root_pid = pid or os.getpid()
        return report


def counted(report: NodeReport, taken: Counter[str], name: str) -> NodeReport:
    """It counts its samples."""
    sample = report.node.sample

    def noted(now_s: float) -> dict[str, float]:
        taken[name] += 1
        return sample(now_s)

    report.node.sample = noted  # type: ignore[method-assign]
    return report


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_samples_for_all_and_the_next_takes_over(tmp_path: Path) -> None:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(Topics().specs())
        site, taken = Site(bus, tmp_path / "node"), Counter[str]()
        one, two = (counted(site.report(pid=pid), taken, str(pid)) for pid in (os.getpid(), 1))
        first = asyncio.create_task(one.run())
        await until(lambda: taken[str(os.getpid())] > 2)
        second = asyncio.create_task(two.run())
        # The processes of both are the job's.
        await until(lambda: one.node.other_roots == {os.getpid(), 1})
        assert taken["1"] == 0
        await ended(first)
        await until(lambda: taken["1"] > 2)
        await until(lambda: two.node.other_roots == {1})
        await ended(second)
        assert list(site.folder.path.iterdir()) == []


async def _launchers_and_an_agent(tmp_path: Path) -> None:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(Topics().specs())
        site, taken = Site(bus, tmp_path / "node"), Counter[str]()
        reports = {
            name: asyncio.create_task(counted(site.report(name), taken, name).run())
            for name in ("r1", "r2")
        }
        await until(lambda: taken["r1"] and taken["r2"])

        async def find() -> list[Registration]:
            return site.folder.registrations()

        agent = NodeAgent(
            site.folder, find, lambda found: EmbeddedBus(tmp_path / "bus.db"), plan=PLAN
        )
        working = asyncio.create_task(agent.run())
        await until(lambda: len(agent._copies) == 2)
        before = dict(taken)
        # One run leaves the node, the other goes on.
        await ended(reports.pop("r2"))
        await until(lambda: len(agent._copies) == 1)
        assert taken == before
        await ended(working)
        await until(lambda: taken["r1"] > before["r1"])
        await ended(*reports.values())


def test_launchers_step_aside_for_an_agent_and_come_back(tmp_path: Path) -> None:
    asyncio.run(_launchers_and_an_agent(tmp_path))
    samples = said(tmp_path).samples + said(tmp_path, "r2").samples
    assert {frame.origin.run_id for frame in samples} == {"r1", "r2"}
    own = [frame for frame in samples if "memory.process_tree_bytes" in frame.columns]
    assert {frame.origin.run_id for frame in own} == {"r1", "r2"}
    # Whoever samples, no two do so at a time.
    for run_id in ("r1", "r2"):
        frames = [frame for frame in samples if frame.origin.run_id == run_id]
        spans = sorted((frame.at_us[0], frame.at_us[-1]) for frame in frames)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_an_agent_counts_xids_from_the_first_sample_of_each_incarnation(tmp_path: Path) -> None:
    def registered(incarnation: str) -> list[Registration]:
        bus = f"embedded:{tmp_path}"
        return [Registration(run_id="r1", incarnation=incarnation, bus=bus, prefix="tocsin")]

    machine = Machine(root=tmp_path)
    copy = agent._Copy(registered("i1"), machine, NodePlan(interval_s=5.0))

    def counted_of(gpu: str, xids: int, xid: int) -> tuple[float, ...]:
        sample = {f"gpu.{gpu}.xids": float(xids), f"gpu.{gpu}.xid": float(xid)}
        (frame,) = copy.frames_of(sample, 1.0, 1)
        row = dict(zip(frame.columns, frame.values[0].tolist(), strict=True))
        return tuple(row[name] for name in sample)

    assert counted_of("0", 3, 79) == (0, 0)
    assert counted_of("0", 3, 79) == (0, 0)
    assert counted_of("0", 4, 48) == (1, 48)
    # A device without a number has columns from its first error on.
    assert counted_of("unknown", 1, 79) == (1, 79)
    copy.update(registered("i2"))
    assert counted_of("0", 4, 48) == (0, 0)
    assert counted_of("0", 6, 31) == (2, 31)
    copy.close()
    machine.close()


async def test_where_there_is_no_folder_each_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(Topics().specs())
        site, taken = Site(bus, tmp_path / "node"), Counter[str]()
        site.environ = {NODE_FOLDER: str(tmp_path / "file/node")}
        task = asyncio.create_task(counted(site.report(), taken, "it").run())
        await until(lambda: taken["it"] > 1)
        await ended(task)
    assert "no folder for locks" in caplog.text


def test_the_plan_of_a_job_s_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = '{"budget": 0.01, "system": {"interval": "2s", "folders": ["data", "/d"]}}'
    assert NodePlan.read(text, tmp_path) == NodePlan(2.0, (tmp_path / "data", Path("/d")))
    assert NodePlan.read("", tmp_path) == NodePlan()
    assert NodePlan.read('{"system": {"interval": "1h"}}', tmp_path) == NodePlan()
    assert "the defaults hold" in caplog.text
