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

if TYPE_CHECKING:
    from tocsin.emitter.capture import Capture
    from tocsin.emitter.torch_hooks import Hooks


class QuickSteps:
    """Those of this process. `until` is the first step that goes the long way again."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks: Final = hooks
        self.until = 0
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._capture: Capture | None = None
        self._under_way = False
        self._columns: tuple[str, ...] = ()

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
        groups = range(len(optimizer.param_groups))
        usual = self._hooks.around.phases.usual_columns
        self._columns = ("loss", *usual, "step_time_s", *(f"lr.{i}" for i in groups))
        self.until = until

    def before(self, optimizer: torch.optim.Optimizer, given: int) -> bool:
        """In front of a step with so many arguments; whether it is quick."""
        self._under_way = False
        capture, hooks = self._capture, self._hooks
        if (
            capture is None
            or given > 1
            or capture.training.next_step >= self.until
            or hooks.stepping
            or len(hooks.losses.held) != 1
            or hooks.clipped.any
            or not hooks.around.phases.usual
            or self._optimizer is None
            or self._optimizer() is not optimizer
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return False
        loss = hooks.losses.held[0]
        if type(loss) is not float or loss - loss != 0.0:
            return False
        self._under_way = True
        hooks.around.phases.step_begins(perf_counter())
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
        step_time = capture.ended(now)
        (loss,) = held
        held.clear()
        row = StepRow(
            training.next_step,
            time.time_ns() // 1000,
            self._columns,
            (
                loss,
                *phases.take_usual(),
                step_time,
                *[group["lr"] for group in optimizer.param_groups],
            ),
        )
        training.stepped(step_time)
        training.sender.row(row)
        capture.agenda.times.append(step_time)
        hooks.made_step = True
        hooks.backwards = 0
        ended = perf_counter()
        phases.step_ends(ended)
        hooks.wall.seconds += ended - now
        return True
