"""Whether most micro-batches of each step are computed for nothing: `zero_grad()` in the loop.

With gradient accumulation a `zero_grad()` in front of each backward call leaves only the gradients
of the last micro-batch for the step. That gradients are gone before a step has used them is known
anyway (`tocsin.emitter.model.cleared_gradients`); many programs do that on purpose. It counts here
only if, in each of many consecutive steps,

- one data loader gave a batch for each backward call: not where several are made of one batch (an
  attack on the inputs, per-sample gradients, tasks with losses of their own, SAM);
- no weight was changed in between: not where a step is tried, or made by hand (SAM, meta-learning);
- the step used the gradients that the last backward call had left, not others that the program had
  put together from copies (DP-SGD, PCGrad, a gradient memory);
- it was the same number of them: not where a loop skips what it does not like.

The first step of a data loader's pass is left out.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch

from tocsin.emitter.model.tensor_refs import TensorRef, ref_to

ENOUGH: Final = 20
"""Steps in a row after which it is reported."""


class DiscardedGradients:
    """The gradients of one training that no step has used.

    `iterator` is that of the data loader that gave the newest batch, `weight` a parameter, of any
    shape, that the backward calls reach.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.streak = 0
        """Steps in a row of which the same number of micro-batches was for nothing."""
        self.each = 0
        """That number."""
        self._step = self._last = -1
        self._count = 0
        self._alike = True
        self._iterator: weakref.ref[object] | None = None
        self._batches = 0
        self._weight: TensorRef | None = None
        self._version = -1
        self._reported = 0

    def discarded(self, step: int, weight: torch.Tensor) -> None:
        """In front of a backward call of that step: the gradients of those before it are gone."""
        if step != self._step:
            self._step, self._count, self._alike = step, 0, True
        self._count += 1
        known = None if self._weight is None else self._weight.get()
        if known is None or known is not weight or weight._version != self._version:
            self._alike = False

    def stepped(self, step: int, weight: torch.Tensor, iterator: object, *, kept: bool) -> None:
        """That step was made behind such calls; `kept`: with the gradients of the last one."""
        before = None if self._iterator is None else self._iterator()
        batches = _batches(iterator)
        if before is iterator and batches > self._batches:
            each = self._count if step == self._step else 0
            found = kept and self._alike and batches - self._batches == each + 1
            row = step == self._last + 1 and each == self.each
            self.streak = (self.streak if row else 0) + 1 if found else 0
            self.each = each
        self._last, self._batches = step, batches
        self._iterator = weakref.ref(iterator)
        self._weight, self._version = ref_to(weight), weight._version

    def news(self, step: int) -> tuple[float, float] | None:
        """How many micro-batches of each step are for nothing, and in how many steps in a row; if
        that is to be reported: once it is certain, after twice as many steps each time, and zeros
        when it is over.
        """
        if self._reported and (not self.streak or step > self._last + ENOUGH):
            self._reported = self.streak = 0
            return 0.0, 0.0
        if self.streak >= ENOUGH and self.streak >= 2 * self._reported:
            self._reported = self.streak
            return float(self.each), float(self.streak)
        return None


def _batches(iterator: object) -> int:
    """How many batches PyTorch's iterator has given so far; 0: it is another's."""
    count = getattr(iterator, "_num_yielded", 0)
    return count if isinstance(count, int) else 0
