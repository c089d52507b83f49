"""The archive workers as a process: `python -m support.processes.archive BUS STORE FAMILY`.

Ends by itself once all that is there is in the store and sorted; SIGKILL where `TOCSIN_CRASH_AT`
says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from tocsin.bus.port import Bus
from tocsin.bus.urls import open_bus
from tocsin.runtime.testing import CRASH_AT, CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import Topics
from tocsin.store import Store, open_store
from tocsin.store.archive.service import ArchiveService, FlushPolicy
from tocsin.store.archive.upkeep import IDLE_MS, SETTLE_MS, Upkeep
from tocsin.store.manifest import FAMILIES, Family

QUICK = FlushPolicy(every_ms=0, settle_ms=0)


async def archive_all(
    bus: Bus,
    store: Store,
    *,
    topics: Topics | None = None,
    families: Collection[Family] = FAMILIES,
    crash: CrashPoints | None = None,
    policy: FlushPolicy = QUICK,
    group: str = "archive",
) -> None:
    """All that is on a bus, a family after the other, in flushes of few records; then sorted."""
    topics = topics or Topics()
    crash = crash or CrashPoints(None)
    for family in families:
        upkeep = Upkeep(store, topics=topics, crash=crash)
        service = ArchiveService(
            store, family, topics=topics, upkeep=upkeep, policy=policy, crash=crash
        )
        worker = Worker(
            bus,
            service,
            topics=topics,
            group=f"{group}-{family}",
            settings=WorkerSettings(checkpoint_s=0.01, poll_records=15),
            crash=crash,
        )
        running = asyncio.create_task(worker.run())
        caught_up = asyncio.create_task(worker.caught_up(30.0))
        await asyncio.wait({running, caught_up}, return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await running
        assert await caught_up
        await asyncio.to_thread(upkeep.run_due, 2**60 + IDLE_MS + SETTLE_MS)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(bus: str, store: Path, family: Family) -> None:
    crash = CrashPoints(os.environ.get(CRASH_AT), die=kill)
    async with open_bus(bus) as opened:
        await archive_all(opened, open_store(store), families=[family], crash=crash)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))  # type: ignore[arg-type]
