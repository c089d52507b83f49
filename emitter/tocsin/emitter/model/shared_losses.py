"""Which optimizers share a loss: those that step after the same backward call.

Muon for the matrices and AdamW for the rest are two optimizers of one loss; a GAN's are two with a
loss each, which work against each other. Two that have once stepped after the same backward call
belong together from then on, also where one of them makes fewer steps.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

MAX_REPORTS: Final = 16
"""How often it is reported what has changed: a loop may make an optimizer for each step."""


class BackwardSharing:
    """The optimizers of one training, by the loss that they step after."""

    def __init__(self) -> None:
        self._loss_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._newest: int | None = None
        self._count = 0
        self._reported = 0
        self._left = MAX_REPORTS

    def stepped(self, optimizer: torch.optim.Optimizer, *, backward: bool) -> None:
        """This optimizer has stepped; `backward`: it is the first to do so after a backward
        call."""
        own = self._loss_of.get(optimizer)
        if own is None:
            own = self._loss_of[optimizer] = self._count
            self._count += 1
        if backward or self._newest is None:
            self._newest = own
        elif own != self._newest:
            for one, loss in list(self._loss_of.items()):
                if loss == own:
                    self._loss_of[one] = self._newest

    def news(self) -> tuple[int, int] | None:
        """How many optimizers have stepped, and how many losses they have; None: as reported, or
        there is one only."""
        losses = len(set(self._loss_of.values()))
        if len(self._loss_of) < 2 or losses == self._reported or not self._left:
            return None
        self._reported = losses
        self._left -= 1
        return len(self._loss_of), losses
