"""The buses that the contract is tried on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.buses import World
from tocsin.bus.port import Bus


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A bus of each kind."""
    if request.param == "embedded":
        yield World("embedded", f"embedded:{tmp_path / 'bus.db'}")
        return
    world = World("kafka", request.getfixturevalue("kafka_url"))
    yield world
    asyncio.run(world.delete_all())


@pytest.fixture
async def bus(world: World) -> AsyncIterator[Bus]:
    """It, open."""
    async with world.bus() as opened:
        yield opened
