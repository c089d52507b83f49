"""Steps that are passed over: counted, and not looked at.

Where a step takes a millisecond, all that is asked about it costs a tenth of it: the code and the
objects behind the hooks are not in the processor's caches any more when the step comes back to
them. So only each k-th of such steps is looked at (`tocsin.emitter.plan.budget` chooses k), and in
between a hook does nothing but return. What stays exact: the number of the step, that something
goes on, steps that a GradScaler skips, values that the user names, and the exit point behind a step
at which the loop may be left.

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
    from collections.abc import Callable, Sized

    from torch import nn

    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.hooks.loop_state import LoopState
    from tocsin.emitter.stop.rank_stop import Rank
    from tocsin.emitter.training.training import Training

FROM: Final = 1000
"""The first step that may be passed over: what is wrong from the beginning is found early."""

LONGEST_S: Final = 0.1
"""How long nothing is looked at, at most, seconds; the step that is under way then ends it."""


class PassedSteps:
    """The steps of this process that are passed over. `on`: the step in progress is one.

    What each of them asks for is gathered here when a stretch begins: where nothing of ours is in
    the processor's caches, an object more to be touched costs half a microsecond.
    """

    __slots__ = (
        *("on", "quiet", "inside", "_named", "_loop", "_capture", "_training", "_rank", "_ours"),
        *("_root", "_unscales", "_made_step", "_backwards", "_most_backwards", "_first", "_until"),
        *("_began_s", "_ended_s", "_by_s", "_waiting", "__weakref__"),
    )

    def __init__(self, loop: LoopState) -> None:
        self._loop: Final = loop
        self._named: Final = loop.hook_probes.named
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.on = False
        self.quiet = False
        """Whether it is on, and losses of training are not looked at either."""
        self.inside = 0
        """Calls of optimizers' steps that were passed over and are under way."""
        self._capture: Capture | None = None
        self._training: Training | None = None
        self._rank: Rank | None = None
        self._ours: Callable[[], torch.optim.Optimizer | None] = _none
        self._root: Callable[[], nn.Module | None] = _none
        self._unscales = self._made_step = False
        self._backwards = self._most_backwards = 0
        self._first = self._until = 0
        self._waiting: Sized = ()
        self._began_s = self._ended_s = self._by_s = 0.0

    def start(self, capture: Capture, optimizer: torch.optim.Optimizer, until: int) -> None:
        """Called after a step of this optimizer: pass over those before `until`, if possible."""
        step = capture.training.next_step
        following = step - 1 + capture.schedule.to_next_inspection(step - 1)
        if not FROM <= step < following:
            return
        loop = self._loop
        hook_probes = loop.hook_probes
        until = min(until, following, hook_probes.probes.next_wake)
        if step >= until or loop.threads.any or not hook_probes.on_its_thread:
            return
        self._first, self._until = step, until
        if self._ours() is not optimizer:
            self._ours = weakref.ref(optimizer)
        if self._capture is not capture:
            self._capture, self._training = capture, capture.training
            self._waiting = capture.waiting
            hook_probes.phases.resumes = self.end
        self._rank = exit_points.listening()
        root = capture.optimizers.root
        if self._root() is not root:
            self._root = _none if root is None else weakref.ref(root)
        # One that unscales by itself is called at steps, too, that its GradScaler skips.
        self._unscales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._made_step = loop.made_step
        self._backwards, self._most_backwards = loop.backwards, loop.most_backwards
        capture.looks_away()
        capture.schedule.passes = True
        # Of each backward call its loss too, and two around each optimizer's step.
        capture.schedule.budget.calls = 2 * (self._most_backwards + capture.optimizers.count)
        self._began_s = self._ended_s = capture.ended_at
        self._by_s = self._began_s + LONGEST_S
        self.inside = 0
        self.on = True
        self.quiet = not (hook_probes.data.due or hook_probes.checks.losses.due)

    # -- what the hooks see, while it is on ------------------------------------------------------

    def backward(self) -> bool:
        """In front of a backward call; whether it is passed over."""
        count, training = self._backwards, self._training
        if training is None or count >= self._most_backwards:
            # The gradients may have been cleared in place of a step; or the loop makes none.
            self.end()
            return False
        self._backwards = count + 1
        training.activity += 1
        return True

    def before(self, optimizer: torch.optim.Optimizer) -> bool:
        """In front of an optimizer's step; whether it is passed over."""
        if self._ours() is not optimizer or self._unscales:
            capture = self._capture
            skipped = getattr(optimizer, "found_inf", None) is not None
            if capture is None or skipped or not capture.optimizers.knows(optimizer):
                self.end()
                return False
        self.inside += 1
        return True

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called after an optimizer's step. Whether the loop may have to be left."""
        training = self._training
        if self.inside:
            self.inside -= 1
        self._made_step, self._backwards = True, 0
        now = perf_counter()
        if training is None or self._ours() is not optimizer:
            self._other_ended(now)
            return False
        step = training.next_step
        training.next_step = step + 1
        training.activity_at_step = training.activity
        self._ended_s = now
        if not self.on:
            self._ended_inside(now)
        else:
            if self._waiting and self._capture is not None:
                self._capture.poll()  # what a GPU says of the step that was looked at last
            if step >= self._named.wakes:
                self._loop.hook_probes.send_named(training, step)
            if step + 1 >= self._until or now >= self._by_s:
                self.end()
        rank = self._rank
        if rank is None:
            return False
        rank.step = step
        return rank.awake

    def _other_ended(self, now: float) -> None:
        """A step is over of one whose steps do not count."""
        if not self.on:
            self._loop.made_step, self._loop.backwards = True, 0
        elif now >= self._by_s:
            self.end()  # the one whose steps count may make none any more

    def _ended_inside(self, now: float) -> None:
        """The stretch was ended in the middle of the step that is over now."""
        loop, capture = self._loop, self._capture
        loop.made_step, loop.backwards = True, 0
        if capture is not None:
            capture.settled(now)
            capture.passed(1, now)
        loop.hook_probes.phases.starts_anew(now)

    def batch(self) -> bool:
        """A data loader has given a batch; whether that is passed over."""
        root, training = self._root(), self._training
        if training is None or (root is not None and not root.training):
            self.end()
            return False
        training.activity += 1
        return True

    def updated(self) -> bool:
        """Called after `GradScaler.update`. Whether it is passed over: a step was made."""
        if not self._made_step:
            self.end()
            return False
        self._made_step = False
        return True

    def end(self) -> None:
        """From here on all is looked at; the stretch is settled."""
        capture, loop = self._capture, self._loop
        if not self.on or capture is None:
            return
        self.on = self.quiet = False
        loop.made_step, loop.backwards = self._made_step, self._backwards
        steps = capture.training.next_step - self._first
        capture.passed(steps, self._ended_s)
        capture.training.passed_together(self._ended_s - self._began_s)
        loop.isolation.stepped(steps)
        loop.cleared.had = False
        loop.hook_probes.phases.starts_anew(self._ended_s)


def _none() -> None:
    """Refers to nothing."""
