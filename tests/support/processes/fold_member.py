"""One of several workers of a group, with the fold service.

    python -m support.processes.fold_member BUS MUTATION END

MUTATION `none` is the worker as it is; the others are faults that the suite must find. With END
`caught-up` it takes all runs without membership and ends once it has read them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from support.chaos.mutations import kind_of_worker, mutate
from support.rules.fold_service import FoldService
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import Topics

RUNS: Sequence[str] = tuple(f"run-{number}" for number in range(8))


def worker_of(bus: EmbeddedBus, mutation: str, *, only: bool) -> Worker:
    topics = Topics()
    worker = kind_of_worker(mutation)(
        bus,
        FoldService(topics, guard=mutation != "no-guard"),
        topics=topics,
        group="fold",
        only_runs=RUNS if only else None,
        settings=WorkerSettings(checkpoint_s=0.01, poll_records=5),
        crash=CrashPoints.from_environment(os.environ),
    )
    mutate(worker, mutation)
    return worker


async def main(path: Path, mutation: str, end: str) -> None:
    async with EmbeddedBus(path) as bus:
        worker = worker_of(bus, mutation, only=end == "caught-up")
        running = asyncio.create_task(worker.run())
        if end == "caught-up":
            done = await worker.caught_up(60.0)
            worker.stop()
            await running
            if not done:
                raise SystemExit("not caught up within 60 s")
        await running


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
