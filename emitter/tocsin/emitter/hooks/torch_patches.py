"""Our hooks in torch: where they sit, and the isolation around each.

They are installed once, when torch is imported, and do next to nothing until the first optimizer
step of this process: that is where a training begins. A process that never makes a step (a
data-loader worker, torchrun's agent, an inference server) is left alone.

Where they sit, and why there:

- the global hooks before and after each `Optimizer.step`: no graph break under torch.compile;
- `torch.autograd.backward`, which `Tensor.backward` calls too: the loss;
- `GradScaler.scale` and `.update`, FSDP's own too: the loss before it was scaled, and steps that
  were skipped;
- `clip_grad_norm_`: the gradient norm before it;
- the loss modules' `__call__` and the functions behind them: losses without a gradient;
- at steps that are due `__call__` of the classes of activations, routers and the output layer, and
  `scaled_dot_product_attention`: what they put out. Nothing sits on a module itself: a hook of an
  instance would be pickled with it, and a global one makes torch.compile warn;
- the iterators of data loaders: that something goes on between two steps, and how long it waits;
- the constructor of DistributedDataParallel: the rank's own gradients, before they are averaged;
- `torch.utils.swap_tensors`, which `Module.to` calls: our weak references are let go meanwhile;
- the constructor of learning-rate schedules: how often they are stepped;
- `torch.save`, and what frameworks have beside and above it; `torch.load`, before the first step.

The only thing that leaves the isolation is the stop, on purpose, at an exit point.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tocsin.emitter.hooks import clip_grad_norm
from tocsin.emitter.hooks.fast_path import PROBE, FastPath
from tocsin.emitter.hooks.kept_functions import held
from tocsin.emitter.hooks.loss_functions import Evaluation
from tocsin.emitter.hooks.passed_steps import PassedSteps
from tocsin.emitter.hooks.training_hooks import BACKWARDS_WITHOUT_STEP, Hooks
from tocsin.emitter.hooks.uncompiled import leave_uncompiled, leave_uncompiled_with_callees
from tocsin.emitter.model.tensor_refs import Released, let_go, take_back
from tocsin.emitter.probes.activations import watch
from tocsin.emitter.probes.program_checks import lr_schedules
from tocsin.emitter.process.environment import RUN_ID
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.process.transparent_frames import leave_traceback, transparent
from tocsin.emitter.stop import before_update
from tocsin.emitter.training.context import current

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.hooks.update_guard import UpdateGuard
    from tocsin.emitter.probes.losses import Loss
    from tocsin.emitter.training.session import Session

hooks: Final = Hooks()
"""The one of this process."""

passed: Final = hooks.fast_path.passed

_installed = False

_sharded: Final[set[type]] = set()
"""FSDP's GradScaler, once it is hooked."""

_guard: UpdateGuard | None = None
"""Where `stop.before_update` asks for one."""


