"""Parameters to which no gradient arrives.

A parameter that an optimizer is to train and whose `.grad` is None at its step was not reached by
the backward pass. That is looked at in the first ten steps, at each tenth of the first 200 and each
fiftieth after them, fewer where steps are short, and at each step once one is found: at most `MORE`
such steps in a training, since parameters that often have none, as those of experts, are found
again and again. Whether the module that it belongs to was called is known from
`tocsin.emitter.probes.program_checks.module_calls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tocsin.emitter.model import discovery
from tocsin.emitter.probes.program_checks.module_calls import Calls
from tocsin.emitter.probes.spacing import Spacing
from tocsin.emitter.statistics.tables import Table

NO_GRADIENT: Final = "no_gradient"

FIRST: Final = 10
"""Steps that are all looked at."""

APART: Final = 10
"""Steps between two looks after them, and after `EARLY` steps `LATER_APART` or more."""

EARLY: Final = 200
LATER_APART: Final = 50

MORE: Final = 50
"""Looks of a training beside those, since a parameter was found to have no gradient."""

ENOUGH: Final = 5
"""Looks in a row without a gradient after which it is reported."""

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
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self._absent: dict[str, _Absent] = {}
        self._longest: dict[str, int] = {}
        self._began_with: set[str] = set()
        self._first = True
        self._reported: frozenset[str] | None = None
        self._checks = 0
        self._more = MORE
        self.spacing = Spacing(LATER_APART)
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

    def inspect(
        self, step: int, parameters: Sequence[tuple[str, torch.Tensor]], calls: Calls | None
    ) -> None:
        """Look at the parameters, of any shape, of an optimizer that has just made a step."""
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
                absent = self._absent[name] = _Absent(discovery.numel(parameter), place)
                if self._first:
                    self._began_with.add(name)
            absent.steps += 1
            owner = None if calls is None else calls.owner(parameter)
            if calls is not None and owner is not None:
                seen, apart = calls.seen_of(owner), owner not in reached
                absent.watched += 1
                absent.called += apart and seen.trained > 0
                absent.silent += apart and seen.silent > 0 and not seen.trained
        self.trainable += trainable

    def checked(self, step: int) -> None:
        """All optimizers of that step were checked."""
        self._first = False
        self._checks += 1
        young = any(a.steps <= ENOUGH for a in self._absent.values())
        apart = APART if step < EARLY else self.spacing.checked(step)
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
        if self._checks < ENOUGH or (names == self._reported and self._checks % FIRST):
            return None
        if not names and not self._reported and self._reported is not None:
            return None
        self._reported = names
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


def _no_values(rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.zeros((rows, 0), np.float32)
