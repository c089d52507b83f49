"""Capture inside of the test's own process, or of a child with the hook, and what came of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from support.processes.children import python_path
from support.waiting import HANGS_S
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Partition
from tocsin.emitter.hooks import torch_patches, training_hooks
from tocsin.emitter.training.context import current
from tocsin.emitter.training.session import Session
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.wire import Meta, decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition

D = TypeVar("D", bound=Data)

HOOK = Path(__file__).parents[3] / "emitter" / "tocsin" / "emitter" / "hooks" / "startup"


@dataclass
class Said:
    """All that a run has said, in order."""

    metas: list[Meta] = field(default_factory=list)
    events: list[Data] = field(default_factory=list)
    frames: list[TensorFrame] = field(default_factory=list)
    samples: list[SystemFrame] = field(default_factory=list)
    rows: list[tuple[int, str, dict[str, float]]] = field(default_factory=list)
    by_rank: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    """(rank, step, scalars) of training steps."""

    def of(self, kind: type[D]) -> list[D]:
        """Events of one type."""
        return [event for event in self.events if isinstance(event, kind)]

    def steps(self, mode: str = "train") -> dict[int, dict[str, float]]:
        """Scalars by step, those of the user's own beside capture's."""
        found: dict[int, dict[str, float]] = {}
        for step, of_mode, values in self.rows:
            if of_mode == mode:
                found.setdefault(step, {}).update(values)
        return found

    def frame(self, collection: str, step: int) -> TensorFrame:
        """The one frame of that collection and step."""
        (frame,) = [f for f in self.frames if (f.collection, f.step) == (collection, step)]
        return frame


def said(folder: Path, run_id: str = "r1") -> Said:
    """Read the run's telemetry from the bus of that folder."""
    partition = Partition(Topics().telemetry, telemetry_partition(run_id))
    found = Said()

    async def read() -> None:
        async with EmbeddedBus(folder / "bus.db", create=False) as bus:
            reader = await bus.reader({partition: EARLIEST})
            end = (await reader.ends([partition]))[partition]
            while await reader.position(partition) < end:
                for record in await reader.poll(timeout_s=1.0):
                    meta = read_meta(record.headers)
                    assert record.value is not None
                    value = decode(meta, record.value)
                    found.metas.append(meta)
                    if isinstance(value, Event):
                        found.events.append(value.data)
                    elif isinstance(value, TensorFrame):
                        found.frames.append(value)
                    elif isinstance(value, StepFrame):
                        for step, row in zip(value.steps, value.values, strict=True):
                            cells = dict(zip(value.columns, map(float, row), strict=True))
                            found.rows.append((int(step), value.mode, cells))
                            if value.mode == "train":
                                found.by_rank.append((value.origin.rank, int(step), cells))
                    else:
                        assert isinstance(value, SystemFrame)
                        found.samples.append(value)
            await reader.close()

    asyncio.run(read())
    return found


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a launcher would set for run `r1`, with its bus in `folder`."""
    return {
        "TOCSIN_RUN_ID": "r1",
        "TOCSIN_JOB_ID": "j1",
        "TOCSIN_BUS": f"embedded:{folder}/bus.db",
        **more,
    }


@contextmanager
def captured(folder: Path, **more: str) -> Iterator[training_hooks.Hooks]:
    """Capture what is trained inside of the block; all of it is on the bus afterwards."""
    torch_patches.install()
    hooks = torch_patches.hooks
    hooks.reset()
    with suppress(Exception):  # a planted fault
        hooks.checkpoint_reads.drain()  # what tests before this one have loaded
    hooks.asleep = hooks.forked = False
    current.isolation.reset()
    session = Session(environment(folder, **more), current.isolation)
    current.session = session
    try:
        yield hooks
    finally:
        session.end()
        hooks.reset()
        current.session = None
        current.isolation.reset()


def run_with_hook(
    folder: Path, script: str, *, timeout_s: float = HANGS_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python text as a launched job would; without capture if TOCSIN_RUN_ID is ''."""
    path = folder / "train.py"
    path.write_text(script)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
    kept["PYTHONPATH"] = python_path(HOOK)
    environ = {**kept, **environment(folder, OMP_NUM_THREADS="1"), **more}
    return subprocess.run(
        [sys.executable, str(path)],
        env={name: value for name, value in environ.items() if value},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
