"""Our hooks in torch: where they sit, and the wall around each.

They are installed once, when torch is imported, and do next to nothing until the first optimizer
step of this process: that is where a training begins. A process that never makes a step (a
data-loader worker, torchrun's agent, an inference server) is left alone.

Where they sit, and why there:

- the global hooks before and after each `Optimizer.step`: no graph break under torch.compile;
- `torch.autograd.backward`, which `Tensor.backward` calls too: the loss;
- `GradScaler.scale` and `.update`: the loss before it was scaled, and steps that were skipped;
- `clip_grad_norm_`: the gradient norm before it;
- the loss modules' `__call__` and the functions behind them: losses without a gradient;
- `__call__` of ReLU-like classes: their outputs. Nothing sits on a module itself: a hook of an
  instance would be pickled with it, and a global one makes torch.compile warn;
- the iterators of data loaders: that something goes on between two steps, and how long it waits;
- the constructor of DistributedDataParallel: the rank's own gradients, before they are averaged;
- `torch.save`, and what frameworks have beside and above it.

The only thing that leaves the wall is the stop, on purpose, at an edge.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tocsin.emitter import activations as relus
from tocsin.emitter import clipping
from tocsin.emitter.around import Around
from tocsin.emitter.clipping import ClippedNorms
from tocsin.emitter.current import current
from tocsin.emitter.evaluation import Evaluation
from tocsin.emitter.local_gradients import LocalGradients
from tocsin.emitter.losses import LossBuffer, loss_of, only
from tocsin.emitter.quick_steps import QuickSteps
from tocsin.emitter.saves import Saves
from tocsin.emitter.settings import RUN_ID
from tocsin.emitter.shards import is_distributed
from tocsin.emitter.wall import to_stderr

if TYPE_CHECKING:
    from tocsin.emitter.capture import Capture
    from tocsin.emitter.edges import Edge
    from tocsin.emitter.session import Session

BACKWARDS_WITHOUT_STEP: Final = 16
"""Backward calls without an optimizer step after which each is an edge; or twice as many as this
training has ever made between two steps, where that is more."""


class Hooks:
    """The state behind the hooks of this process."""

    def __init__(self) -> None:
        self.wall: Final = current.wall
        self.wall.report = to_stderr
        self.capture: Capture | None = None
        self.preferred: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps count, if the user has said so."""
        self.asleep = False
        """True for good in a process that is not to be captured."""
        self.forked = False
        self.losses: Final = LossBuffer()
        self.local: Final = LocalGradients()
        self.clipped: Final = ClippedNorms()
        self.around: Final = Around(self.wall)
        self.quick: Final = QuickSteps(self)
        self.saves: Final = Saves(self)
        self.stepping: list[torch.optim.Optimizer] = []
        self.made_step = False
        self.backwards = 0
        self.most_backwards = 0
        self.scaled: tuple[int, torch.Tensor] | None = None

    def begin(self, optimizer: torch.optim.Optimizer) -> Capture | None:
        """The first optimizer step of this process is about to happen."""
        if current.session is None and not os.environ.get(RUN_ID):
            return None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not distributed and (self.forked or _is_worker()):
            self.asleep = True
            return None
        # Only now: these import pydantic and the bus, which most processes never need.
        from tocsin.emitter.capture import Capture
        from tocsin.emitter.session import Session

        place = None
        if distributed:
            place = (torch.distributed.get_rank(), torch.distributed.get_world_size())
        session = current.session or Session(os.environ, self.wall)
        current.session = session
        capture = Capture(
            session.begin(place),
            optimizer,
            self.losses,
            self.local,
            self.clipped,
            self.around,
            self.quick,
            preferred=self.preferred and self.preferred(),
        )
        self.capture = capture
        self.wall.call("checkpoints", self.saves.follow_frameworks)
        session.before_end = capture.close
        session.announce(capture.shape())
        if capture.training.identity.world_size > 1:
            for parameter in capture.parameters():
                self.watch_local(parameter)
        return capture

    def forget(self) -> None:
        """The training was finished by its own code; the next step begins another."""
        self.capture, self.preferred, self.made_step = None, None, False
        self.wall.call("clean-up", self._clean_up)
        self.backwards = self.most_backwards = 0
        self.wall.report = to_stderr

    def _clean_up(self) -> None:
        relus.activations.forget()
        self.stepping.clear()
        self.losses.clear()
        self.quick.forget()
        self.local.clear()
        self.local.scaled = False
        self.clipped.clear()
        self.around.forget()

    def watch_local(self, parameter: torch.Tensor) -> None:
        """Look at this rank's own gradient of the parameter whenever it is complete."""
        # The gradient of a DTensor is, with FSDP2, complete only once it is reduced.
        if parameter.requires_grad and not is_distributed(parameter):
            place = self.local.is_new(parameter)
            if place is not None:
                hook = functools.partial(_on_local_gradient, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def before_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """In front of `Optimizer.step`."""
        capture = self.capture or self.begin(optimizer)
        if capture is None:
            return
        if self.stepping and _running(self.stepping[-1]) <= (self.stepping[-1] is optimizer):
            self.stepping.clear()  # a step that raised has had no end
        self.stepping.append(optimizer)
        if len(self.stepping) == 1:
            self.wall.call("updates", capture.updating, optimizer)
            if not closure:
                capture.gradients(optimizer)
            self.around.phases.step_begins(perf_counter())

    def after_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> bool:
        """Behind `Optimizer.step`; whether the training has made a step."""
        capture = self.capture
        if capture is None or not self.stepping:
            return False
        while self.stepping and self.stepping.pop() is not optimizer:
            pass
        if self.stepping:
            return False  # inside the step of another optimizer, which is the one that counts
        self.around.phases.step_ends(perf_counter())
        if closure:
            capture.gradients(optimizer)  # the closure has computed them in the middle of the step
        self.made_step = True
        self.most_backwards = max(self.most_backwards, self.backwards)
        self.backwards = 0
        made = capture.stepped(optimizer) is not None
        # What we have done up to now is of no phase.
        self.around.phases.step_ends(perf_counter())
        return made

    def on_backward(self, tensors: object) -> None:
        """In front of a backward call."""
        scaled, self.scaled = self.scaled, None
        unscaled = scaled[1] if scaled is not None and scaled[0] == id(only(tensors)) else None
        loss = loss_of(tensors, unscaled)
        if loss is not None:
            self.losses.add(loss, begun=self.capture is not None)
        self.local.backward = self.backwards
        self.backwards += 1
        relus.activations.due = False
        self.around.loaders.backward()
        if self.capture is not None:
            self.capture.training.activity += 1
            self.around.phases.backward_begins(perf_counter())

    def on_scale(self, before: object, after: object) -> None:
        """Behind `GradScaler.scale`."""
        self.local.scaled = True
        if isinstance(before, torch.Tensor) and before.numel() == 1:
            self.scaled = (id(after), before.detach())

    def on_scaler_update(self) -> bool:
        """Behind `GradScaler.update`; whether there is a training."""
        made_step, self.made_step = self.made_step, False
        if self.capture is None:
            if not made_step:
                self.losses.skip()
            return False
        self.capture.scaler_updated(made_step)
        return True

    def on_batch(self, iterator: object, batch: object, began: float, ended: float) -> bool:
        """Behind a batch of a data loader; whether it is one of an evaluation."""
        evaluating = self.capture is not None and self.capture.training.is_evaluating()
        self.around.batch(iterator, began, ended, evaluating=evaluating)
        capture = self.capture
        if capture is not None:
            capture.training.activity += 1
            if evaluating:
                if capture.evaluations.on:
                    capture.evaluations.fed(batch)
                return True
            if capture.evaluations.busy:
                capture.evaluations.over()
            if capture.inputs.on:
                capture.inputs.fed(batch, capture.training.next_step)
        return evaluating

    def on_last_batch(self) -> None:
        """Behind the last batch of a data loader."""
        if self.capture is not None:
            self.capture.evaluations.drained()

    def check(self, edge: Edge) -> None:
        """An edge. Outside of the wall: raises StopTraining on purpose."""
        if self.capture is not None:
            self.capture.training.check(edge)


hooks: Final = Hooks()
"""The one of this process."""

_installed = False


def install() -> None:
    """Put the hooks into torch; a second time does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    for place in (
        _optimizers,
        _backward,
        _grad_scaler,
        _clipping,
        _evaluations,
        _data_loaders,
        _data_parallel,
        _save,
        _activations,
    ):
        hooks.wall.call(place.__name__.strip("_"), place)
    os.register_at_fork(after_in_child=_in_child)


def _optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if torch.compiler.is_compiling():
        _before_step_apart(optimizer, args, kwargs)
    elif not hooks.asleep and not _is_quick(optimizer, args, kwargs):
        hooks.wall.call(
            "gradients", hooks.before_step, optimizer, closure=_has_closure(args, kwargs)
        )


def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if torch.compiler.is_compiling():
        _after_step_apart(optimizer, args, kwargs)
        return
    if hooks.capture is None:
        return
    if _was_quick(optimizer):
        hooks.check("optimizer_step")
        return
    made = hooks.wall.call("steps", hooks.after_step, optimizer, closure=_has_closure(args, kwargs))
    # With the probe off every step of any optimizer is an edge still.
    if made or "steps" in hooks.wall.off:
        hooks.check("optimizer_step")


# Where a whole step is compiled, the compiler does not look into these: it calls them.
_before_step_apart = torch._disable_dynamo(_before_step)
_after_step_apart = torch._disable_dynamo(_after_step)


def _is_quick(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> bool:
    try:
        return hooks.quick.before(optimizer, len(args) + len(kwargs))
    # The wall, without its cost.
    except Exception as error:
        hooks.quick.until = 0
        hooks.wall.call("quick steps", _fail, error)
        return False


def _was_quick(optimizer: torch.optim.Optimizer) -> bool:
    try:
        return hooks.quick.after(optimizer)
    # The wall, without its cost.
    except Exception as error:
        hooks.quick.until = 0
        hooks.wall.call("quick steps", _fail, error)
        return False


def _fail(error: Exception) -> None:
    raise error


def _has_closure(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    return (len(args) > 1 and callable(args[1])) or callable(kwargs.get("closure"))


def _backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: object, **kwargs: object) -> None:
        if not hooks.asleep:
            tensors = args[0] if args else kwargs.get("tensors")
            hooks.wall.call("losses", hooks.on_backward, tensors)
        if hooks.capture is None:
            original(*args, **kwargs)
        else:
            try:
                original(*args, **kwargs)
            finally:
                hooks.wall.call("phases", hooks.around.phases.backward_ends, perf_counter())
        if hooks.backwards > max(BACKWARDS_WITHOUT_STEP, 2 * hooks.most_backwards):
            hooks.check("backward")

    torch.autograd.backward = backward


def _grad_scaler() -> None:
    scaler = torch.amp.grad_scaler.GradScaler
    original_scale, original_update = scaler.scale, scaler.update

    @functools.wraps(original_scale)
    def scale(self: object, outputs: object) -> object:
        result = original_scale(self, outputs)
        if not hooks.asleep:
            hooks.wall.call("scaler", hooks.on_scale, outputs, result)
        return result

    @functools.wraps(original_update)
    def update(self: object, *args: object, **kwargs: object) -> None:
        original_update(self, *args, **kwargs)
        if not hooks.asleep and hooks.wall.call("scaler", hooks.on_scaler_update):
            hooks.check("scaler_update")

    scaler.scale, scaler.update = scale, update


def _clipping() -> None:
    clipping.install(hooks)


def _evaluations() -> None:
    Evaluation(hooks).install()


def _activations() -> None:
    relus.install(hooks.wall)


def _data_loaders() -> None:
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    original = iterator.__next__

    @functools.wraps(original)
    def following(self: object) -> object:
        if hooks.asleep:
            return original(self)
        began = perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            hooks.wall.call("batches", hooks.on_last_batch)
            raise
        if hooks.wall.call("batches", hooks.on_batch, self, batch, began, perf_counter()):
            hooks.check("evaluation")
        return batch

    iterator.__next__ = following


def _data_parallel() -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    original = parallel.__init__

    @functools.wraps(original)
    def construct(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if not hooks.asleep and os.environ.get(RUN_ID):
            hooks.wall.call("local_gradients", _watch_all, self)

    parallel.__init__ = construct


def _watch_all(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        hooks.watch_local(parameter)


def _on_local_gradient(place: int, parameter: torch.Tensor) -> None:
    if not hooks.asleep and hooks.local.wants(place):
        hooks.wall.call("local_gradients", hooks.local.look, parameter)


def _save() -> None:
    hooks.saves.install()


def _in_child() -> None:
    # The sender's thread is not in a forked child, and the child is not a rank; unless it becomes
    # one with a process group of its own. What it inherited is kept: closing a copied SQLite
    # connection could disturb the parent's.
    hooks.forked = True
    _inherited.append((current.session, hooks.capture))
    current.session = None
    hooks.forget()


_inherited: Final[list[tuple[Session | None, Capture | None]]] = []


def _is_worker() -> bool:
    """Whether this is a child of multiprocessing, or a worker of a data loader."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _running(optimizer: torch.optim.Optimizer) -> int:
    """How many calls of the step of this optimizer are on the stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count
