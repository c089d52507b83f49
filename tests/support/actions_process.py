"""An action worker as a process: `python -m support.actions_process BUS URL KEYS RUN DEADLINE_S`.

Ends by itself once all issues are taken in and all deliveries of the run are final; dies where
`TOCSIN_CRASH_AT` says.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from pydantic import SecretStr

from tocsin.actions.delivery.retry import RetryPolicy
from tocsin.actions.service import build_actions_service
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.testing import CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.key_folder import own_key
from tocsin.schemas.topics import Topics

SECRET = SecretStr("hook")


async def main(path: Path, url: str, keys: Path, run: str, deadline_s: float) -> int:
    topics, crash = Topics(), CrashPoints.from_environment(os.environ)
    async with EmbeddedBus(path) as bus:
        service = build_actions_service(
            topics,
            Config(),
            bus=bus,
            key=own_key(keys),
            secrets={},
            embedded=True,
            notify=[url],
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
    bus, url, keys, run, deadline_s = sys.argv[1:]
    raise SystemExit(asyncio.run(main(Path(bus), url, Path(keys), run, float(deadline_s))))
