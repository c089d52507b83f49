"""What the hooks in torch know and do: a process that trains, from one step to the next.

Where they sit in torch, and the isolation around each: `tocsin.emitter.hooks.torch_patches`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import weakref
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.parameter import is_lazy

from tocsin.emitter.hooks.checkpoint_reads import CheckpointReads
from tocsin.emitter.hooks.checkpoint_writes import CheckpointWrites
from tocsin.emitter.hooks.fast_path import FastPath
from tocsin.emitter.hooks.framework_plans import plan_of_framework
from tocsin.emitter.hooks.loop_state import LoopState
from tocsin.emitter.hooks.uncompiled import leave_uncompiled
from tocsin.emitter.model.mesh_names import is_distributed
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.losses import (
    first,
    first_bad,
    loss_of,
    made_from,
    node_number,
    only,
)
from tocsin.emitter.process.environment import RUN_ID
from tocsin.emitter.process.isolation import to_stderr
from tocsin.emitter.stop import unwatched
from tocsin.emitter.stop.side_group import ranks_here
from tocsin.emitter.training.context import current

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.stop.leave_report import ExitPoint

BACKWARDS_WITHOUT_STEP: Final = 16
"""Backward calls without an optimizer step after which each is an exit point; or twice as many as
this training has ever made between two steps, where that is more."""

NO_STEP: Final = 50
"""Backward calls without an optimizer step after which that is reported, if gradients were cleared
between them; `NO_STEP_AT_ALL` of them where they were not."""

NO_STEP_AT_ALL: Final = 500


class Hooks(LoopState):
    """The state behind the hooks of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.isolation.report = to_stderr
        self.preferred: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps count, if the user has named it."""
        self.model: weakref.ref[torch.nn.Module] | None = None
        """The model, if the user has named it."""
        self.asleep = False
        """True for good in a process that is not to be captured."""
        self.forked = False
        self.fast_path: Final = FastPath(self)
        self.checkpoint_writes: Final = CheckpointWrites(self)
        self.checkpoint_reads: Final = CheckpointReads(self)
        self.used: Final[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()
        """Optimizers of trainings that are over, as far as they are alive."""

    def start(self, optimizer: torch.optim.Optimizer) -> Capture | None:
        """The first optimizer step of this process is about to happen."""
        if current.session is None and not os.environ.get(RUN_ID):
            return None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not distributed and not self._may_train():
            self.asleep = True
            return None
        # Only now: these import pydantic and the bus, which most processes never need.
        from tocsin.emitter.capture.capture import Capture
        from tocsin.emitter.capture.program_shape import shape_of
        from tocsin.emitter.training.session import Session

        session = current.session or Session(os.environ, self.isolation)
        current.session = session
        capture = Capture(
            session.start(*ranks_here()),
            optimizer,
            self.losses,
            self.local,
            self.clipped,
            self.hook_probes,
            self.fast_path,
            preferred=self.preferred and self.preferred(),
            used=self.used,
            model=self.model and self.model(),
        )
        shape = shape_of(capture.optimizers, self.isolation)
        # Only now: if anything fails before, all of it is tried again.
        self.capture = capture
        self.isolation.run("checkpoints", self.checkpoint_writes.follow_frameworks)
        self.isolation.run("compiler", leave_uncompiled)
        session.before_end = capture.close
        # Whoever learns from a data loader has its environment to evaluate in.
        acts = capture.optimizers.environment and not self.hook_probes.loaders.is_read
        session.announce({**shape, "loaded": self.checkpoint_reads.drain(), "environment": acts})
        self.isolation.run("plan", plan_of_framework, capture.training)
        if capture.training.identity.world_size > 1:
            for parameter in capture.parameters():
                self.watch_local(parameter)
        return capture

    def name_model(self, model: torch.nn.Module) -> None:
        """The user names the model that is trained."""
        self.model = weakref.ref(model)
        capture = self.capture
        if capture is not None and capture.optimizers.root is not model:
            capture.optimizers.use_model(model)
            self.hook_probes.checks.start(capture.training, capture.optimizers)

    def _may_train(self) -> bool:
        """Whether a training of this process, which is none of several ranks, is the job's."""
        if not (self.forked or _is_worker()):
            unwatched.claim(os.environ)
            return True
        if unwatched.is_loader_worker():
            return False
        # `start()` in a child has asked for it.
        if current.session is not None or unwatched.may_train(os.environ):
            return True
        unwatched.report("child", os.environ)
        return False

    def _end_training(self) -> None:
        """Another training begins in this process, and what was computed last belongs to it."""
        losses = self.losses.drain()
        if current.session is not None:
            current.session.end_training()
        preferred, model = self.preferred, self.model
        self.reset()
        self.preferred, self.model = preferred, model
        for loss in losses:
            self.losses.add(loss, begun=True)

    def reset(self) -> None:
        """The training was finished by its own code; the next step begins another."""
        if self.capture is not None:
            self.isolation.run("clean-up", self._remember, self.capture)
        self.capture, self.preferred, self.made_step = None, None, False
        self.model = None
        self.isolation.run("clean-up", self._clean_up)
        self.backwards = self.most_backwards = 0
        self.discarded = False
        self.isolation.report = to_stderr

    def _remember(self, capture: Capture) -> None:
        self.used.update(capture.optimizers.alive())

    def _clean_up(self) -> None:
        self.stepping.clear()
        self.losses.clear()
        self.cleared.reset()
        self.fast_path.reset()
        self.local.reset()
        self.clipped.reset()
        self.hook_probes.reset()
        self.threads.reset()
        self.gradients.reset()

    def watch_local(self, parameter: torch.Tensor) -> None:
        """Look at this rank's own gradient of a parameter, of any shape, once it is complete."""
        # The gradient of a DTensor is, with FSDP2, complete only once it is reduced.
        if parameter.requires_grad and not (is_distributed(parameter) or is_lazy(parameter)):
            place = self.local.is_new(parameter)
            if place is not None:
                hook = functools.partial(self._on_local_gradient, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def _on_local_gradient(self, place: int, parameter: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return  # compiled autograd has it in its graph
        if not self.asleep and self.local.wants(place):
            self.isolation.run("local_gradients", self.local.read, parameter)

    def before_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """In front of `Optimizer.step`."""
        capture = self.capture
        if capture is not None and not self.hook_probes.on_its_thread:
            here = self.threads.step(optimizer, capture.optimizers)
            if here is None:
                unwatched.report("thread", os.environ)
                return
            if here:
                self.hook_probes.moved()
                self.threads.moved()
        if self.stepping and not _is_inside(self.stepping[-1](), optimizer):
            self.stepping.clear()  # a step that raised has had no end
        if (
            self.capture is not None
            and not self.stepping
            and self.capture.optimizers.is_over(optimizer, left=self.capture.training.left)
        ):
            self._end_training()
        capture = self.capture or self.start(optimizer)
        if capture is None:
            return
        self.stepping.append(weakref.ref(optimizer))
        if len(self.stepping) == 1:
            self.isolation.run("updates", capture.updating, optimizer)
            if not (closure or _changes_gradients(optimizer)):
                self.isolation.run("gradients", capture.gradients, optimizer)
            self.hook_probes.phases.step_begins(perf_counter())

    def after_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> bool:
        """Called after `Optimizer.step`. Whether the training has made a step."""
        capture = self.capture
        if capture is None or not self.stepping:
            return False
        while self.stepping and self.stepping.pop()() is not optimizer:
            pass
        if self.stepping:
            return False  # inside the step of another optimizer, which is the one that counts
        self.hook_probes.phases.step_ends(perf_counter())
        if closure or _changes_gradients(optimizer):
            # They were computed, or became what was used, in the middle of the step.
            self.isolation.run("gradients", capture.gradients, optimizer, used=True)
        self.made_step = True
        self.cleared.had = False
        self.most_backwards = max(self.most_backwards, self.backwards)
        backward, self.backwards = self.backwards > 0, 0
        made = capture.stepped(optimizer, backward=backward) is not None
        if not self.hook_probes.on_its_thread:
            self.threads.stepped(optimizer)
        # What we have done up to now is of no phase.
        self.hook_probes.phases.step_ends(perf_counter())
        return made

    @property
    def accumulates(self) -> bool:
        """Whether there were backward calls that a step may still follow."""
        return 0 < self.backwards < NO_STEP_AT_ALL

    def unwatched_step(self) -> None:
        """A step was made while no training has begun: what was computed for it is its own."""
        self.made_step, self.cleared.had, self.backwards = True, False, 0
        if self.losses.held:
            self.losses.drain()

    def on_backward(self, tensors: object, weights: object = None) -> None:
        """In front of a backward call of `tensors`; `weights` are their `grad_tensors`."""
        if self.threads.any and self.threads.train_here(self.hook_probes.thread):
            return
        scaled, self.scaled = self.scaled, None
        unscaled = None
        if scaled is not None and (
            scaled[0] in (id(tensors), id(only(tensors))) or made_from(only(tensors), scaled[2])
        ):
            unscaled = scaled[1]
        begins = first(tensors)
        reads = self.may_read(begins)
        if reads and self.cleared.had and not self.stepping:
            self.find_skipped()
        # Several of which some are scaled, each by itself, or that have weights, are no loss.
        unlike = weights is not None or (scaled is not None and unscaled is None)
        several = only(tensors) is not begins
        loss = None if several and unlike else loss_of(tensors, unscaled)
        if loss is not None:
            alone = not self.gradients.several
            if reads and (self.capture is None or not alone):
                self.cleared.begun_from(begins, anew=not (alone or self.cleared.had))
            self.losses.add(loss, begun=self.capture is not None)
            if isinstance(loss, float) and not math.isfinite(loss) and self.capture is not None:
                self.isolation.run("origin", self.capture.bad_loss, first_bad(tensors))
        self.local.backward = self.backwards
        self.backwards += 1
        if self.capture is None:
            self._check_for_steps()
        if activations.due:
            activations.backward_begins()
        self.hook_probes.loaders.backward()
        if reads and not self.stepping:
            self.hook_probes.checks.backward(tensors)
        if self.capture is not None:
            self.capture.training.activity += 1
            self.hook_probes.phases.backward_begins(perf_counter())

    def backward_ended(self) -> None:
        """Called after a backward call."""
        if self.threads.any and self.threads.train_here(self.hook_probes.thread):
            return
        if not self.stepping and self.losses.held and self.gradients.here == get_ident():
            self.find_left()
        if self.capture is not None:
            self.hook_probes.phases.backward_ends(perf_counter())

    def _check_for_steps(self) -> None:
        """Before the first step: report it where none of an optimizer seems to come."""
        enough = NO_STEP if self.discarded else NO_STEP_AT_ALL
        job = current.session is not None or os.environ.get(RUN_ID)
        if self.backwards == enough and job and not _is_worker() and not self.forked:
            unwatched.report("no_step", os.environ)

    def on_scale(self, before: object, after: object) -> None:
        """Called after `GradScaler.scale` of `before`, which returned `after`; a tensor of one
        element is a loss, and so are several of them in a list.
        """
        self.local.scaled = True
        if isinstance(before, torch.Tensor) and before.numel() == 1:
            self.scaled = (id(after), before.detach(), node_number(after))
        elif isinstance(before, tuple | list):
            losses = [one for one in before if isinstance(one, torch.Tensor) and one.numel() == 1]
            # Others are not kept: they may be large.
            if len(losses) == len(before):
                self.scaled = (id(after), [loss.detach() for loss in losses], None)

    def on_scaler_update(self, scaler: object) -> bool:
        """Called after `GradScaler.update`. Whether there is a training."""
        made_step, self.made_step = self.made_step, False
        self.cleared.had = False
        if self.capture is None:
            if not made_step:
                self.losses.skip()
            return False
        self.capture.scaler_updated(scaler, made_step=made_step)
        return True

    def on_batch(self, iterator: object, batch: object, began: float, ended: float) -> bool:
        """Called after a data loader returned a batch. Whether it belongs to an evaluation."""
        evaluating = self.capture is not None and self.capture.training.is_evaluating()
        self.hook_probes.batch(iterator, began, ended, evaluating=evaluating)
        capture = self.capture
        if capture is not None:
            capture.training.activity += 1
            if not self.hook_probes.on_its_thread:
                return False  # somebody fetches ahead; the loop is left on its own thread
            if evaluating:
                for probe in capture.probes.on_evaluation_batch:
                    self.isolation.run(probe.name, probe.evaluation_batch, batch)
                    self.fast_path.until = 0
                return True
            for probe in capture.probes.on_batch:
                self.isolation.run(probe.name, probe.batch, batch, capture.training.next_step)
        return evaluating

    def on_last_batch(self) -> None:
        """Called after the last batch of a data loader."""
        if self.capture is not None and self.hook_probes.on_its_thread:
            for probe in self.capture.probes.on_last_batch:
                self.isolation.run(probe.name, probe.last_batch)
            if self.hook_probes.loaders.trains:
                self.hook_probes.checks.epoch()

    def check(self, exit_point: ExitPoint) -> None:
        """An exit point. Outside of the isolation: raises StopTraining on purpose. Then it waits
        for other ranks, and for a checkpoint.
        """
        if self.capture is not None:
            self.capture.training.check(exit_point)


def _is_worker() -> bool:
    """Whether this is a child of multiprocessing, or a worker of a data loader."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _changes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user's hooks may change the gradients behind ours, in front of the step; they are
    read behind it then. Not where other hooks of the user's may clear them there first.
    """
    before = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return bool(before) and not getattr(optimizer, "_optimizer_step_post_hooks", None)


def _is_inside(outer: torch.optim.Optimizer | None, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's step is called in the middle of that one's, which may be gone."""
    return outer is not None and _running(outer) > (outer is optimizer)


def _running(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of the step of this optimizer are on the stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count
