"""`stop: {before_update: true}`: the loop is left before an update that would write a gradient that
is not finite.

In front of each optimizer step all of its gradients are looked at, in one pass; on a GPU that waits
for the backward pass. Installed only where it is asked for, behind the hook that begins a training.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.stop import exit_points
from tocsin.emitter.stop.before_update import PROBE, CheckpointPolicy

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture
    from tocsin.emitter.hooks.training_hooks import Hooks

EVIDENCE_S: Final = 2.0
"""How long is waited for the gradient's statistics, which the rule reads, seconds."""


class UpdateGuard:
    """Looks at the gradients in front of each step of an optimizer of the training."""

    def __init__(self, hooks: Hooks, policy: CheckpointPolicy) -> None:
        self._hooks = hooks
        self._policy: Final = policy
        self._parallel: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._alike: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = (
            weakref.WeakKeyDictionary()
        )

    def install(self) -> RemovableHandle:
        """Be called in front of each optimizer step, behind the hooks that are there."""
        return register_optimizer_step_pre_hook(self.before_step)

    def is_parallel(self, module: torch.nn.Module) -> None:
        """The gradients of this module are averaged over all ranks (DistributedDataParallel)."""
        self._parallel.add(module)
        self._alike.clear()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """In front of `Optimizer.step`. Outside of the isolation: raises StopTraining on purpose.
        Waits for gradients on a GPU, and may wait for other ranks.

        Where the gradients are computed in the step, by a closure, it gives the step another one,
        which looks at them behind it.
        """
        if is_dynamo_compiling() or not self._judges(optimizer):
            return None
        named = len(args) < 2
        closure = kwargs.get("closure") if named else args[1]
        if closure is None:  # accelerate passes that
            self._check(optimizer)
        # L-BFGS calls it several times, and may go back from a point that is not finite.
        elif callable(closure) and not isinstance(optimizer, torch.optim.LBFGS):
            looking = self._looking(optimizer, closure)
            if named:
                return args, {**kwargs, "closure": looking}
            return (args[0], looking, *args[2:]), kwargs
        return None

    def _looking(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], object]
    ) -> Callable[[], object]:
        def computed() -> object:
            found = closure()
            self._check(optimizer)
            return found

        return computed

    def _judges(self, optimizer: torch.optim.Optimizer) -> bool:
        hooks = self._hooks
        return not (
            hooks.capture is None
            or hooks.asleep
            or not hooks.hook_probes.on_its_thread
            # Whatever a hook of the user's still does to the gradients comes later.
            or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            # Fused, under a GradScaler: what it finds is skipped.
            or getattr(optimizer, "found_inf", None) is not None
        )

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave if the gradients of this step are not finite. Raises StopTraining."""
        hooks, capture = self._hooks, self._hooks.capture
        if capture is None or not hooks.isolation.run(PROBE, self._leaves, capture, optimizer):
            return
        step = capture.training.next_step
        hooks.isolation.run(PROBE, self._end_of_steps)
        hooks.isolation.run("gradients", capture.held_back, optimizer, EVIDENCE_S)
        reason = f"a gradient is not finite at step {step:,}; its update was not made"
        capture.training.leave_before_update(reason, self._policy)

    def _leaves(self, capture: Capture, optimizer: torch.optim.Optimizer) -> bool:
        rank = exit_points.listening()
        if rank is None or rank.updates_unguarded or is_recording():
            return False
        bad = not all_finite(p.grad for group in optimizer.param_groups for p in group["params"])
        if not bad and rank.origin.world_size < 2:
            return False
        step = capture.training.next_step
        return rank.leaves_before_update(bad, step, alike=self._is_alike(optimizer))

    def _is_alike(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all ranks have the same gradients in front of its steps."""
        if optimizer not in self._alike:
            averaged = {id(p) for module in self._parallel for p in module.parameters()}
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._alike[optimizer] = all(id(p) in averaged for p in parameters)
        return self._alike[optimizer]

    def _end_of_steps(self) -> None:
        """The step in progress is not made: what the hooks have begun for it is put away."""
        hooks = self._hooks
        hooks.fast_path.passed.end()
        hooks.fast_path.reset()
        hooks.stepping.clear()


def all_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether all gradients, of any shape, are finite; None counts as finite.

    One pass, and for each device and type one number that is waited for.
    """
    places: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        flat = None if gradient is None else dense(gradient)
        # Types of one byte have no such sum, and are no gradients.
        if flat is not None and flat.numel() and flat.is_floating_point() and flat.itemsize > 1:
            places.setdefault((flat.device, flat.dtype), []).append(flat)
    with torch.no_grad():
        for flats in places.values():
            largest = torch.stack(list(torch._foreach_norm(flats, math.inf)))
            if not bool(torch.isfinite(largest).all()):
                return False
    return True
