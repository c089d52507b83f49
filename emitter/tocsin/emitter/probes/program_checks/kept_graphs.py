"""Whether the graphs of past steps are still in memory: losses or outputs were kept with them.

A graph goes when nothing refers to its loss any more, which is at the next step's. Behind every
tenth backward call's loss a marker is left in its graph's first nodes; whoever keeps the loss, adds
it to a sum, or keeps the output that it was computed from, keeps the marker. We refer to it weakly.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import torch

from tocsin.emitter.probes.losses import first
from tocsin.emitter.probes.spacing import LATE, Spacing
from tocsin.emitter.statistics.async_copy import is_recording

EVERY: Final = 10
"""Steps between two marks, or up to `MAX_EVERY` where steps are short: one costs some 20 µs."""

MAX_EVERY: Final = 100

MARKS: Final = 20
"""Marks that are remembered."""

CHECK_EVERY: Final = 50
"""Steps between two looks."""

LATE_CHECK_EVERY: Final = 100
"""The same from the step `LATE` on: where others look, too."""

_NODES: Final = 4
_KEY: Final = "tocsin"
_LEAVES: Final = "AccumulateGrad"


class _Mark:
    """Lives as long as one of the nodes that hold it."""

    __slots__ = ("__weakref__",)


class KeptGraphs:
    """The marks of one training."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.next_mark = 0
        self.next_check = CHECK_EVERY
        self._marks: deque[tuple[int, weakref.ref[_Mark]]] = deque(maxlen=MARKS)
        self._reported = False
        self.spacing = Spacing(EVERY, MAX_EVERY)

    def backward(self, tensors: object, step: int) -> None:
        """A backward call of a step that is to be marked is about to begin."""
        if torch.compiler.is_compiling():
            return  # traced with the training: nothing of ours may be in its graph
        self.next_mark = step + self.spacing.checked(step)
        loss = first(tensors)
        if not isinstance(loss, torch.Tensor) or is_recording():
            return
        node, mark = loss.grad_fn, _Mark()
        for _ in range(_NODES):
            if node is None or node.name().endswith(_LEAVES):
                break
            node.metadata[_KEY] = mark
            following = node.next_functions
            node = following[0][0] if following else None
        self._marks.append((step, weakref.ref(mark)))

    def count(self, step: int) -> float | None:
        """How many of the marks are left, but for the newest; None: none, as before."""
        late = LATE_CHECK_EVERY - step % LATE_CHECK_EVERY
        self.next_check = step + (CHECK_EVERY if step < LATE else late)
        kept = sum(mark() is not None for at, mark in self._marks if at <= step - EVERY)
        if not kept and not self._reported:
            return None
        self._reported = kept > 0
        return float(kept)
