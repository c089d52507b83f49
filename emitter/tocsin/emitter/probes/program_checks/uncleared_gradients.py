"""Whether gradients are cleared between two optimizer steps: `zero_grad()` was called, or not.

A gradient that was not cleared is there already when the first backward call after a step begins,
and stays so until the next step. That is looked at in one small parameter, whose gradient is not
zero: where it is cleared to None, which is usual, this costs a look at an attribute. It counts as
cleared if it was None or zero at the beginning of any backward call since the last step: another
optimizer's backward may come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import torch

from tocsin.emitter.model.tensor_refs import TensorRef, ref_to
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.readable import readable

ENOUGH: Final = 2
"""Steps in a row after which it is reported."""

_VALUES: Final = 16
_MAX_COPIES: Final = 64
_LARGEST: Final = 1 << 20


class UnclearedGradients:
    """Looks at the gradients of one training before they are added to."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.streak = 0
        self._parameter: TensorRef | None = None
        self._window = -1
        self._open = self._left = False
        self._copies: list[HostCopy] = []
        self._waiting: deque[list[HostCopy]] = deque(maxlen=_MAX_COPIES)
        self._reported: int | None = None
        self.due = True
        """Whether a gradient on a GPU is looked at, too."""

    def choose(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find a parameter, of any shape, to look at, if there is none: the smallest that has a
        gradient.
        """
        if self._parameter is not None and self._parameter.get() is not None:
            return
        self._parameter = None
        found: torch.Tensor | None = None
        for _, parameter in parameters:
            grad = readable(parameter.grad)
            if grad is None or not 0 < grad.numel() <= _LARGEST:
                continue
            if found is not None and found.numel() <= parameter.numel():
                continue
            if not grad.is_cpu or _some(grad):
                found = parameter
        if found is not None:
            self._parameter = ref_to(found)

    def is_usual(self, step: int) -> bool:
        """Whether a backward call of that step, which is about to begin, finds the gradients
        cleared to None, or cleared in front of an earlier one: then all is done.
        """
        if self._parameter is None or (step == self._window and self._open and not self._left):
            return True
        if self._left or self.streak or self._waiting:
            return False
        parameter = self._parameter.get()
        if parameter is not None and parameter.grad is not None:
            return False
        if parameter is not None:
            # There is nothing to close but the step.
            self._window, self._open = step, True
        return True

    def backward(self, step: int) -> None:
        """The same, where it may not be usual."""
        parameter = None if self._parameter is None else self._parameter.get()
        if parameter is None:
            return
        if step != self._window:
            self.over()
            self._window, self._open, self._left = step, True, True
        elif not self._left:
            return
        grad = readable(parameter.grad)
        if grad is None:
            self._left = False
        elif grad.is_cpu:
            self._left = _some(grad)
        elif not self.due or len(self._copies) >= _MAX_COPIES or is_recording():
            # Not to be known without waiting: this step does not count.
            self._open = False
        else:
            with torch.no_grad():
                self._copies.append(HostCopy(grad.reshape(-1)[:_VALUES].float()))

    def over(self) -> None:
        """The step of the window that is open is over."""
        if not self._open:
            self._copies = []
            return
        self._open = False
        if not self._left:
            self.streak, self._copies = 0, []
            self._waiting.clear()
        elif self._copies:
            self._waiting.append(self._copies)
            self._copies = []
        else:
            self.streak += 1
        while self._waiting and all([copy.ready() for copy in self._waiting[0]]):
            copies = self._waiting.popleft()
            left = all(bool(copy.values().any()) for copy in copies)
            self.streak = self.streak + 1 if left else 0

    def news(self) -> float | None:
        """For how many steps in a row gradients were not cleared, if that is to be reported: first
        that they are, or once it is certain, and after twice as many steps each time.
        """
        reported, streak = self._reported, self.streak
        if reported is None:
            if streak == 0 and self._window >= 0:
                self._reported = 0
                return 0.0
            reported = 0
        if (streak >= ENOUGH and streak >= 2 * reported) or (reported and streak == 0):
            self._reported = streak
            return float(streak)
        return None


def _some(grad: torch.Tensor) -> bool:
    """Whether there is a number that is not zero among the first ones."""
    if grad.dtype is torch.float32 and not grad.is_neg():
        return bool(grad.numpy().ravel("K")[:_VALUES].any())  # a tenth of the time of the other way
    return bool(grad.reshape(-1)[:_VALUES].any())
