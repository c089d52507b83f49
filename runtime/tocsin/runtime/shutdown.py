"""Signals, and the one order in which the parts of a service process end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from tocsin.bus.port import BusError
from tocsin.schemas.errors import ConfigurationError

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

PART_BUDGET_S: Final = 15.0
"""For one part to end after `stop`: a checkpoint takes at most 10 s, closing 6 s."""


class Part(Protocol):
    """Something that runs until `stop`: a worker, an HTTP server."""

    async def run(self) -> None:
        """Until `stop`."""
        ...

    def stop(self) -> None:
        """Ask `run` to return. From the event loop's thread; does not block."""
        ...


@contextlib.contextmanager
def stop_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Within: SIGTERM and SIGINT set `stopping`. Main thread only."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def serve(
    parts: Sequence[Part], stopping: asyncio.Event, *, budget_s: float = PART_BUDGET_S
) -> int:
    """Run all parts until `stopping` is set or one of them ends; then stop them in their order.

    Each has `budget_s` seconds to end and is cancelled after that. Returns the exit code: 0, or 1
    if a part failed or did not end in time.

    Raises:
        ConfigurationError: a part failed for what it was asked to do, which no restart mends.
    """
    tasks = [asyncio.create_task(part.run(), name=f"tocsin-{i}") for i, part in enumerate(parts)]
    wake = asyncio.create_task(stopping.wait(), name="tocsin-stopping")
    await asyncio.wait({wake, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    wake.cancel()
    code = 0
    mistake: ConfigurationError | None = None
    for part, task in zip(parts, tasks, strict=True):
        part.stop()
        _, late = await asyncio.wait({task}, timeout=budget_s)
        if late:
            logger.error("a part did not end in time", extra={"action": "shutdown"})
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
            code = 1
        elif task.cancelled() or (error := task.exception()) is None:
            continue
        elif isinstance(error, ConfigurationError) and not isinstance(error, BusError):
            mistake = error
        else:
            logger.error(
                "stopped by an error: %s", error, exc_info=error, extra={"action": "shutdown"}
            )
            code = 1
    if mistake is not None:
        raise mistake
    return code
