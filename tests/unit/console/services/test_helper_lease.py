from __future__ import annotations

from pathlib import Path

from tocsin.bus.urls import open_bus
from tocsin.console.services.helper import _lease
from tocsin.console.services.workers import run_lease


async def test_a_helper_that_is_not_needed_any_more_does_not_wait_for_its_run(
    tmp_path: Path,
) -> None:
    async with open_bus(f"embedded:{tmp_path}/bus.db") as bus:
        other = await bus.lease(run_lease("run-1"))
        assert other is not None
        assert await _lease(bus, "run-1", lambda: True) is None
        await other.release()
        mine = await _lease(bus, "run-1", lambda: True)
        assert mine is not None
        await mine.release()
