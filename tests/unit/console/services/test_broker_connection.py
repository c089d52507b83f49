from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus, BusError, BusUnavailable, UnusableBus
from tocsin.console.services.broker_connection import connect

AWAY = BusUnavailable("no broker answers")


class Late(EmbeddedBus):
    """A bus that fails with `error` when it is entered."""

    def __init__(self, path: Path, error: BusError, tried: Callable[[], object]) -> None:
        super().__init__(path)
        self._error = error
        self._tried = tried

    async def __aenter__(self) -> Late:
        self._tried()
        raise self._error


class Buses:
    """Opens buses, of which the first `away` cannot be entered."""

    def __init__(self, folder: Path, away: int, error: BusError = AWAY) -> None:
        self.opened = 0
        self.tried: Callable[[], object] = lambda: None
        self._path = folder / "bus.db"
        self._away = away
        self._error = error

    def open(self) -> Bus:
        self.opened += 1
        if self.opened <= self._away:
            return Late(self._path, self._error, self.tried)
        return EmbeddedBus(self._path)


async def test_brokers_that_come_later_are_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buses = Buses(tmp_path, away=3)
    caplog.set_level(logging.WARNING)
    async with AsyncExitStack() as stack:
        bus = await connect(stack, buses.open, asyncio.Event(), first_pause_s=0.001)
        assert isinstance(bus, EmbeddedBus)
        assert await bus.show([]) == ()
    assert buses.opened == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the bus does not answer, trying again: no broker answers"
    ]


async def test_after_its_time_the_reason_is_raised(tmp_path: Path) -> None:
    buses = Buses(tmp_path, away=10**6)
    async with AsyncExitStack() as stack:
        with pytest.raises(BusUnavailable, match="no broker answers"):
            await connect(stack, buses.open, asyncio.Event(), within_s=0.05, first_pause_s=0.001)
    assert buses.opened > 1


async def test_a_broker_that_refuses_us_is_asked_once(tmp_path: Path) -> None:
    buses = Buses(tmp_path, away=10**6, error=UnusableBus("wrong password"))
    async with AsyncExitStack() as stack:
        with pytest.raises(UnusableBus, match="wrong password"):
            await connect(stack, buses.open, asyncio.Event(), first_pause_s=0.001)
    assert buses.opened == 1


async def test_a_stop_ends_the_pause(tmp_path: Path) -> None:
    buses, stopping = Buses(tmp_path, away=10**6), asyncio.Event()
    buses.tried = lambda: asyncio.get_running_loop().call_later(0.01, stopping.set)
    async with AsyncExitStack() as stack, asyncio.timeout(4):
        assert await connect(stack, buses.open, stopping, first_pause_s=5) is None
    assert buses.opened == 1
