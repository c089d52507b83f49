"""The sender's bus, opened when it is needed and dropped when it fails, and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tocsin.bus.port import Outlet, UnknownTopic, Writer
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.topics import Topics

CLOSE_S: Final = 2.0


class BusLink:
    """A bus and a producer on it."""

    def __init__(self, open_bus: Callable[[], Outlet], topics: Topics, *, create: bool) -> None:
        self._open = open_bus
        self._topics = topics
        self._create = create
        self._bus: Outlet | None = None
        self._producer: Writer | None = None

    async def up(self) -> Writer:
        """The producer. Raises whatever opening a bus raises."""
        if self._producer is None:
            bus = self._open()
            await bus.__aenter__()
            self._bus = bus
            if self._create:
                await bus.init(self._topics.specs())
            self._producer = await bus.producer()
        return self._producer

    async def drop(self) -> None:
        """Close it; bounded, and raises nothing."""
        bus, self._bus, self._producer = self._bus, None, None
        if bus is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await bus.__aexit__(None, None, None)
        # Whatever a broken bus raises while it closes, another is opened.
        except Exception:
            return


def advice(error: Exception, waited_s: float) -> str:
    """One sentence on why the bus takes nothing, and what helps; `waited_s` is how long an answer
    was waited for.
    """
    if type(error) is TimeoutError and not str(error):
        reason = f"no answer within {waited_s:g} s"
    else:
        reason = str(error) or type(error).__name__
    # Most errors of the bus name what to do themselves; what is left is what only a configuration
    # can be.
    hint = ""
    if isinstance(error, UnknownTopic) and "bus init" not in reason:
        hint = "try `tocsin bus init`; "
    elif isinstance(error, ConfigurationError) and ":" not in reason:
        hint = "check the bus URL; "
    return (
        f"cannot publish to the bus ({reason}); {hint}retrying. Training is not affected; records "
        "that do not fit the queue are dropped and counted"
    )