def install(*, late: bool = False) -> None:
    """Put the hooks into torch; a second time does nothing. `late`: the program has had torch
    before, and may have kept functions of it.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for place in (
        _optimizers,
        _backward,
        _grad_scaler,
        partial(_clipping, late=late),
        partial(_evaluations, late=late),
        _data_loaders,
        _data_parallel,
        _save,
        _activations,
        _schedules,
        _swaps,
    ):
        name = place.func.__name__ if isinstance(place, partial) else place.__name__
        hooks.isolation.run(name.strip("_"), place)
    os.register_at_fork(after_in_child=_in_child)
    hooks.isolation.run("compiler", _leave_uncompiled)


def _leave_uncompiled() -> None:
    leave_uncompiled()
    leave_uncompiled_with_callees(
        Isolation.run,
        Hooks.check,
        *(_before_step, _after_step, FastPath.before, FastPath.after, FastPath.backward),
        *(Hooks.backward_ended, _leave_fast_path, PassedSteps.before, PassedSteps.after),
        *(PassedSteps.backward, PassedSteps.batch, PassedSteps.updated, PassedSteps.end),
    )


def _optimizers() -> None:
    global _guard
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    policy = before_update.policy_of(os.environ)
    if policy is not None:
        from tocsin.emitter.hooks.update_guard import UpdateGuard

        _guard = UpdateGuard(hooks, policy)
        _guard.install()


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if is_dynamo_compiling():
        _before_step_apart(optimizer, args, kwargs)
        return
    try:
        if passed.on and passed.before(optimizer):
            return
        if hooks.asleep or (hooks.threads.any and hooks.threads.ignores(optimizer)):
            return
        if hooks.fast_path.before(optimizer, len(args) + len(kwargs)):
            return
    # The isolation, without its cost.
    except Exception as error:
        _leave_fast_path(error)
    hooks.isolation.run("steps", hooks.before_step, optimizer, closure=_has_closure(args, kwargs))


def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if is_dynamo_compiling():
        _after_step_apart(optimizer, args, kwargs)
        return
    try:
        if passed.on or passed.inside:
            made: bool | None = passed.after(optimizer)
        else:
            if hooks.isolation.off:
                hooks.isolation.stepped()
            if hooks.capture is None:
                hooks.unwatched_step()
                return
            made = hooks.fast_path.after(optimizer)
    # The isolation, without its cost.
    except Exception as error:
        _leave_fast_path(error)
        made = True  # counted it is, if not told
    if made is not None:
        if made:
            hooks.check("optimizer_step")
        return
    made = hooks.isolation.run(
        "steps", hooks.after_step, optimizer, closure=_has_closure(args, kwargs)
    )
    # With the probe off every step of any optimizer is an exit point still.
    if made or "steps" in hooks.isolation.off:
        hooks.check("optimizer_step")


# Where a whole step is compiled, the compiler does not look into these: it calls them.
_before_step_apart = torch._disable_dynamo(_before_step)
_after_step_apart = torch._disable_dynamo(_after_step)


def _leave_fast_path(error: Exception) -> None:
    """The fast path has failed: the next step takes the long one."""
    hooks.fast_path.until = passed.inside = 0
    passed.on = passed.quiet = False
    hooks.isolation.run(PROBE, _fail, error)


def _passes(seen: Callable[[], bool]) -> bool:
    """Whether something is passed over with the step in progress; no error of ours leaves it."""
    try:
        return seen()
    # The isolation, without its cost.
    except Exception as error:
        _leave_fast_path(error)
        return False


def _fail(error: Exception) -> None:
    raise error


def _has_closure(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    return (len(args) > 1 and callable(args[1])) or callable(kwargs.get("closure"))


def _backward() -> None:
    original = torch.autograd.backward
    task = torch._C._current_graph_task_id

    @transparent
    @functools.wraps(original)
    def backward(*args: object, **kwargs: object) -> None:
        # Inside of another one (reentrant checkpoints) it is part of that, and its scalars are no
        # losses. Autograd knows it on each of its threads: with a GPU it calls on one of its own.
        if task() != -1:
            original(*args, **kwargs)
            return
        try:
            over = passed.on and passed.backward()
        # The isolation, without its cost: at each step.
        except Exception as error:
            over = False
            _leave_fast_path(error)
        if over:
            try:
                original(*args, **kwargs)
            except BaseException as error:
                leave_traceback(error)
                raise
            return
        if not hooks.asleep:
            tensors = args[0] if args else kwargs.get("tensors")
            try:
                usual = hooks.fast_path.backward(tensors)
            # The same.
            except Exception as error:
                usual = False
                _leave_fast_path(error)
            if not usual:
                weights = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
                hooks.isolation.run("losses", hooks.on_backward, tensors, weights)
        if hooks.asleep:
            original(*args, **kwargs)
        else:
            try:
                original(*args, **kwargs)
            except BaseException as error:
                leave_traceback(error)
                raise
            finally:
                try:
                    hooks.backward_ended()
                # The isolation, without its cost.
                except Exception as error:
                    hooks.isolation.run("phases", _fail, error)
        if hooks.backwards > max(BACKWARDS_WITHOUT_STEP, 2 * hooks.most_backwards):
            hooks.check("backward")

    torch.autograd.backward = backward


def _grad_scaler() -> None:
    scaler = torch.amp.grad_scaler.GradScaler
    construct = scaler.__init__

    @transparent
    @functools.wraps(construct)
    def constructed(self: object, *args: object, **kwargs: object) -> None:
        construct(self, *args, **kwargs)
        hooks.isolation.run("scaler", _sharded_grad_scaler)

    scaler.__init__ = constructed
    _wrap_scaler(scaler)
    _sharded_grad_scaler()


def _sharded_grad_scaler() -> None:
    """FSDP's has both methods of its own. It is imported behind torch, if at all, and constructed
    in front of the first loss.
    """
    module = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    scaler = getattr(module, "ShardedGradScaler", None)
    if isinstance(scaler, type) and scaler not in _sharded:
        _sharded.add(scaler)
        _wrap_scaler(scaler)


def _wrap_scaler(scaler: Any) -> None:
    original_scale, original_update = scaler.scale, scaler.update

    @transparent
    @functools.wraps(original_scale)
    def scale(self: object, outputs: object) -> object:
        result = original_scale(self, outputs)
        if not (hooks.asleep or passed.on) and getattr(self, "_enabled", True):
            hooks.isolation.run("scaler", hooks.on_scale, outputs, result)
        return result

    @transparent
    @functools.wraps(original_update)
    def update(self: object, *args: object, **kwargs: object) -> None:
        original_update(self, *args, **kwargs)
        if hooks.asleep or not getattr(self, "_enabled", True):
            return
        if passed.on and _passes(passed.updated):
            return
        if hooks.isolation.run("scaler", hooks.on_scaler_update, self):
            hooks.check("scaler_update")

    scaler.scale, scaler.update = scale, update


def _clipping(*, late: bool) -> None:
    if not (late and any(held([torch.nn.utils.clip_grad_norm_]))):
        clip_grad_norm.install(hooks)


def _evaluations(*, late: bool) -> None:
    Evaluation(hooks).install(late=late)


def _activations() -> None:
    watch.install(hooks.isolation)


def _schedules() -> None:
    lr_schedules.install(hooks.isolation)


def _swaps() -> None:
    original = torch.utils.swap_tensors

    @transparent
    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            original(t1, t2)
            return
        released = hooks.isolation.run("swaps", _let_go, t1, t2)
        try:
            original(t1, t2)
        finally:
            if released:
                hooks.isolation.run("swaps", take_back, released)

    torch.utils.swap_tensors = swap_tensors


def _let_go(*tensors: torch.Tensor) -> Released:
    hooks.cleared.drop_left()
    return let_go(*tensors)


def _data_loaders() -> None:
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    original = iterator.__next__

    @transparent
    @functools.wraps(original)
    def following(self: object) -> object:
        if hooks.asleep:
            return original(self)
        began = perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            hooks.isolation.run("batches", hooks.on_last_batch)
            raise
        except BaseException as error:
            leave_traceback(error)
            raise
        if passed.on and _passes(passed.batch):
            return batch
        if hooks.isolation.run("batches", hooks.on_batch, self, batch, began, perf_counter()):
            hooks.check("evaluation")
        return batch

    iterator.__next__ = following


def _data_parallel() -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    original = parallel.__init__

    @transparent
    @functools.wraps(original)
    def construct(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if not hooks.asleep and os.environ.get(RUN_ID):
            hooks.isolation.run("local_gradients", _watch_all, self)
            if _guard is not None:
                hooks.isolation.run(before_update.PROBE, _guard.is_parallel, self)

    parallel.__init__ = construct


def _watch_all(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        hooks.watch_local(parameter)


def _save() -> None:
    hooks.checkpoint_writes.install()
    hooks.checkpoint_reads.install()


def _in_child() -> None:
    # The sender's thread is not in a forked child, and the child is not a rank; unless it becomes
    # one with a process group of its own. What it inherited is kept: to end it, the
    # spool's file, the Kafka client or memory of a GPU in it, is up to the parent.
    hooks.forked = True
    hooks.gradients.in_child()
    _inherited.append((current.session, hooks.capture, hooks.losses.held))
    current.session = None
    hooks.reset()


_inherited: Final[list[tuple[Session | None, Capture | None, list[Loss]]]] = []
