"""An action worker as a process: `python -m support.actions_process BUS URLS KEYS RUN DEADLINE_S`.

Ends by itself once all issues are taken in and all deliveries of the run are final; dies where
`TOCSIN_CRASH_AT` says, or after as much processor time as `TOCSIN_KILL_AFTER_CPU_S` says, at
whatever it is doing then.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tocsin.actions.delivery.retry import RetryPolicy
from tocsin.actions.service import build_actions_service
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.key_folder import own_key
from tocsin.schemas.topics import Topics

KILL_AFTER_CPU_S = "TOCSIN_KILL_AFTER_CPU_S"


async def main(path: Path, urls: str, keys: Path, run: str, deadline_s: float) -> int:
    topics, crash = Topics(), CrashPoints.from_environment(os.environ)
    async with EmbeddedBus(path) as bus:
        service = build_actions_service(
            topics,
            Config(),
            bus=bus,
            key=own_key(keys),
            secrets={},
            embedded=True,
            notify=urls.split(),
            policy=RetryPolicy(first_ms=10, most_ms=20, least_ms=5),
            crash=crash,
        )
        worker = Worker(
            bus,
            service,
            topics=topics,
            group="actions",
            only_runs=[run],
            settings=WorkerSettings(checkpoint_s=0.01, poll_records=2),
            crash=crash,
        )
        running = asyncio.create_task(worker.run())
        done = await worker.caught_up(deadline_s) and await service.drain(deadline_s)
        worker.stop()
        await running
    return 0 if done else 1


if __name__ == "__main__":
    if (cpu_s := os.environ.get(KILL_AFTER_CPU_S)) is not None:
        # Nothing handles the signal: the kernel ends the process, as it does at SIGKILL.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
    bus, urls, keys, run, deadline_s = sys.argv[1:]
    raise SystemExit(asyncio.run(main(Path(bus), urls, Path(keys), run, float(deadline_s))))
