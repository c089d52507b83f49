"""A worker with the fold service as a process: `python -m support.processes.fold BUS guard|none`.

Ends by itself once all of its input is applied and committed; dies where `TOCSIN_CRASH_AT` says.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from support.rules.fold_service import FoldService
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import Topics


async def main(path: Path, guard: bool) -> None:
    topics = Topics()
    async with EmbeddedBus(path) as bus:
        worker = Worker(
            bus,
            FoldService(topics, guard=guard),
            topics=topics,
            group="fold",
            only_runs=["run-1", "run-2"],
            settings=WorkerSettings(checkpoint_s=0.01, poll_records=5),
            crash=CrashPoints.from_environment(os.environ),
        )
        running = asyncio.create_task(worker.run())
        done = await worker.caught_up(30.0)
        worker.stop()
        await running
    if not done:
        raise SystemExit("not caught up within 30 s")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] == "guard"))
