"""What activations and inputs show of a bad step: where in the forward pass it started.

They never cause an issue: masks and log-probabilities are infinite by nature, and a NaN may be
masked out of the loss. They show the origin of a bad loss. The rows of the bad step show it, or,
for NaN only, the newest earlier rows. Values that were bad in a summary and were followed by
another summary, without an issue in between, are usual for this model and are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from tocsin.schemas.records.frames import TensorFrame

ACTIVATIONS: Final = "activations"
WEIGHTS: Final = "weights"
INPUTS: Final = ("inputs", "input_channels")
_NAMES: Final = 64


@dataclass(slots=True)
class BadRow:
    """A row that is not finite; `order` is its place in the forward pass."""

    collection: str
    name: str
    order: int
    nans: int
    infs: int
    state: int = 0
    """Of a weight: numbers of its optimizer's state that are not finite."""


@dataclass(slots=True)
class Sight:
    """The newest summaries of one kind, and what was bad."""

    step: int = -1
    bad: list[BadRow] = field(default_factory=list)
    usual: list[str] = field(default_factory=list)

    def add(self, frame: TensorFrame) -> None:
        """A frame; of activations a step has several."""
        if frame.step < self.step:
            return
        if frame.step > self.step:
            fresh = (row.name for row in self.bad if row.name not in self.usual)
            self.usual = [*self.usual, *fresh][:_NAMES]
            self.step, self.bad = frame.step, []
        nans, infs, order = frame.count("nans"), frame.count("infs"), frame.count("order")
        if nans is None:
            nans = frame.count("nonfinite")
        if nans is None:
            return
        state = frame.count("state_nonfinite")
        total = nans if infs is None else nans + infs
        for i in np.flatnonzero(total)[: _NAMES - len(self.bad)].tolist():
            self.bad.append(
                BadRow(
                    frame.collection,
                    frame.rows[i],
                    i if order is None else int(order[i]),
                    int(nans[i]),
                    0 if infs is None else int(infs[i]),
                    0 if state is None else int(state[i]),
                )
            )

    def first(self, step: int) -> BadRow | None:
        """The first bad row in forward order that may explain a bad step."""
        if self.step > step:
            return None
        here = self.step == step
        rows = [row for row in self.bad if row.name not in self.usual and (row.nans or here)]
        return min(rows, key=lambda row: row.order, default=None)


@dataclass(slots=True)
class Origin:
    """Where a bad loss has it from."""

    branch: Literal["input", "weight", "activation"]
    row: BadRow
    step: int
    is_first: bool
    """Whether nothing before it was looked at."""


@dataclass(slots=True)
class Forward:
    """What the forward pass of one rank has shown."""

    inputs: Sight = field(default_factory=Sight)
    weights: Sight = field(default_factory=Sight)
    activations: Sight = field(default_factory=Sight)

    def add(self, frame: TensorFrame) -> None:
        """A frame for which `is_forward` holds."""
        kinds = {ACTIVATIONS: self.activations, WEIGHTS: self.weights}
        kinds.get(frame.collection, self.inputs).add(frame)

    def origin(self, step: int) -> Origin | None:
        """Where the loss of this step has it from; None: that is not known."""
        row = self.inputs.first(step)
        # Of infinities among inputs nothing follows: a mask may be made of them. Nor of a batch
        # before, whose loss was well.
        if row is not None and row.nans and self.inputs.step == step:
            return Origin("input", row, self.inputs.step, is_first=True)
        row = self.weights.first(step)
        if row is not None and self.weights.step == step:
            return Origin("weight", row, step, is_first=True)
        row = self.activations.first(step)
        if row is None:
            return None
        return Origin("activation", row, self.activations.step, is_first=row.order == 0)


def is_forward(frame: TensorFrame) -> bool:
    """Whether a summary is of the way to the loss; of weights, those that a pass has met."""
    name = frame.collection
    met = name == WEIGHTS and "order" in frame.count_columns
    return met or name == ACTIVATIONS or name in INPUTS
