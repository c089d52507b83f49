"""How often each collection is summarised, so that watching stays under its share of the step time.

What a pass costs is measured where it happens; the median of the last few counts. A step may cost
`share` of the median step time, or 20 µs where that is more. From it goes first what every step
costs by itself; the rest is dealt out by weight. A collection that needs less than its part at its
shortest interval (its floor) leaves the remainder to the others; one that needs more is stretched,
to a round interval: ranks and collections then meet at the same steps.

The first 50 ms of passes are free: a training of a few hundred short steps would otherwise be over
before it was looked at twice.

Pure: no clock, no thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Final

MIN_S: Final = 20e-6
"""What a step may cost at least, seconds."""

ALLOWANCE_S: Final = 0.05
"""What the passes of the first steps may cost together before they are stretched, seconds."""

LEFT: Final = 0.1
"""Share of a step's allowance that goes to the passes even where the step itself has used it up:
never blind."""

MAX_PASSED: Final = 50
"""Steps from one that is looked at to the next, at most. Nearly all intervals are multiples of it:
what is due meets a step that is looked at anyway."""

CAPTURE_SHARE: Final = 0.5
"""Share of what the hooks leave of a step's allowance that looking at steps may take, where steps
are short."""

UNMEASURED: Final = 2.0
"""How many times what the hooks measure themselves they cost there: the calls around them, and what
the step loses of the processor's caches, are the rest (`benchmarks/short_steps.py`)."""

CALL_S: Final = 2e-6
"""What a hook costs at a step that is passed over, seconds: it returns at once, from memory."""

CALLS: Final = 4
"""Hooks that a plain step calls: for the loss, the backward call, and two around the optimizer."""

REMEMBERED: Final = 7
"""Passes whose median is what one costs."""

LADDER: Final[tuple[int, ...]] = (*(m * 10**e for e in range(4) for m in (1, 2, 5)), 10_000)
"""Intervals that the budget chooses, steps."""


@dataclass(slots=True)
class Share:
    """One collection. `interval` is the one in force; `floor` the shortest, in steps."""

    floor: int
    weight: float
    interval: int
    dealt_s: float = math.inf
    """What it may cost a step, seconds, as was dealt out last."""
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    @property
    def cost_s(self) -> float:
        """What a pass costs, seconds; 0 before the first."""
        return median(self.costs) if self.costs else 0.0


class Budget:
    """The intervals in force."""

    def __init__(
        self, share: float, weights: Mapping[str, tuple[int, float]], *, fixed: bool = False
    ) -> None:
        """`share` of the step time; `weights[name]` is the floor in steps and the weight. Where it
        is `fixed` each keeps its floor, whatever it costs.
        """
        self._share = share
        self._fixed = fixed
        self.shares: Final = {
            name: Share(floor, weight, floor) for name, (floor, weight) in weights.items()
        }
        self._spent_s = 0.0
        self.calls = CALLS
        """Hooks that a step calls."""
        self.looks_every = 1
        """Steps between two that are looked at, where nothing is due."""
        self.allowed_s = math.inf
        """What a step may cost, seconds, by the newest step times; without end where nothing is
        measured."""

    def add(self, name: str, seconds: float, *, more: bool = False) -> None:
        """A pass of this collection has cost that much; with `more`: its last one, so much more."""
        share = self.shares.get(name)
        if share is None:
            return
        self._spent_s += seconds
        if more and share.costs:
            share.costs[-1] += seconds
        else:
            share.costs.append(seconds)

    def interval(self, name: str) -> int:
        """Steps between two passes, 1 for one that is not on the budget."""
        share = self.shares.get(name)
        return 1 if share is None else share.interval

    def review(self, step_s: Sequence[float], base_s: float) -> bool:
        """Choose the intervals anew from the newest step times and what a step without a pass
        costs that is looked at, both in seconds; whether they were chosen, and stay as they were.
        """
        if self._fixed or not step_s:
            return False
        looks, step_time_s = self.looks_every, median(step_s)
        self.allowed_s = max(self._share * step_time_s, MIN_S)
        self._choose_looks(base_s)
        if self._spent_s < ALLOWANCE_S:
            return False
        before = [share.interval for share in self.shares.values()]
        if self.looks_every > 1:
            base_s = CALL_S * self.calls + base_s * UNMEASURED / self.looks_every
        self._choose(base_s)
        after = [share.interval for share in self.shares.values()]
        return before == after and looks == self.looks_every

    def _choose_looks(self, base_s: float) -> None:
        allowed = self.allowed_s
        if allowed > MIN_S and base_s <= allowed:
            self.looks_every = 1
            return
        left = max(allowed - CALL_S * self.calls, LEFT * allowed)
        wanted = UNMEASURED * base_s / (CAPTURE_SHARE * left)
        self.looks_every = min(MAX_PASSED, round_interval(self.looks_every, wanted, 1))

    def _choose(self, base_s: float) -> None:
        allowed = self.allowed_s
        left = max(allowed - base_s, LEFT * allowed)
        open_ = {name: share for name, share in self.shares.items() if share.costs}
        while open_:
            weight = sum(share.weight for share in open_.values())
            content = [
                name
                for name, share in open_.items()
                if share.cost_s / share.floor <= left * share.weight / weight
            ]
            for share in open_.values():
                share.dealt_s = left * share.weight / weight
            if not content:
                for share in open_.values():
                    share.interval = round_interval(
                        share.interval, share.cost_s / share.dealt_s, share.floor
                    )
                return
            for name in content:
                share = open_.pop(name)
                share.interval = share.floor
                left -= share.cost_s / share.floor


def round_interval(current: int, wanted: float, floor: int) -> int:
    """The round interval for this one; the current, unless it is too short or 2.5 times too long:
    it should not change with every breath.
    """
    if current > floor and wanted <= current <= 2.5 * wanted:
        return current
    rungs = chain((floor,), (rung for rung in LADDER if rung > floor))
    return next((rung for rung in rungs if rung >= wanted), LADDER[-1])
