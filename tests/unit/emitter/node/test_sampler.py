"""Samples of this node, packed, at a rhythm that nothing holds up."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from support.waiting import until
from tocsin.emitter.node.gpus import Gpus
from tocsin.emitter.node.sampler import Machine, Node, Packer, Sample, Sampler
from tocsin.schemas.records.frames import RecordOrigin, SystemFrame

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")


def test_a_sample_of_this_node(tmp_path: Path) -> None:
    node = Node(root_pid=os.getpid(), folder=tmp_path, folders=[Path("/dev/shm")])
    first = node.sample(10.0)
    sum(range(200_000))
    second = node.sample(20.0)
    assert "cpu.percent" not in first
    assert 0 <= second["cpu.percent"] <= 100
    assert 0 <= second["cpu.iowait_percent"] <= 100
    assert 0 <= second["cpu.0.percent"] <= second["cpu.busiest_percent"] <= 100
    assert second["load.1m"] >= 0
    assert second["cpu.process_tree_percent"] >= 0
    assert 0 <= second["cpu.process_tree_busiest_core_percent"] <= 100
    assert second["memory.process_tree_bytes"] > 10_000_000
    assert 0 < second["memory.used_bytes"] < second["memory.total_bytes"]
    assert 0 < second["memory.limit_bytes"] <= second["memory.total_bytes"]
    assert 0 < second["disk.free_bytes"] <= second["disk.total_bytes"]
    assert 0 < second["disk./dev/shm.free_bytes"] <= second["disk./dev/shm.total_bytes"]
    assert second["network.received_bytes_per_s"] >= 0
    node.close()


def test_a_job_that_has_ended_has_no_columns() -> None:
    node = Node(root_pid=2**22 + 1)
    assert "memory.process_tree_bytes" not in node.sample(1.0)


def test_a_machine_without_any_of_it_has_no_columns(tmp_path: Path) -> None:
    told: list[str] = []
    node = Node(root_pid=1, root=tmp_path, report=told.append)
    assert [node.sample(float(n)) for n in range(9)] == [{}] * 9
    assert told == []


def test_jobs_share_the_machine_and_keep_what_is_theirs_apart() -> None:
    machine = Machine()
    mine, nobodys = Node(machine=machine, root_pid=os.getpid()), Node(machine=machine)
    sample = machine.sample(1.0)
    own = mine.complete(sample, 1.0)
    assert set(own) - set(nobodys.complete(sample, 1.0)) >= {"memory.process_tree_bytes"}


def test_samples_are_packed_until_columns_change() -> None:
    packer = Packer(ORIGIN, "node-1", packed_s=2.0)
    assert packer.add({"a": 1.0, "b": 2.0}, 0) == []
    assert packer.add({"b": 3.0, "a": 4.0}, 500_000) == []
    (frame,) = packer.add({"a": 5.0, "b": 6.0}, 2_000_000)
    assert frame.columns == ("a", "b")
    assert frame.values.tolist() == [[1.0, 2.0], [4.0, 3.0]]
    (other,) = packer.add({"a": 7.0}, 2_100_000)
    assert other.values.tolist() == [[5.0, 6.0]]
    (last,) = packer.flush()
    assert (last.columns, last.values.tolist()) == (("a",), [[7.0]])
    assert packer.flush() == []


@pytest.mark.parametrize(("interval_s", "rows"), [(0.1, 50), (0.5, 10), (3.0, 2), (60.0, 1)])
def test_a_frame_does_not_wait_for_a_sample_that_would_be_too_late(
    interval_s: float, rows: int
) -> None:
    packer = Packer(ORIGIN, "n", packed_s=5.0, interval_s=interval_s)
    for n in range(rows - 1):
        assert packer.add({"a": 1.0}, round(n * interval_s * 1e6)) == []
    (frame,) = packer.add({"a": 1.0}, round((rows - 1) * interval_s * 1e6))
    assert len(frame.at_us) == rows


def test_a_clock_that_goes_back_holds_no_frame() -> None:
    packer = Packer(ORIGIN, "n", interval_s=0.5)
    packer.add({"a": 1.0}, 100_000_000)
    (frame,) = packer.add({"a": 2.0}, 1_000_000)
    assert len(frame.at_us) == 2


async def test_the_loop_hands_on_what_is_left_when_it_is_cancelled() -> None:
    sent: list[SystemFrame] = []
    packer = Packer(ORIGIN, "n", packed_s=0.03)
    task = asyncio.create_task(Sampler.for_job(Node(), packer, sent.append, interval_s=0.01).run())
    await until(lambda: sent)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(len(frame.at_us) for frame in sent) >= 2
    await until(lambda: "tocsin-sample" not in [thread.name for thread in threading.enumerate()])


async def test_a_sample_that_hangs_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tocsin.emitter.node.sampler.END_S", 0.02)
    go, began = threading.Event(), threading.Event()

    class Hanging(Node):
        def sample(self, now_s: float) -> Sample:
            began.set()
            go.wait(30)
            return {}

    sampler = Sampler.for_job(Hanging(), Packer(ORIGIN, "n"), lambda frame: None)
    task = asyncio.create_task(sampler.run())
    await until(began.is_set)
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(task, return_exceptions=True)
    go.set()


async def test_a_failure_of_ours_ends_the_sampler_and_is_told() -> None:
    def fail(now_s: float, at_us: int) -> list[SystemFrame]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Sampler(fail, lambda frame: None).run()


def test_a_driver_that_hangs_does_not_hold_up_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(Gpus, "read", lambda self, now_s: {"a": float(go.wait(30))})
    node = Node(gpus=Gpus())
    for n in range(50):
        assert "memory.used_bytes" in node.sample(float(n) / 100)
    go.set()
    node.machine.close()
