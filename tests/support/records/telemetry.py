"""Reads what a run has said, from the bus of a test's folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TypeVar

from support.waiting import HANGS_S
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.spool import has_spools
from tocsin.bus.port import EARLIEST, Partition, UnknownTopic
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition

D = TypeVar("D", bound=Data)


def said(folder: Path, kind: type[D], run_id: str = "r1") -> list[D]:
    """All events of that type on the run's telemetry partition."""
    found = []
    for event in _values(folder, run_id, kind.event_type):
        assert isinstance(event, Event)
        assert isinstance(event.data, kind)
        found.append(event.data)
    return found


def frames(folder: Path, run_id: str = "r1") -> list[TensorFrame]:
    """All summaries on the run's telemetry partition."""
    return [
        frame
        for frame in _values(folder, run_id, TensorFrame.type)
        if isinstance(frame, TensorFrame)
    ]


def _values(folder: Path, run_id: str, kind: str) -> list[object]:
    partition = Partition(Topics().telemetry, telemetry_partition(run_id))

    async def read() -> list[object]:
        found: list[object] = []
        async with EmbeddedBus(folder / "bus.db") as bus:
            reader = await bus.reader({partition: EARLIEST})
            end = (await reader.ends([partition]))[partition]
            while await reader.position(partition) < end:
                for record in await reader.poll(timeout_s=1.0):
                    meta = read_meta(record.headers)
                    if meta.type == kind and record.value is not None:
                        found.append(decode(meta, record.value))
            await reader.close()
        return found

    return asyncio.run(read())


def wait_for(folder: Path, kind: type[D], count: int, *, timeout_s: float = HANGS_S) -> list[D]:
    """Until that many were said."""
    deadline = time.monotonic() + timeout_s
    while True:
        if (folder / "bus.db").exists() or has_spools(folder / "bus.db"):
            # A file is there before its topics are.
            with contextlib.suppress(UnknownTopic):
                found = said(folder, kind)
                if len(found) >= count:
                    return found
        assert time.monotonic() < deadline, f"not {count} of {kind.event_type} in {timeout_s:g} s"
        time.sleep(0.05)
