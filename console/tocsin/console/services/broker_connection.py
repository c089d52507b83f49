"""The bus of a worker at its start: brokers that are being started, too, are waited for.

After that the worker itself goes on trying, with what it holds (`tocsin.runtime.worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from tocsin.bus.port import Bus, BusUnavailable
from tocsin.schemas.errors import MissingExtra

try:
    import tenacity
except ImportError as error:
    raise MissingExtra("kafka", "a kafka:// bus") from error

logger = logging.getLogger(__name__)

CONNECT_S: Final = 15.0
"""How long it is tried. With a wrong address the service has to end, so that somebody sees it; and
whoever supervises it starts it again if brokers take longer."""

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 5.0


async def connect(
    stack: contextlib.AsyncExitStack,
    open_bus: Callable[[], Bus],
    stopping: asyncio.Event,
    *,
    within_s: float = CONNECT_S,
    first_pause_s: float = _FIRST_PAUSE_S,
) -> Bus | None:
    """Enter a bus into `stack`; None if `stopping` was set first.

    Raises:
        BusUnavailable: no broker answered in time.
        UnusableBus: a broker refused us. That is not tried again.
    """

    async def enter() -> Bus:
        if stopping.is_set():
            raise BusUnavailable("told to stop")
        return await stack.enter_async_context(open_bus())

    async def pause(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stopping.wait()

    too_long = tenacity.stop_after_delay(within_s)
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(BusUnavailable),
        # The random part keeps the workers of a fleet from trying all at once.
        wait=tenacity.wait_exponential(first_pause_s, _LONGEST_PAUSE_S)
        + tenacity.wait_random(0, first_pause_s),
        stop=lambda state: stopping.is_set() or too_long(state),
        sleep=pause,
        before_sleep=_log_retry,
        reraise=True,
    )
    try:
        return await retrying(enter)
    except BusUnavailable:
        if stopping.is_set():
            return None
        raise


def _log_retry(state: tenacity.RetryCallState) -> None:
    """The first failure for everybody, the repeats for debugging only."""
    error = state.outcome.exception() if state.outcome is not None else None
    level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG
    logger.log(level, "the bus does not answer, trying again: %s", error, extra={"action": "start"})
