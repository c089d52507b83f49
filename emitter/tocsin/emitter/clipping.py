"""The gradient norm before it was clipped, as `torch.nn.utils.clip_grad_norm_` computes it anyway.

At the optimizer step the gradients are those that are left: clipped to 1 on each step, they would
never be seen to explode. Frameworks (Lightning, Accelerate and the Trainer on top of it) clip with
that function, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tocsin.emitter.host_copy import HostCopy
from tocsin.emitter.losses import Loss, loss_of, on_host
from tocsin.emitter.shards import is_distributed

if TYPE_CHECKING:
    from tocsin.emitter.hook_state import Hooks

MAX_CALLS: Final = 256
"""Calls between two steps that are kept."""


class _Call(NamedTuple):
    parameters: frozenset[int]
    norm: Loss
    limit: float


class Clipped:
    """The norms before one step's gradients were clipped, of the parts that make it up."""

    def __init__(self, norms: list[Loss], limits: list[float]) -> None:
        self._norms = on_host(norms)
        self._limits = limits

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return not isinstance(self._norms, HostCopy) or self._norms.ready()

    def norms(self) -> tuple[float, float]:
        """The L2 norm before and after, of all parts together; once they are ready.

        After: what `clip_grad_norm_` makes of the one before, as its documentation says.
        """
        found = self._norms.values() if isinstance(self._norms, HostCopy) else self._norms
        before, after = 0.0, 0.0
        for norm, limit in zip(found, self._limits, strict=True):
            before += float(norm) ** 2
            after += (float(norm) * min(1.0, limit / (float(norm) + 1e-6))) ** 2
        return math.sqrt(before), math.sqrt(after)


class ClippedNorms:
    """Norms of gradients before they were clipped, since the last step."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, parameters: object, norm: object, limit: float) -> None:
        """These parameters' gradients had that L2 norm together, and were clipped to `limit`."""
        if isinstance(norm, torch.Tensor) and is_distributed(norm):
            if not all(placement.is_replicate() for placement in norm.placements):
                return  # it would have to be asked of the other ranks
            norm = norm.to_local()
        number = loss_of(norm, None)
        if number is None or not isinstance(parameters, Iterable):
            return
        if isinstance(limit, torch.Tensor) and limit.device.type != "cpu":
            return  # it would have to be waited for
        several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        ids = frozenset(id(p) for p in several if p.grad is not None)
        if ids:
            self._calls = [*self._calls[1 - MAX_CALLS :], _Call(ids, number, float(limit))]

    @property
    def any(self) -> bool:
        """Whether something was clipped."""
        return bool(self._calls)

    def take(self, parameters: Iterable[torch.Tensor]) -> Clipped | None:
        """The norms of parts that make up these parameters; None if a part is missing, or was
        clipped twice. None is left.
        """
        calls, self._calls = self._calls, []
        if not calls:
            return None
        wanted = {id(p) for p in parameters if p.grad is not None}
        found = [call for call in calls if not wanted.isdisjoint(call.parameters)]
        whole = sum(len(call.parameters) for call in found) == len(wanted)
        same = set().union(*(call.parameters for call in found)) == wanted
        if not (whole and same and found):
            return None
        return Clipped([call.norm for call in found], [call.limit for call in found])

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leave out what was clipped of these."""
        gone = {id(p) for p in parameters}
        self._calls = [call for call in self._calls if gone.isdisjoint(call.parameters)]

    def clear(self) -> None:
        """Forget them."""
        self._calls.clear()


def install(hooks: Hooks) -> None:
    """Put the hook into torch."""
    module = torch.nn.utils.clip_grad
    original = module.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: object, max_norm: float, norm_type: float = 2.0, *args: object, **kwargs: object
    ) -> object:
        if hooks.asleep or norm_type != 2 or torch.compiler.is_compiling():
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        if isinstance(parameters, Iterator):
            listed = list(parameters)
            # An empty one is warned of, and stays what it is.
            parameters = listed or parameters
        norm = original(parameters, max_norm, norm_type, *args, **kwargs)
        hooks.wall.call("clipping", hooks.clipped.add, parameters, norm, max_norm)
        return norm

    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
