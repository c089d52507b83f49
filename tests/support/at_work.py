"""A worker of this process, for as long as a test needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tocsin.runtime.worker import Worker


@asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[None]:
    """Run it within the block, then stop it as its supervisor does. Raises what it raises."""
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await task
