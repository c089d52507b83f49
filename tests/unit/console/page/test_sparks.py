"""The losses of the overview's rows are read one after the other, whatever becomes of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from support.buses import World
from support.configured_buses import context_on
from support.waiting import until
from tocsin.console.page.numbers import Numbers
from tocsin.console.page.sparks import Seen, Sparks
from tocsin.store import Series
from tocsin.store.errors import StoreError


class OneLoss:
    """A run with a loss, or with one whose files have been damaged since it was opened."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def ranks(self) -> range:
        return range(1)

    def scalars(self, mode: str) -> list[str]:
        return ["loss"]

    def series(self, column: str, mode: str = "train", rank: int = 0) -> Series:
        if self.run_id == "damaged":
            raise StoreError("a file of it is damaged")
        steps = np.arange(3)
        return Series(steps, np.ones(3), steps, column)


async def test_a_run_that_cannot_be_read_keeps_no_other_from_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_on(World("embedded", f"embedded:{tmp_path / 'bus.db'}"), tmp_path)
    numbers = Numbers(context, None)
    monkeypatch.setattr(numbers, "_open", lambda run_id, incarnation: OneLoss(run_id))
    # As when somebody has its page open.
    numbers.read("damaged", lambda run: None)
    sparks = Sparks(numbers, lambda: None)
    reading = asyncio.create_task(sparks.run())
    damaged, good = Seen("damaged", "i", False), Seen("good", "i", False)
    sparks.want([damaged, good])
    try:
        await until(lambda: reading.done() or len(sparks.values(good, [])) == 3)
        assert not reading.done(), "which would end the page"
        assert sparks.values(damaged, []) == ()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
