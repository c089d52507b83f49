"""Steps that are passed over: counted, and not looked at.

Where a step takes a millisecond, all that is asked about it costs a tenth of it: the code and the
objects behind the hooks are not in the processor's caches any more when the step comes back to
them. So only each k-th of such steps is looked at (`tocsin.emitter.plan.budget` chooses k), and in
between a hook does nothing but return. What stays exact: the number of the step, that something
goes on, steps that a GradScaler skips, values that the user names, and the edge behind a step at
which the loop may be left.

A stretch ends before the next step that is looked at, after `LONGEST_S`, and at once where
something comes by that is no plain step: an evaluation, a checkpoint, a marked phase, an optimizer
that is not known, more backward calls than there have ever been between two steps. The rest of the
bookkeeping is settled then, for all of its steps together.
"""

from __future__ import annotations

import weakref
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.stop import exit_points

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.hooks.loop_state import LoopState

FROM: Final = 1000
"""The first step that may be passed over: what is wrong from the beginning is found early."""

LONGEST_S: Final = 0.1
"""How long nothing is looked at, at most, seconds; the step that is under way then ends it."""


class PassedSteps:
    """The steps of this process that are passed over. `on`: the step in progress is one."""

    def __init__(self, loop: LoopState) -> None:
        self._loop: Final = loop
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.on = False
        self._capture: Capture | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._first = self._until = 0
        self._began_s = self._ended_s = self._by_s = 0.0
        self.inside = 0
        """Calls of optimizers' steps that were passed over and are under way."""

    def begin(self, capture: Capture, optimizer: torch.optim.Optimizer, until: int) -> None:
        """Called after a step of this optimizer: pass over those before `until`, if possible."""
        step = capture.training.next_step
        following = step - 1 + capture.schedule.to_next_look(step - 1)
        if not FROM <= step < following:
            return
        around = self._loop.around
        until = min(until, following, around.next_wake)
        if step >= until or self._loop.threads.any or not around.on_its_thread:
            return
        self._first, self._until = step, until
        if self._optimizer is None or self._optimizer() is not optimizer:
            self._optimizer = weakref.ref(optimizer)
        if self._capture is not capture:
            self._capture = capture
            around.phases.resumes = self.end
        capture.looks_away()
        capture.schedule.passes = True
        self._began_s = self._ended_s = capture.ended_at
        self._by_s = self._began_s + LONGEST_S
        self.inside = 0
        self.on = True

    # -- what the hooks see, while it is on ------------------------------------------------------

    def backward(self) -> bool:
        """In front of a backward call; whether it is passed over."""
        loop, capture = self._loop, self._capture
        loop.backwards += 1
        if capture is None or loop.backwards > loop.most_backwards:
            # The gradients may have been cleared in place of a step; or the loop makes none.
            loop.backwards -= 1
            self.end()
            return False
        capture.training.activity += 1
        return True

    def before(self, optimizer: torch.optim.Optimizer) -> bool:
        """In front of an optimizer's step; whether it is passed over."""
        ours, capture = self._optimizer, self._capture
        if ours is None or capture is None:
            return False
        if getattr(optimizer, "found_inf", None) is not None:
            # A fused optimizer is called at steps, too, that its GradScaler skips.
            self.end()
            return False
        if ours() is not optimizer and not capture.optimizers.knows(optimizer):
            self.end()
            return False
        self.inside += 1
        return True

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called after an optimizer's step. Whether the loop may have to be left."""
        loop, capture = self._loop, self._capture
        if self.inside:
            self.inside -= 1
        loop.made_step, loop.backwards = True, 0
        now = perf_counter()
        ours = self._optimizer
        if ours is None or capture is None or ours() is not optimizer:
            if now >= self._by_s:
                self.end()  # the one whose steps count may make none any more
            return False
        step = capture.training.passed()
        self._ended_s = now
        if not self.on:  # it was ended in the middle of this step
            capture.settled(now)
            capture.passed(1, now)
            loop.around.phases.starts_anew(now)
            return exit_points.asks(step)
        if step >= loop.around.named.wakes:
            loop.around.send_named(capture.training, step)
        if step + 1 >= self._until or now >= self._by_s:
            self.end()
        return exit_points.asks(step)

    def batch(self) -> bool:
        """A data loader has given a batch; whether that is passed over."""
        capture = self._capture
        if capture is None or capture.training.is_evaluating():
            self.end()
            return False
        capture.training.activity += 1
        return True

    def updated(self) -> bool:
        """Called after `GradScaler.update`. Whether it is passed over: a step was made."""
        made_step, loop = self._loop.made_step, self._loop
        if not made_step:
            self.end()
            return False
        loop.made_step = False
        return True

    def end(self) -> None:
        """From here on all is looked at; the stretch is settled."""
        capture, loop = self._capture, self._loop
        if not self.on or capture is None:
            return
        self.on = False
        steps = capture.training.next_step - self._first
        capture.passed(steps, self._ended_s)
        capture.training.passed_together(self._ended_s - self._began_s)
        loop.isolation.stepped(steps)
        loop.cleared.had = False
        loop.around.phases.starts_anew(self._ended_s)
