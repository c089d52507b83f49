"""The gradient norm before it was clipped, and after, of the calls that make up one step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from tocsin.emitter.probes.losses import Loss, loss_of, on_host
from tocsin.emitter.statistics.async_copy import HostCopy

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import WatchedOptimizer


MAX_CALLS: Final = 256
"""Calls between two steps that are kept."""


class _Call(NamedTuple):
    ids: tuple[int, ...]
    """Of all its parameters."""
    parameters: frozenset[int] | None
    """Of those that had a gradient; None: they are known to be those of the main optimizer."""
    norm: Loss
    limit: float


class Clipped:
    """The norms before one step's gradients were clipped, of the parts that make it up.

    Each norm is a number, or a tensor `[1]` on a GPU.
    """

    def __init__(self, norms: list[Loss], limits: list[float]) -> None:
        self._norms = on_host(norms)
        self._limits = limits

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return not isinstance(self._norms, HostCopy) or self._norms.ready()

    def norms(self) -> tuple[float, float]:
        """The L2 norm before and after, of all parts together; once they are ready.

        After: what `torch.nn.utils.clip_grad_norm_` makes of the one before: it multiplies by
        min(1, limit / (norm + 1e-6)).
        """
        held = self._norms
        found = held.values().tolist() if isinstance(held, HostCopy) else held
        before, after = 0.0, 0.0
        for norm, limit in zip(found, self._limits, strict=True):
            left = norm * min(1.0, limit / (norm + 1e-6))
            # Not `** 2`, which raises where the square is beyond a float's range.
            before += norm * norm
            after += left * left
        return math.sqrt(before), math.sqrt(after)


class ClippedNorms:
    """Norms of gradients before they were clipped, since the last step."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self.any = False
        """Whether something was clipped."""
        self._whole: tuple[int, ...] = ()
        """The parameters of a call that were all those of the main optimizer."""

    def add(self, parameters: object, norm: object, limit: float) -> None:
        """Note the L2 norm of these parameters' gradients before they were clipped to `limit`.

        `parameters` is a tensor or several, of any shape; `norm` a tensor of one element.
        """
        number = loss_of(norm, None)
        if number is None or not isinstance(parameters, Iterable):
            return
        if isinstance(limit, torch.Tensor) and limit.device.type != "cpu":
            return  # it would have to be waited for
        several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids, have = tuple(map(id, several)), None
        if ids != self._whole:
            have = frozenset(id(p) for p in several if p.grad is not None)
            if not have:
                return
        elif not any(p.grad is not None for p in several):
            return
        if len(self._calls) >= MAX_CALLS:
            del self._calls[0]
        self._calls.append(_Call(ids, have, number, float(limit)))
        self.any = True

    def drain(self, watched: WatchedOptimizer) -> Clipped | None:
        """The norms of parts that make up the parameters of that optimizer, the main one; None if a
        part is missing, or was clipped twice. None is left.
        """
        if not self.any:
            return None
        calls, self._calls, self.any = self._calls, [], False
        everyone = [parameter for _, parameter in watched.parameters]
        wanted = {id(p) for p in everyone if p.grad is not None}
        everybody = {id(p) for p in everyone}
        parts = [
            call.parameters or (wanted if everybody == set(call.ids) else frozenset(call.ids))
            for call in calls
        ]
        found = [(call, part) for call, part in zip(calls, parts, strict=True) if wanted & part]
        whole = sum(len(part) for _, part in found) == len(wanted)
        same = set().union(*(part for _, part in found)) == wanted
        if not (whole and same and found):
            return None
        if len(found) == 1:
            ids = found[0][0].ids
            self._whole = ids if set(ids) == everybody else ()
        return Clipped([call.norm for call, _ in found], [call.limit for call, _ in found])

    @property
    def quick(self) -> Clipped | None:
        """What `drain` would return, where that is known without looking at parameters: one call,
        of all that the main optimizer has, whose norm is finite, or on its way from a GPU.
        """
        if len(self._calls) != 1:
            return None
        _, parts, norm, limit = self._calls[0]
        if parts is not None or (isinstance(norm, float) and norm - norm != 0.0):
            return None
        return Clipped([norm], [limit])

    def discard(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leave out what was clipped of these parameters, of any shape."""
        if self._calls:
            gone = {id(p) for p in parameters}
            self._calls = [
                call
                for call in self._calls
                if gone.isdisjoint(call.ids if call.parameters is None else call.parameters)
            ]
            self.any = bool(self._calls)

    def clear(self) -> None:
        """Forget them."""
        self._calls.clear()
        self.any = False

    def reset(self) -> None:
        """Another training begins."""
        self.clear()
        self._whole = ()
