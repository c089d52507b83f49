"""Whom of several a delivery has reached, so that a repeat goes to the others only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

_KEPT: Final = 1_000


class Reached:
    """Kept in memory only: after a crash a repeat goes to all, with the same id as before."""

    def __init__(self) -> None:
        self._reached: OrderedDict[str, set[str]] = OrderedDict()

    def missing(self, delivery_id: str, all_of_them: Sequence[str]) -> list[str]:
        """Those it has not reached."""
        reached = self._reached.get(delivery_id, set())
        return [one for one in all_of_them if one not in reached]

    def add(self, delivery_id: str, *reached: str) -> None:
        """It has reached these."""
        self._reached.setdefault(delivery_id, set()).update(reached)
        if len(self._reached) > _KEPT:
            self._reached.popitem(last=False)

    def forget(self, delivery_id: str) -> None:
        """There will be no repeat."""
        self._reached.pop(delivery_id, None)
