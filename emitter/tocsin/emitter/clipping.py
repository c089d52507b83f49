"""The gradient norm before it was clipped, as `torch.nn.utils.clip_grad_norm_` computes it anyway.

At the optimizer step the gradients are those that are left: clipped to 1 on each step, they would
never be seen to explode. Frameworks (Lightning, Accelerate and the Trainer on top of it) clip with
that function, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tocsin.emitter.losses import Loss, loss_of

if TYPE_CHECKING:
    from tocsin.emitter.torch_hooks import Hooks

MAX_CALLS: Final = 256
"""Calls between two steps that are kept."""


class _Call(NamedTuple):
    parameters: frozenset[int]
    norm: Loss


class ClippedNorms:
    """Norms of gradients before they were clipped, since the last step."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, parameters: object, norm: object) -> None:
        """These parameters' gradients had that L2 norm together."""
        number = loss_of(norm, None)
        if number is None or not isinstance(parameters, Iterable):
            return
        several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        ids = frozenset(id(p) for p in several if p.grad is not None)
        if ids:
            self._calls = [*self._calls[1 - MAX_CALLS :], _Call(ids, number)]

    def take(self, parameters: Iterable[torch.Tensor]) -> list[Loss]:
        """The norms of parts that make up these parameters; empty if a part is missing, or was
        clipped twice. None is left.
        """
        calls, self._calls = self._calls, []
        wanted = {id(p) for p in parameters if p.grad is not None}
        found = [call for call in calls if not wanted.isdisjoint(call.parameters)]
        whole = sum(len(call.parameters) for call in found) == len(wanted)
        same = set().union(*(call.parameters for call in found)) == wanted
        return [call.norm for call in found] if whole and same else []

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
        hooks.wall.call("clipping", hooks.clipped.add, parameters, norm)
        return norm

    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
