"""Steps at which nothing is due: their loss, times and rates for a few microseconds.

Where steps take less than some milliseconds, even the questions that a step could answer cost more
than watching may. So capture names the step up to which nothing is due, and until then a step of
the main optimizer goes through here: with one loss, several or none, clipped as a whole or not,
under a GradScaler or not. It sends what the long way would, the loss of a GPU once it has come.
Steps of other optimizers are spared the look at their gradients. Whatever is not quite usual goes
the long way: a closure, a number that is not finite, a nested step, one at which a GPU is timed.
What goes on around the steps, such as the checks of the source, is done behind such a step as
behind any other.

Called outside of `Isolation`, and isolated by itself: see `tocsin.emitter.hooks.torch_patches`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from tocsin.emitter.hooks.passed_steps import PassedSteps
from tocsin.emitter.model.discovery import MAX_GROUPS
from tocsin.emitter.probes import losses
from tocsin.emitter.probes.losses import MAX_LOSSES
from tocsin.emitter.probes.secondary_optimizers import MAX_OTHERS
from tocsin.emitter.process.isolation import BRIEF_S
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.stop import exit_points
from tocsin.schemas.monotonic_clock import unix_us

PROBE: Final = "quick steps"

ENDS_EVERY: Final = 16
"""Steps from one look to the next at whether the optimizer has the same parameters."""

_row: Final[Callable[[tuple[object, ...]], StepRow]] = partial(tuple.__new__, StepRow)
"""Of all its fields: a named tuple's own constructor is a function of Python's."""

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.hooks.loop_state import LoopState
    from tocsin.emitter.probes.clipped_norms import Clipped
    from tocsin.emitter.probes.losses import Loss


class FastPath:
    """Steps at which nothing is due. `until` is the first step that is not one of them."""

    def __init__(self, loop: LoopState) -> None:
        self._loop: Final = loop
        self.passed: Final = PassedSteps(loop)
        self.until = 0
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.until = 0
        self.passed.reset()
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._capture: Capture | None = None
        self._now: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose step on the fast path is under way."""
        self._usual: tuple[str, ...] = ()
        self._rated: tuple[str, ...] = ()
        self._columns: dict[tuple[int, bool, int], tuple[str, ...]] = {}
        self._groups = 0
        self._key = (0, False, 0)
        self._front: tuple[float, ...] = ()
        self._back: list[float] = []
        self._coming: list[Loss] = []
        """The losses of a step of which one is still on a GPU; then `_front` is empty."""
        self._clipped: Clipped | None = None
        """What belongs to them."""

    def allow(
        self, capture: Capture, optimizer: torch.optim.Optimizer, until: int, *, nonfinite: bool
    ) -> None:
        """Up to that step, steps of this optimizer are quick, or passed over: not if the last was
        `nonfinite`.
        """
        if self._optimizer is None or self._optimizer() is not optimizer:
            self._optimizer = weakref.ref(optimizer)
        self._capture = capture
        groups, usual = len(optimizer.param_groups), self._loop.hook_probes.phases.usual_columns
        if groups != self._groups or usual != self._usual:
            self._groups, self._usual = groups, usual
            self._rated = tuple(f"lr.{i}" for i in range(groups))
            self._columns.clear()
        off = self._groups > MAX_GROUPS or self._loop.isolation.rests(PROBE)
        self.until = 0 if off or nonfinite else until
        if self.until:
            self.passed.start(capture, optimizer, until)

    def refuse(self) -> None:
        """The next step goes the long way."""
        self.until = 0
        self.passed.end()

    def backward(self, tensors: object) -> bool:
        """In front of a backward call; whether it is usual, and all is done that it asks for: up to
        a step that is quick, from one number that is finite or on a GPU.
        """
        capture, loop = self._capture, self._loop
        if capture is None or loop.stepping or loop.threads.any or self._now is not None:
            return False
        training, gradients = capture.training, loop.gradients
        if training.next_step >= self.until:
            return False
        if gradients.several or gradients.here != get_ident():
            return False
        began = perf_counter()
        scaled = loop.scaled
        loss: Any = tensors
        if scaled is not None:
            if scaled[0] != id(tensors):
                return False
            loss = scaled[1]
        if type(loss) is not torch.Tensor or loss.numel() != 1:
            return False
        number: Loss | None
        if losses.is_here(loss):
            number = loss.item()
            if type(number) is not float or number - number != 0.0:
                return False
        else:
            number = losses.loss_of(loss, None)
            if number is None:
                return False
        loop.scaled = None
        if loop.cleared.had:
            loop.find_skipped()
        hook_probes, held = loop.hook_probes, loop.losses.held
        if hook_probes.loaders.undecided:
            hook_probes.loaders.backward()
        hook_probes.checks.backward(tensors)
        # Last: if anything fails before, the long way counts it.
        if len(held) < MAX_LOSSES:
            held.append(number)
        loop.backwards += 1
        training.activity += 1
        ended = perf_counter()
        hook_probes.phases.backward_begins(ended)
        lasted = ended - began
        loop.isolation.seconds += lasted if lasted < BRIEF_S else BRIEF_S
        return True

    def before(self, optimizer: torch.optim.Optimizer, given: int) -> bool:
        """In front of a step with so many arguments; whether it is quick."""
        capture, loop = self._capture, self._loop
        if self._now is not None:
            # Inside of a fast step of another optimizer, which is the one that counts; or that one
            # has raised, which the long way finds out.
            loop.stepping.append(self._now)
            self._now, self.until = None, 0
            return False
        if capture is None or capture.training.next_step >= self.until:
            return False
        began = perf_counter()
        hook_probes = loop.hook_probes
        if (
            given > 1
            or loop.stepping
            or hook_probes.thread != get_ident()
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return False
        ours = self._optimizer
        if ours is not None and ours() is optimizer:
            if not self._read_numbers(optimizer, capture):
                return False
            self._now = ours
        elif capture.optimizers.knows(optimizer) and not capture.optimizers.is_over(
            optimizer, left=capture.training.left
        ):
            self._now = weakref.ref(optimizer)
        else:
            return False
        ended = perf_counter()
        hook_probes.phases.step_begins(ended)
        lasted = ended - began
        loop.isolation.seconds += lasted if lasted < BRIEF_S else BRIEF_S
        return True

    def _read_numbers(self, optimizer: torch.optim.Optimizer, capture: Capture) -> bool:
        """What is known in front of the step; whether all of it is usual."""
        loop, groups = self._loop, optimizer.param_groups
        held = loop.losses.held or capture.shared
        clipped = loop.clipped.any
        if not loop.hook_probes.phases.is_usual(self._usual) or len(groups) != self._groups:
            return False
        count = len(held)
        front: tuple[float, ...] = ()
        coming = False
        if count:
            total: Any = held[0] if count == 1 else _sum(held)
            coming = type(total) is not float
            if not coming:
                if total - total != 0.0:
                    return False
                front = (total,) if count == 1 else (total, total / count, float(count))
        norms = loop.clipped.quick if clipped else None
        if norms is not None and not coming and norms.ready:
            front += norms.norms()
        elif clipped:
            if norms is None or not coming:
                return False
            clipped = False
        scaler = capture.usual_scaler()
        if scaler is None:
            return False
        back: list[float] = []
        for group in groups:
            rate = group.get("lr")
            if type(rate) is not float and type(rate) is not int:
                return False
            back.append(rate)
        back += scaler
        self._front, self._back = front, back
        self._coming, self._clipped = (held, norms) if coming else ([], None)
        self._key = (0 if coming else min(count, 2), clipped, len(scaler))
        return True

    def after(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Called after a step.

        Whether it was a step of the training, at which the loop may have to be left; None: it was
        not quick.
        """
        if self._now is None:
            return None
        self._now = None
        loop, capture = self._loop, self._capture
        if capture is None:
            return None
        now = perf_counter()
        hook_probes, training = loop.hook_probes, capture.training
        phases = hook_probes.phases
        loop.made_step = True
        if loop.backwards > loop.most_backwards:
            loop.most_backwards = loop.backwards
        loop.backwards = 0
        loop.cleared.had = False
        if self._optimizer is None or self._optimizer() is not optimizer:
            phases.step_ends(now)
            # Looked at closely now and then, too, and before the long way reads gradients again.
            quick = training.next_step % ENDS_EVERY > 0 and training.next_step + 1 < self.until
            optimizers = capture.optimizers
            # Of many, such as one for each tensor, the steps in between are counted, no more.
            many = quick and optimizers.count > MAX_OTHERS and not loop.clipped.any
            if many and optimizers.counts_other(optimizer):
                return False
            made = loop.isolation.run("steps", capture.stepped, optimizer, quick=quick) is not None
            phases.step_ends(perf_counter())
            return made
        step_time = capture.settled(now)
        step = training.stepped(step_time)
        # Before the long way reads gradients again, and now and then.
        thinned = capture.schedule.budget.looks_every > 1
        check = thinned or step % ENDS_EVERY == 0 or step + 1 >= self.until
        if capture.optimizers.counts_primary(optimizer, check=check).stale:
            self.until = 0
        columns = self._columns.get(self._key) or self._name_columns()
        at_us = unix_us()
        values = (*self._front, *phases.usual_step_ends(now), step_time, *self._back)
        if self._coming or capture.waiting:
            coming, clipped = self._coming, self._clipped
            capture.stepped_quickly(step, at_us, columns, values, coming, clipped)
        else:
            # Never urgent: all of it is usual.
            training.sender.row(_row((step, at_us, columns, values, "train")))
        isolation = loop.isolation
        if step > 1 and capture.schedule.stepped(step_time, isolation.seconds) and self.until:
            self.until = capture.quiet_until(step + 1)  # the intervals were chosen anew
        ended = perf_counter()
        lasted = ended - now
        isolation.seconds += lasted if lasted < BRIEF_S else BRIEF_S
        if capture.waiting:
            capture.poll()
            ended = perf_counter()
        probes = hook_probes.probes
        if probes.wakes(step):
            training.step_at_us = at_us
            probes.stepped(training, step)
            ended = perf_counter()
        phases.cursor = ended  # what we have done up to now is of no phase
        if thinned and self.until:
            self.passed.start(capture, optimizer, self.until)
        return exit_points.asks(step)

    def _name_columns(self) -> tuple[str, ...]:
        """In the order of the long way."""
        count, clipped, scaler = self._key
        columns = self._columns[self._key] = (
            *("loss", "loss_mean", "micro_batches")[: (0, 1, 3)[count]],
            *(("gradient_norm", "gradient_norm_clipped") if clipped else ()),
            *self._usual,
            "step_time_s",
            *self._rated,
            *("scaler_skipped", "scaler_scale")[:scaler],
        )
        return columns


def _sum(held: list[Loss]) -> float | None:
    """Their sum; None if one is still on a GPU."""
    total = 0.0
    for loss in held:
        if type(loss) is not float:
            return None
        total += loss
    return total
