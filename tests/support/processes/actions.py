"""An action worker as a process.

    python -m support.processes.actions BUS URLS KEYS RUN DEADLINE_S

It serves one run and ends once all issues are taken in and all deliveries are final; with `-` for
RUN it is a member of the group `actions`, on the bus whose prefix `TOCSIN_PREFIX` names. Stops have
the mode `TOCSIN_STOP_MODE`. Dies where `TOCSIN_CRASH_AT` says, or after as much processor time as
`TOCSIN_KILL_AFTER_CPU_S` says, at whatever it is doing then.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from support.buses import World
from tocsin.actions.composition import build_actions_service
from tocsin.actions.decision.retry import RetryPolicy
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.key_folder import own_key
from tocsin.schemas.topics import Topics

KILL_AFTER_CPU_S = "TOCSIN_KILL_AFTER_CPU_S"
STOP_MODE = "TOCSIN_STOP_MODE"


async def main(where: str, urls: str, keys: Path, run: str, deadline_s: float) -> int:
    topics = Topics(os.environ.get("TOCSIN_PREFIX", "tocsin"))
    crash = CrashPoints.from_environment(os.environ)
    kind = "kafka" if where.startswith("kafka://") else "embedded"
    async with World(kind, where).reached() as bus:
        service = build_actions_service(
            topics,
            Config.model_validate({"defaults": {"mode": os.environ.get(STOP_MODE, "enforce")}}),
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
            group=f"{topics.prefix}-actions",
            only_runs=None if run == "-" else [run],
            settings=WorkerSettings(checkpoint_s=0.01, poll_records=2),
            crash=crash,
        )
        running = asyncio.create_task(worker.run())
        if run == "-":
            await running
        done = await worker.caught_up(deadline_s) and await service.drain(deadline_s)
        worker.stop()
        await running
    return 0 if done else 1


if __name__ == "__main__":
    if (cpu_s := os.environ.get(KILL_AFTER_CPU_S)) is not None:
        # Nothing handles the signal: the kernel ends the process, as it does at SIGKILL.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
    bus, urls, keys, run, deadline_s = sys.argv[1:]
    raise SystemExit(asyncio.run(main(bus, urls, Path(keys), run, float(deadline_s))))
