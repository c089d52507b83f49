"""Gradients of parameters that no optimizer has.

A parameter whose gradient the backward pass has changed, and which is in no optimizer that is
known. That is looked at in steps 2 to 3 and 5 to 6: at the first of two it is remembered which
gradients there are, at the second known which of them have changed, and are not those of a training
before. With several ranks it is not: the other parts of the model may have optimizers elsewhere.
Nor is it where other threads train, too: what has gradients there may be theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.model.gradient_thread import gradient_thread
from tocsin.emitter.model.mesh_names import is_distributed
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.monotonic_clock import unix_us

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

NOT_OPTIMIZED: Final = "not_optimized"
AT: Final = (2, 5)
"""Steps at which they are remembered; they are compared one later."""

MAX_ROWS: Final = 4096


class UntrackedGradients(Probe):
    """The parameters of one training that have gradients and are in no optimizer."""

    name = "untracked gradients"

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first step is being made."""
        self._optimizers = optimizers
        self._before: dict[int, str] = {}
        self.wakes = AT[0] if training.identity.world_size == 1 else NEVER

    def stepped(self, training: Training, step: int) -> None:
        """Remember the gradients that there are, or compare them with those of the step before."""
        with gradient_thread.lock:
            table = None if gradient_thread.several else self._check(step)
        if table is not None:
            training.frame(table.frame(training.origin, step, every=1, at_us=unix_us()))
        following = (each for at in AT for each in (at, at + 1) if each > step)
        self.wakes = next(following, NEVER)

    def _check(self, step: int) -> Table | None:
        if step in AT:
            found, _ = _untracked(self._optimizers)
            self._before = {key: _state_of(parameter) for key, parameter in found.items()}
        return self._changed() if step - 1 in AT else None

    def _changed(self) -> Table | None:
        """Those that have changed since; None: there are none."""
        before, self._before = self._before, {}
        if not before:
            return None
        found, owned = _untracked(self._optimizers)
        changed = {k: p for k, p in found.items() if k in before and _state_of(p) != before[k]}
        return _table(self._optimizers, changed, owned) if changed else None


def _state_of(parameter: torch.Tensor) -> str:
    """What is another one once the gradient has changed."""
    grad = parameter.grad
    if grad is None:
        return ""
    # A new gradient may lie where the one before was. As text NaN is like itself.
    plain = grad.is_cpu and grad.layout is torch.strided and not grad.is_complex()
    values = grad.detach().reshape(-1)[:4].tolist() if plain else []
    return f"{id(grad)} {grad._version} {values}"


def _untracked(optimizers: Optimizers) -> tuple[dict[int, torch.Tensor], set[int]]:
    """The parameters, by id, and the ids of all that belong to a module."""
    known = {id(p) for p in optimizers.parameters()}
    root = optimizers.root
    modules = optimizers.modules()
    if root is not None:
        modules += list(root.modules())
    owned: set[int] = set()
    found: dict[int, torch.Tensor] = {}
    for module in {id(m): m for m in modules}.values():
        for parameter in (module.__dict__.get("_parameters") or {}).values():
            if parameter is None or is_distributed(parameter):
                continue
            owned.add(id(parameter))
            new = id(parameter) not in known and parameter.requires_grad
            if new and parameter.grad is not None:
                found[id(parameter)] = parameter
    return found, owned


def _table(optimizers: Optimizers, found: dict[int, torch.Tensor], owned: set[int]) -> Table:
    """The counts of a row: `numel`; `inside`, whether it belongs to the model that the optimizer
    trains; `last`, whether it is in the last layer of that; `orphans`, how many parameters of the
    optimizer belong to no module that is alive, and have no gradient.
    """
    root = optimizers.root
    modules = optimizers.modules()
    orphans = sum(
        id(p) not in owned and p.grad is None and p.requires_grad for p in optimizers.parameters()
    )
    if root is not None:
        modules = [root, *modules]
    names = discovery.name_parameters(list(found.values()), modules).by_id
    inside = set() if root is None else {id(p) for p in root.parameters()}
    last = _last_layer(root)
    rows: list[str] = []
    counts: list[tuple[int, bool, bool, int]] = []
    for key, parameter in list(found.items())[:MAX_ROWS]:
        rows.append(names.get(key, f"parameter{len(rows)}"))
        counts.append((parameter.numel(), key in inside, key in last, orphans))
    return Table(
        NOT_OPTIMIZED,
        tuple(rows),
        np.zeros((len(rows), 0), np.float32),
        np.array(counts, np.uint64),
        (),
        ("numel", "inside", "last", "orphans"),
    )


def _last_layer(root: nn.Module | None) -> set[int]:
    """The parameters of the last module that has some which are to be trained."""
    holders: Iterable[nn.Module] = () if root is None else root.modules()
    last: set[int] = set()
    for module in holders:
        own = [p for p in (module.__dict__.get("_parameters") or {}).values() if p is not None]
        if any(p.requires_grad for p in own):
            last = {id(p) for p in own}
    return last
