"""What is summarised at which step: the plans of the collections, the budget, and "look closer".

One value per step holds what is due; between two such steps one comparison answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from tocsin.emitter.plan.budget import Budget
from tocsin.emitter.plan.collections import CollectionPlan, Schedule
from tocsin.emitter.plan.settings import CaptureSettings
from tocsin.schemas.records.collections import Kind, Mode

BLOCKS: Final = "blocks"
NORMS: Final = "norms"
LOCAL: Final = "local gradients"

STEPS: Final = "steps"
"""Under this name the figures of a run tell how often a step is looked at, if not each."""

CHECKSUMS: Final = "checksums"
"""The collection of what replicas must have in common."""

CHECKSUMS_EVERY: Final = 100
"""Steps between two; fixed, since all ranks must look at the same step."""

_WEIGHTS: Final[Mapping[str, float]] = {
    "gradients": 3,
    "weights": 3,
    "biases": 1,
    "activations": 2,
    "optimizer_state": 1,
    "inputs": 1,
}
_BLOCKS_WEIGHT: Final = 4
_NORMS_WEIGHT: Final = 2
_LOCAL_WEIGHT: Final = 3

CLOSER_STEPS: Final = 50
"""How long a training is looked at at every step once something was not finite."""

CLOSER_APART: Final = 1000
"""Steps between two such spells that the training process begins by itself."""

EXACT_AFTER_ALARM: Final = 4
"""Steps whose gradient norm is exact once something was not finite, with that step."""

_CLOSER_EVERY: Final[Mapping[str, int]] = {"gradients": 1, "weights": 1, "biases": 1}
_CLOSER_ELSE: Final = 5

REVIEW_STEPS: Final = 32
"""Steps after which the intervals are chosen anew."""

REVIEW_S: Final = 0.25
"""The same in seconds, where steps are short and the intervals have stayed as they were."""

Due = Mapping[Kind, tuple[CollectionPlan, ...]]
"""The collections that are due at a step, by what they are made of."""

NOTHING: Final[Due] = {}


class CaptureSchedule:
    """When which collection of a training is summarised, in one mode.

    In another than train its steps are that mode's batches.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        mode: Mode = "train",
        held_up: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`held_up`: which share of the time since it was asked last went to other processes."""
        self._held_up: Final = held_up
        self._plans: dict[str, tuple[CollectionPlan, Schedule]] = {}
        weights: dict[str, tuple[int, float]] = {
            BLOCKS: (1, _BLOCKS_WEIGHT),
            NORMS: (1, _NORMS_WEIGHT),
            LOCAL: (1, _LOCAL_WEIGHT),
        }
        for name, plan in settings.plans.items():
            schedule = plan.schedule(mode)
            if schedule is None or plan.of == "losses":
                continue
            self._plans[name] = (plan, schedule)
            if schedule.automatic:
                weights[name] = (plan.floor, _WEIGHTS[plan.of])
        self.budget: Final = Budget(settings.budget, weights, fixed=settings.pacing == "steps")
        self.others: Final[dict[str, int]] = {}
        """Intervals that are decided elsewhere, by name, to be reported with the others."""
        self.passes = False
        """Whether steps have been passed over: only then is it told how many."""
        self._closer_from = self._closer_until = 0
        self._closer_next = 0
        self.reads_blocks = True
        """Whether blocks of gradients can be read: not where all of them are on a GPU."""
        self.exact_until = 0
        """The first step whose gradient norm need not be exact again, whatever the interval."""
        self.asked = 0
        """Steps that somebody has asked to look closer at, until that begins."""
        self._at = -1
        self._due: Due = NOTHING
        self._next = 0
        self._review_steps = REVIEW_STEPS
        self.times: list[float] = []
        """Durations of the steps since the intervals were chosen, seconds."""
        self._tiers_s = 0.0
        self._reviewed_s: float | None = None

    def due(self, step: int) -> Due:
        """The collections of this step, in the order of the plans; cheap where there are none."""
        if step == self._at:
            return self._due
        if self.asked:
            asked, self.asked = self.asked, 0
            self.capture_closely(step, asked)
        if step < self._next and self._at < step:
            return NOTHING
        closer = step < self._closer_until
        found: dict[Kind, tuple[CollectionPlan, ...]] = {}
        following = sys.maxsize
        for name, (plan, schedule) in self._plans.items():
            interval = self.interval(name, step)
            if closer and schedule.regular:
                schedule = replace(schedule, every=interval)
            if schedule.due(step, interval):
                found[plan.of] = (*found.get(plan.of, ()), plan)
            following = min(following, step + 1 if closer else schedule.following(step, interval))
        self._at, self._due, self._next = step, found, following
        return found

    def is_due(self, name: str, step: int) -> bool:
        """Whether that part of tier 0 (`BLOCKS`, `NORMS`) is done at this step."""
        return step % self.budget.shares[name].interval == 0

    def quiet_until(self, step: int) -> int:
        """The first step from this one on at which something is due, or is prepared for the next;
        until the intervals are chosen anew.
        """
        if self.due(step) or step < max(self._closer_until, self.exact_until):
            return step
        shares = self.budget.shares
        names = (BLOCKS, NORMS) if self.reads_blocks else (NORMS,)
        regular = (step + -step % shares[name].interval for name in names)
        return min(*regular, self._next - 1)

    def to_next_inspection(self, step: int) -> int:
        """From a step that is inspected: how many on the next one is, where nothing is due."""
        every = self.budget.looks_every
        return every - step % every

    def affords(self, name: str, pass_s: float) -> bool:
        """Whether a pass of that cost would keep its shortest interval."""
        share = self.budget.shares[name]
        return pass_s <= share.dealt_s * share.floor

    def has(self, name: str) -> bool:
        """Whether it has a collection of that name."""
        return name in self._plans

    def interval(self, name: str, step: int | None = None) -> int:
        """The interval in force at that step; without one, where nothing is looked closer at."""
        if name == CHECKSUMS:
            return CHECKSUMS_EVERY
        known = self._plans.get(name)
        if known is None:
            return self.budget.interval(name)
        plan, schedule = known
        every = self.budget.interval(name) if schedule.every is None else schedule.every
        if step is None or not self._closer_from <= step < self._closer_until:
            return every
        return min(every, _CLOSER_EVERY.get(plan.of, _CLOSER_ELSE))

    def intervals(self) -> dict[str, int]:
        """The intervals of all collections that have one, by name."""
        found = {
            name: self.interval(name)
            for name, (_, schedule) in self._plans.items()
            if schedule.regular
        }
        if self.passes:
            found[STEPS] = self.budget.looks_every
        return {**found, **self.others}

    def capture_closely(self, step: int, steps: int) -> None:
        """Summarise gradients and weights at each of the next `steps` steps, the others at each
        fifth; what is to be summarised at explicit steps alone, at those.
        """
        under_way = step < self._closer_until
        self._closer_from = min(self._closer_from, step) if under_way else step
        self._closer_until = max(self._closer_until, step + steps)
        self._next = min(self._next, step)

    def ask(self, steps: int) -> None:
        """The same from the next step on at which something is asked here; from any thread."""
        self.asked = max(self.asked, steps)

    def alarmed(self, step: int) -> None:
        """Something was not finite at this step: read exact norms after it, and look closer, if
        that was not done lately.
        """
        self.exact_until = max(self.exact_until, step + EXACT_AFTER_ALARM)
        if step >= self._closer_next:
            self._closer_next = step + CLOSER_APART
            self.capture_closely(step + 1, CLOSER_STEPS)

    @contextmanager
    def costs(self, *names: str, more: bool = False) -> Iterator[None]:
        """Count the CPU time inside as a pass of these collections; with `more` as a later part of
        their last one.
        """
        began = time.thread_time()
        try:
            yield
        finally:
            each = (time.thread_time() - began) / max(1, len(names))
            for name in names:
                self.spent(name, each, more=more)

    def spent(
        self, name: str, seconds: float, *, more: bool = False, pass_s: float | None = None
    ) -> None:
        """A pass of that collection has cost so much; with `more`: its last one, so much more.

        Where it is spread over several steps `pass_s` is what all of it would have cost.
        """
        self.budget.add(name, seconds if pass_s is None else pass_s, more=more)
        self._tiers_s += seconds

    def stepped(self, step_time_s: float, spent_s: float) -> bool:
        """A step is over; `spent_s` is what our hooks have cost up to now. Whether the intervals
        were chosen anew.
        """
        if self._reviewed_s is None:
            # What was spent before belongs to the beginning, or to another training.
            self._reviewed_s, self._tiers_s = spent_s, 0.0
            return False
        self.times.append(step_time_s)
        count = len(self.times)
        if count < self._review_steps:
            return False
        base_s = max(0.0, spent_s - self._reviewed_s - self._tiers_s) / count
        ours = 1 - self._held_up()
        settled = self.budget.review([ours * time_s for time_s in self.times], base_s)
        longer = min(2 * count, round(REVIEW_S * count / max(1e-9, sum(self.times))))
        self._review_steps = max(REVIEW_STEPS, longer) if settled else REVIEW_STEPS
        self.times.clear()
        self._reviewed_s, self._tiers_s = spent_s, 0.0
        self._next = 0
        return True
