"""Steps at which nothing is due: their loss, times and rates for a few microseconds.

Where steps take less than some milliseconds, even the questions that a step could answer cost more
than watching may. So capture says up to which step nothing is due, and until then a step of the one
optimizer goes through here. Whatever is not quite usual goes the long way: a closure, a loss that
is not finite, another optimizer, a nested step.

Called without the wall around, and with one of its own: see `tocsin.emitter.torch_hooks`.
"""

from __future__ import annotations

import time
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.outbox import StepRow

PROBE: Final = "quick steps"
MAX_GROUPS: Final = 64
"""Parameter groups whose rates are told."""

if TYPE_CHECKING:
    from tocsin.emitter.capture import Capture
    from tocsin.emitter.hook_state import Hooks


class QuickSteps:
    """Those of this process. `until` is the first step that goes the long way again."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks: Final = hooks
        self.until = 0
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._capture: Capture | None = None
        self._under_way = False
        self._usual: tuple[str, ...] = ()
        self._columns: tuple[str, ...] = ()
        self._groups = 0
        self._rates: list[float] = []

    def forget(self) -> None:
        """Another training begins."""
        self.until = 0
        self._optimizer = self._capture = None
        self._under_way = False

    def allow(self, capture: Capture, optimizer: torch.optim.Optimizer, until: int) -> None:
        """Up to that step, steps of this optimizer are quick."""
        if self._optimizer is None or self._optimizer() is not optimizer:
            self._optimizer = weakref.ref(optimizer)
        self._capture = capture
        self._groups = len(optimizer.param_groups)
        self._usual = self._hooks.around.phases.usual_columns
        rates = (f"lr.{i}" for i in range(self._groups))
        self._columns = ("loss", *self._usual, "step_time_s", *rates)
        off = self._groups > MAX_GROUPS or PROBE in self._hooks.wall.off
        self.until = 0 if off else until

    def before(self, optimizer: torch.optim.Optimizer, given: int) -> bool:
        """In front of a step with so many arguments; whether it is quick."""
        self._under_way = False
        capture, hooks = self._capture, self._hooks
        if capture is None or capture.training.next_step >= self.until:
            return False
        began = perf_counter()
        phases, groups, held = hooks.around.phases, optimizer.param_groups, hooks.losses.held
        if self._optimizer is None or self._optimizer() is not optimizer:
            self.until = 0  # whose steps count may change
            return False
        if (
            given > 1
            or hooks.stepping
            or hooks.clipped.any
            or hooks.around.busy
            or not phases.usual
            or phases.usual_columns != self._usual
            or len(groups) != self._groups
            or len(held) != 1
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return False
        loss, rates = held[0], [group.get("lr") for group in groups]
        if type(loss) is not float or loss - loss != 0.0:
            return False
        for rate in rates:
            if type(rate) is not float and type(rate) is not int:
                return False
        self._rates = rates
        self._under_way = True
        ended = perf_counter()
        phases.step_begins(ended)
        hooks.wall.seconds += ended - began
        return True

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Behind a step; whether it was quick, and is counted now."""
        if not self._under_way:
            return False
        self._under_way = False
        hooks, capture = self._hooks, self._capture
        if capture is None:
            return False
        now = perf_counter()
        phases, training, held = hooks.around.phases, capture.training, hooks.losses.held
        phases.step_ends(now)
        step_time = capture.ended(now) or 0.0
        step = training.stepped(step_time)
        capture.optimizers.primary.steps += 1
        hooks.made_step = True
        hooks.backwards = 0
        loss = held.pop()
        values = (loss, *phases.take_usual(), step_time, *self._rates)
        training.sender.row(StepRow(step, time.time_ns() // 1000, self._columns, values))
        capture.agenda.times.append(step_time)
        ended = perf_counter()
        phases.step_ends(ended)
        hooks.wall.seconds += ended - now
        return True
