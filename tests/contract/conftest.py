"""The buses that the contract is tried on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.buses import World
from tocsin.bus.port import Bus


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A bus of each kind."""
    if request.param == "kafka":
        return World("kafka", request.getfixturevalue("kafka_url"))
    return World("embedded", f"embedded:{tmp_path / 'bus.db'}")


@pytest.fixture
async def bus(world: World) -> AsyncIterator[Bus]:
    """It, open."""
    async with world.bus() as opened:
        yield opened
