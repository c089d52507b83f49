"""The reader beside a training: what ranks tell of is read apart, in order, one at a time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from support.waiting import wait_until
from tocsin.emitter.checkpoints.reader import QUEUED, CheckpointReader
from tocsin.emitter.process.process_group import process_lives
from tocsin.emitter.stop.datagrams import Message
from tocsin.schemas.records.checkpoints import CheckpointRead
from tocsin.schemas.records.events import Data


def message(path: Path | str, step: int = 7, rank: int = 1) -> Message:
    return {
        "kind": "saved", "run_id": "r1", "incarnation": "i1", "rank": rank, "world_size": 2,
        "pid": 1, "path": str(path), "step": step, "size_bytes": 3,
    }  # fmt: skip


def reading(
    use: Callable[[CheckpointReader], Awaitable[None]],
    command: Callable[[str], tuple[str, ...]] | None = None,
) -> list[CheckpointRead]:
    """What a reader publishes while it is used."""
    said: list[Data] = []

    async def go() -> None:
        given = {} if command is None else {"command": command}
        reader = CheckpointReader("r1", said.append, **given)
        task = asyncio.create_task(reader.run())
        await use(reader)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())
    assert all(isinstance(one, CheckpointRead) for one in said)
    return [one for one in said if isinstance(one, CheckpointRead)]


def test_a_checkpoint_is_read_and_told(tmp_path: Path) -> None:
    torch.save({"w": torch.full((2, 2), float("nan"))}, tmp_path / "a.pt")

    async def use(reader: CheckpointReader) -> None:
        assert reader.receive(message(tmp_path / "a.pt"))
        assert not reader.receive({"kind": "left"})
        assert await reader.settled(60.0)

    (read,) = reading(use)
    assert (read.run_id, read.incarnation, read.rank, read.world_size) == ("r1", "i1", 1, 2)
    assert (read.checkpoint.path, read.checkpoint.step) == (str(tmp_path / "a.pt"), 7)
    assert read.nonfinite == ("w",)
    assert read.unread == ""


def test_what_cannot_be_read_is_told_too(tmp_path: Path) -> None:
    async def use(reader: CheckpointReader) -> None:
        reader.receive(message(tmp_path / "gone.pt"))
        reader.receive(message("not/absolute.pt"))
        assert await reader.settled(60.0)

    (read,) = reading(use)
    assert "No such file" in read.unread

    def noise(path: str) -> tuple[str, ...]:
        return (sys.executable, "-c", "print('no JSON')")

    (read,) = reading(use, noise)
    assert read.unread == "the reader failed"


def test_written_again_it_is_read_once_and_too_many_are_not_read() -> None:
    async def go() -> None:
        reader = CheckpointReader("r1", lambda data: None)
        reader.receive(message("/a/last.pt", step=1))
        reader.receive(message("/a/last.pt", step=2))
        assert [one["step"] for one in reader._waiting] == [2]
        for number in range(2 * QUEUED):
            reader.receive(message(f"/a/{number}.pt"))
        assert len(reader._waiting) == QUEUED
        assert reader.skipped == QUEUED + 1
        assert not await reader.settled(0.0)

    asyncio.run(go())


def test_at_the_end_a_child_that_reads_is_ended() -> None:
    pids: list[int] = []

    async def use(reader: CheckpointReader) -> None:
        reader.receive(message("/a/b.pt"))
        await asyncio.to_thread(wait_until, lambda: reader.pid is not None)
        assert reader.pid is not None
        pids.append(reader.pid)

    def endless(path: str) -> tuple[str, ...]:
        return (sys.executable, "-c", "import time; time.sleep(3600)")

    assert reading(use, endless) == []
    assert not process_lives(pids[0])
