"""Parameters to which no gradient arrives, and gradients of parameters that no optimizer has.

A parameter that an optimizer is to train and whose `.grad` is None at its step was not reached by
the backward pass. That is looked at in the first ten steps, at each tenth of the first 200 and each
fiftieth after them, and at each step once one is found: at most `MORE` such steps in a training,
since parameters that often have none, as those of experts, are found again and again. Whether the
module that it belongs to was called is known from
`tocsin.emitter.probes.program_checks.module_calls`.

The other way round: a parameter whose gradient the backward pass has changed, and which is in no
optimizer that is known. That is looked at in steps 2 to 3 and 5 to 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

from tocsin.emitter.model import discovery
from tocsin.emitter.model.mesh_names import is_distributed
from tocsin.emitter.probes.program_checks.module_calls import Calls
from tocsin.emitter.statistics.tables import Table

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers

NO_GRADIENT: Final = "no_gradient"
NOT_OPTIMIZED: Final = "not_optimized"

FIRST: Final = 10
"""Steps that are all looked at."""

APART: Final = 10
"""Steps between two looks after them, and after `EARLY` steps `LATER_APART`."""

EARLY: Final = 200
LATER_APART: Final = 50

MORE: Final = 50
"""Looks of a training beside those, since a parameter was found to have no gradient."""

ENOUGH: Final = 5
"""Looks in a row without a gradient after which it is said."""

UNTRACKED_AT: Final = (2, 5)
"""Steps at which gradients without an optimizer are looked for; one later it is known which of them
change, and are not those of a training before.
"""

COLUMNS: Final = (
    *("numel", "steps", "called", "silent_calls", "watched", "longest", "had", "place"),
    "trainable",
)
MAX_ROWS: Final = 4096


@dataclass(slots=True)
class _Absent:
    """One parameter without a gradient: looks in a row, and what was seen of its module in them."""

    numel: int
    place: int
    steps: int = 0
    called: int = 0
    silent: int = 0
    watched: int = 0


class MissingGradients:
    """The parameters of one training that have none."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another training begins."""
        self._absent: dict[str, _Absent] = {}
        self._longest: dict[str, int] = {}
        self._began_with: set[str] = set()
        self._first = True
        self._told: frozenset[str] | None = None
        self._looks = 0
        self._more = MORE
        self.trainable = 0
        self.next = 0
        """The step that is looked at next."""

    @property
    def suspects(self) -> frozenset[str]:
        """Names of those that have had none lately, of whose modules more is to be known."""
        return frozenset(n for n, a in self._absent.items() if a.steps <= 2 * ENOUGH)

    @property
    def missing(self) -> int:
        """How many have had none for long enough."""
        return sum(absent.steps >= ENOUGH for absent in self._absent.values())

    def look(
        self, step: int, parameters: Sequence[tuple[str, torch.Tensor]], calls: Calls | None
    ) -> None:
        """Look at the parameters of an optimizer that has just made a step."""
        trainable = 0
        # A module of which another parameter has a gradient is not cut off.
        reached = set()
        if calls is not None and any(p.grad is None for _, p in parameters):
            reached = {calls.owner(p) for _, p in parameters if p.grad is not None}
        for place, (name, parameter) in enumerate(parameters):
            if parameter.grad is not None or not parameter.requires_grad:
                trainable += parameter.requires_grad
                gone = self._absent.pop(name, None)
                if gone is not None and parameter.requires_grad:
                    self._longest[name] = max(self._longest.get(name, 0), gone.steps)
                continue
            trainable += 1
            absent = self._absent.get(name)
            if absent is None:
                absent = self._absent[name] = _Absent(parameter.numel(), place)
                if self._first:
                    self._began_with.add(name)
            absent.steps += 1
            owner = None if calls is None else calls.owner(parameter)
            if calls is not None and owner is not None:
                seen, apart = calls.of(owner), owner not in reached
                absent.watched += 1
                absent.called += apart and seen.trained > 0
                absent.silent += apart and seen.silent > 0 and not seen.trained
        self.trainable += trainable

    def looked(self, step: int) -> None:
        """All optimizers of that step were looked at."""
        self._first = False
        self._looks += 1
        young = any(a.steps <= ENOUGH for a in self._absent.values())
        apart = APART if step < EARLY else LATER_APART
        if step + 1 < FIRST:
            apart = 1
        elif young and self._more:
            self._more -= 1
            apart = 1
        self.next = step + apart

    def news(self) -> Table | None:
        """The parameters that have had no gradient for long, if they have changed.

        The table has no names when it is first known that there are none, or none any more.
        """
        found = {n: a for n, a in self._absent.items() if a.steps >= ENOUGH}
        names = frozenset(found)
        if self._looks < ENOUGH or (names == self._told and self._looks % FIRST):
            return None
        if not names and not self._told and self._told is not None:
            return None
        self._told = names
        rows = tuple(found)[:MAX_ROWS]
        counts = np.array(
            [
                (
                    a.numel,
                    a.steps,
                    a.called,
                    a.silent,
                    a.watched,
                    self._longest.get(name, 0),
                    name not in self._began_with,
                    a.place,
                    self.trainable,
                )
                for name, a in list(found.items())[:MAX_ROWS]
            ],
            np.uint64,
        ).reshape(len(rows), len(COLUMNS))
        return Table(NO_GRADIENT, rows, _no_values(len(rows)), counts, (), COLUMNS)


class UntrackedGradients:
    """Parameters that have gradients and are in no optimizer."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another training begins."""
        self._before: dict[int, str] = {}

    def look(self, optimizers: Optimizers) -> None:
        """Remember which gradients there are now."""
        found, _ = _untracked(optimizers)
        self._before = {key: _state_of(parameter) for key, parameter in found.items()}

    def again(self, optimizers: Optimizers) -> Table | None:
        """The gradients that have changed since the last call; None without any."""
        before, self._before = self._before, {}
        if not before:
            return None
        found, owned = _untracked(optimizers)
        changed = {k: p for k, p in found.items() if k in before and _state_of(p) != before[k]}
        return _table(optimizers, changed, owned) if changed else None


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
        _no_values(len(rows)),
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


def _no_values(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.zeros((rows, 0), np.float32)
