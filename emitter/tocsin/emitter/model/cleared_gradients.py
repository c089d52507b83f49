"""Whether a loop has thrown gradients away: computed by a backward call, and gone before a step.

A loop that skips a bad batch clears the gradients instead of making a step; then the loss of that
batch is not part of the next step. Whether something is left is looked at in one parameter, the
witness, when a backward call follows another without a step between; in all of them where it looks
cleared there. A plain loop pays for a look at an attribute behind each backward call.

On a GPU a gradient that is there counts as left: whether it is zero would have to be waited for.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Final

import torch

from tocsin.emitter.model.gradient_thread import leaves
from tocsin.emitter.model.tensor_refs import TensorRef, ref_to

_VALUES: Final = 16
_WHOLE: Final = 4096
"""Numbers up to which all of a gradient is looked at."""

_FRUITLESS: Final = 3
_PAUSE: Final = 100
"""Backward calls without a look for a witness, after `_FRUITLESS` that have left no gradient."""

_MAX_NODES: Final = 2000


class Cleared:
    """Follows the gradients from one backward call to the next."""

    def __init__(self) -> None:
        self._witness: TensorRef | None = None
        self.had = False
        """Whether a backward call since the last step has left a gradient."""
        self._several = False
        """Whether a backward call has followed another without a step between."""
        self._left: weakref.ref[torch.Tensor] | None = None
        """The gradient that the last one has left in the witness."""
        self._plain = False
        """Whether that can be read at once."""
        self._fruitless = 0
        self._pause = 0

    def reset(self) -> None:
        """Another training begins."""
        self._witness = self._left = None
        self.had = self._several = False
        self._fruitless = self._pause = 0

    def drop_left(self) -> None:
        """A tensor, which may be that gradient, must have no weak reference now."""
        self._left = None

    @property
    def witness(self) -> torch.Tensor | None:
        """The parameter, of any shape, in which a gradient is looked for first; None: there is
        none.
        """
        return None if self._witness is None else self._witness.get()

    def begun_from(self, loss: object, *, anew: bool = False) -> None:
        """A backward call begins: take a parameter of its graph, if there is none or `anew`."""
        if isinstance(loss, torch.Tensor) and (anew or self.witness is None):
            found = next(leaves(loss, max_nodes=_MAX_NODES), None)
            self._witness = None if found is None else ref_to(found)

    def is_left(self) -> bool:
        """Whether a gradient is in the witness, behind a backward call; False: it is not known."""
        witness = self.witness
        grad = None if witness is None else witness.grad
        if grad is None:
            return False
        self.had = True
        if self._several and (self._left is None or self._left() is not grad):
            self._left = weakref.ref(grad)
            self._plain = _is_plain(grad) and not grad.requires_grad
        return True

    @property
    def keeps_left(self) -> bool:
        """Whether the witness still has the gradient that the last of several backward calls has
        left, and not another one that was put in its place.
        """
        witness, left = self.witness, None if self._left is None else self._left()
        return witness is not None and left is not None and witness.grad is left

    def backward_ended(self, parameters: Iterable[torch.Tensor]) -> None:
        """A backward call is over; `parameters`, of any shape, are those of all optimizers, read
        when needed.
        """
        if self.is_left():
            return
        if self._pause:
            self._pause -= 1
            return
        for parameter in parameters:
            if parameter.grad is not None:
                self._witness, self.had, self._fruitless = ref_to(parameter), True, 0
                return
        self._fruitless += 1
        if self._fruitless >= _FRUITLESS:
            self._pause = _PAUSE

    def is_gone(self, parameters: Iterable[torch.Tensor] | None) -> bool:
        """Whether no gradient is left of those that there were; asked in front of a backward call.

        The next one begins anew. `parameters`, of any shape, are those of all optimizers; None: the
        witness has to do.
        """
        had, self.had, self._several = self.had, False, True
        if not had or (parameters is None and self.witness is None):
            return False
        witness = self.witness
        own = None if witness is None else witness.grad
        left = None if self._left is None else self._left()
        if own is left and own is not None and self._plain and own.numpy().flat[0] != 0.0:
            return False  # as nearly always
        first = () if witness is None else (witness,)
        for parameter in itertools.chain(first, parameters or ()):
            grad = parameter.grad
            if grad is not None and _is_left(grad):
                return False
        return True


def _is_plain(grad: torch.Tensor) -> bool:
    """Whether its first number can be read for a tenth of the time that torch takes."""
    return (
        type(grad) is torch.Tensor
        and grad.is_cpu
        and grad.layout is torch.strided
        and grad.dtype is torch.float32
        and grad.numel() > 0
        and not grad.is_neg()
    )


def _is_left(grad: torch.Tensor) -> bool:
    """Whether there is a number that is not zero, as far as that is known without waiting."""
    if type(grad) is not torch.Tensor or not grad.is_cpu or grad.layout is not torch.strided:
        return True
    grad = grad.detach()
    if _is_plain(grad) and grad.numpy().flat[0] != 0.0:
        return True  # as nearly always
    if grad.numel() > _WHOLE:
        grad = grad.reshape(-1)[:_VALUES] if grad.is_contiguous() else grad[:1]
    return bool(grad.any())
