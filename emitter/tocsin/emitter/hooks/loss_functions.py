"""Losses of evaluations: those that are computed without a gradient.

Two places are watched: the call of a loss module, and the functions of torch.nn.functional that
such modules use. They count only while the model is in eval(): a number without a gradient may be
many things, a metric of each training step for one. The first that an evaluation uses is its loss,
the others are metrics.

TorchScript and torch.compile take the functions themselves, not what stands around them: they are
marked as `torch.jit.script_if_tracing` marks its own. On a GPU a loss is copied without waiting,
and sent when it has arrived.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.modules import loss as loss_modules

from tocsin.emitter.hooks.kept_functions import held
from tocsin.emitter.model.mesh_names import whole
from tocsin.emitter.plan.collections import PREDICT
from tocsin.emitter.probes.program_checks.checks import LOSSES
from tocsin.emitter.process.transparent_frames import leave_traceback, transparent
from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.readable import readable

if TYPE_CHECKING:
    from tocsin.emitter.hooks.training_hooks import Hooks

FUNCTIONS: Final = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
)


class Evaluation:
    """Which losses count, in this process."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks: Final = hooks
        self._inside = False

    def on_loss(self, name: str, value: object) -> bool:
        """Called after a loss without a gradient. Whether an evaluation is in progress. A value
        that is no tensor of one element is no loss of it.
        """
        capture = self._hooks.capture
        if capture is None:
            return False
        evaluating = capture.training.is_evaluating()
        self._hooks.hook_probes.checks.silent_loss(evaluating=evaluating)
        if not evaluating:
            return False
        now = time.perf_counter()
        self._hooks.hook_probes.phases.evaluated(now, now)
        # The compiler calls functions with tensors that hold nothing.
        loss = readable(whole(value))
        if loss is not None and loss.numel() == 1:
            capture.training.activity += 1
            here = threading.get_ident() == self._hooks.hook_probes.thread
            for probe in capture.probes.on_evaluation_loss:
                run, call = self._hooks.isolation.run, probe.evaluation_loss
                run(probe.name, call, name, loss, here=here)
                if probe.reads <= capture.training.next_step:
                    self._hooks.fast_path.until = 0
        return True

    def on_function(
        self, name: str, value: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> bool:
        """Called after a loss function without a gradient. Whether an evaluation is in progress."""
        capture = self._hooks.capture
        if capture is None:
            return False
        evaluating = capture.training.is_evaluating()
        if evaluating and kwargs.get("reduction") == "sum" and not is_recording():
            value = _mean(name, value, args, kwargs)
        return self.on_loss(name, value)

    def on_classes(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Called after a call of `torch.nn.functional.cross_entropy` with these arguments: scores
        `[B, K, ...]` or `[K]`, and class ids `[B, ...]` or a scalar.
        """
        capture = self._hooks.capture
        if capture is None:
            return
        trains, training = torch.is_grad_enabled(), capture.training
        if trains != training.is_evaluating() and PREDICT not in training.phases:
            self._hooks.hook_probes.data.cross_entropy(args, kwargs, "train" if trains else "eval")

    def install(self, *, late: bool = False) -> None:
        """Put the hooks into torch. Where that is late, a function that the program has kept stays
        what it is; loss modules that call it are seen still.
        """
        self._modules()
        functions = [getattr(torch.nn.functional, name) for name in FUNCTIONS]
        kept = held(functions) if late else [False] * len(functions)
        for name, is_kept in zip(FUNCTIONS, kept, strict=True):
            if not is_kept:
                self._function(name)

    def _modules(self) -> None:
        original, hooks = loss_modules._Loss.__call__, self._hooks

        @transparent
        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            # Also where it is part of another loss, which counts.
            if hooks.capture is None or torch.is_grad_enabled() or self._inside:
                try:
                    return original(module, *args, **kwargs)
                except BaseException as error:
                    leave_traceback(error)
                    raise
            # Of a sum, the hook of the function counts, which sees what the sum is over.
            whole = getattr(module, "reduction", None) != "sum"
            self._inside = whole
            try:
                result = original(module, *args, **kwargs)
            except BaseException as error:
                leave_traceback(error)
                raise
            finally:
                self._inside = False
            if whole:
                hooks.isolation.run("evaluation", self.on_loss, type(module).__qualname__, result)
            hooks.check("evaluation")
            return result

        loss_modules._Loss.__call__ = call

    def _function(self, name: str) -> None:
        original: Callable[..., object] = getattr(torch.nn.functional, name)
        hooks = self._hooks
        data, checks = hooks.hook_probes.data, hooks.hook_probes.checks
        passed, classes = hooks.fast_path.passed, name == "cross_entropy"

        @transparent
        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave_traceback(error)
                raise
            if passed.quiet and getattr(result, "requires_grad", False):
                return result
            if hooks.capture is None:
                return result
            trains = torch.is_grad_enabled()
            looks = classes and (data.due or not trains)
            if trains and not (looks or checks.losses.due):
                return result  # nearly all of them
            if _is_fake(result):
                return result
            if looks:
                hooks.isolation.run("labels", self.on_classes, args, kwargs)
            if trains and checks.losses.due:
                hooks.isolation.run(LOSSES, checks.loss, name, args, kwargs)
            if self._inside or trains:
                return result
            if hooks.isolation.run("evaluation", self.on_function, name, result, args, kwargs):
                hooks.check("evaluation")
            return result

        # The names that compilers look for.
        setattr(call, "__original_fn", original)
        setattr(call, "__script_if_tracing_wrapper", True)
        setattr(torch.nn.functional, name, call)


def _is_fake(value: object) -> bool:
    """Whether this is a tensor without numbers, with which the compiler tries a function."""
    return hasattr(value, "_mode_key")


def _mean(name: str, total: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """What the function would have returned for the mean, on the same device; never waits.

    An evaluation that asks for sums divides them later, where nobody sees it: the models of Hugging
    Face do, and the MNIST example of PyTorch. Only a mean compares with the training loss.
    """
    scores = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if name == "ctc_loss" or not isinstance(total, torch.Tensor):
        return total
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
        return total
    if name not in ("cross_entropy", "nll_loss"):
        return total / max(1, scores.numel())
    if target.is_floating_point():
        classes = target.shape[min(1, target.dim() - 1)]
        return total / max(1, target.numel() // max(1, classes))
    counts = target != kwargs.get("ignore_index", -100)
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    if isinstance(weight, torch.Tensor):
        # What is ignored may be no class: on a GPU such an index ends the user's process.
        return total / (weight[torch.where(counts, target, 0)] * counts).sum()
    return total / counts.sum().clamp(min=1)
