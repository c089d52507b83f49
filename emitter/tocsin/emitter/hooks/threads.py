"""Trainings on other threads of this process, and a training that goes on on another thread.

`asyncio.to_thread`, notebooks and trainers with a window make each step, or each epoch, on another
thread: the training is where its main optimizer steps. An optimizer that only steps on another
thread, in between the steps that are made on the training's, is of something else.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.model.optimizers import PRIMARY_PATIENCE

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers


@dataclass(slots=True)
class _Apart:
    """Steps of an optimizer on other threads than the training's."""

    here: int
    """Steps that the training had made on its own thread before the last of them."""
    steps: int = 0
    alone: int = 0
    """Those since the training's own thread has made one."""


class OtherThreads:
    """Who steps elsewhere, in one training."""

    def __init__(self) -> None:
        self.any = False
        """Whether others train, too, each for itself."""
        self._optimizers: Final[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()
        self._threads: Final[set[int]] = set()
        self._apart: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, _Apart]] = (
            weakref.WeakKeyDictionary()
        )
        self._steps_apart = 0

    def reset(self) -> None:
        """Another training begins."""
        self.any = False
        self._optimizers.clear()
        self._threads.clear()
        self._apart.clear()
        self._steps_apart = 0

    def ignores(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one of another training, about to step; asked only if there are `any`."""
        if optimizer not in self._optimizers:
            return False
        self._threads.add(threading.get_ident())
        return True

    def train_here(self, thread: int) -> bool:
        """Whether another training steps on this thread, and not the one of that `thread`."""
        here = threading.get_ident()
        return here != thread and here in self._threads

    def moved(self) -> None:
        """The training goes on on this thread, which may have the number of one that is over."""
        self._threads.discard(threading.get_ident())

    def step(self, optimizer: torch.optim.Optimizer, optimizers: Optimizers) -> bool | None:
        """This optimizer is about to step, and not on the training's thread.

        Returns:
            True: the training goes on here. False: it may be of the training, which stays where it
            is. None: it is of something else, from now on.
        """
        here = optimizers.steps - self._steps_apart
        apart = self._apart.setdefault(optimizer, _Apart(here))
        belongs = optimizers.steps_of(optimizer) > apart.steps or optimizers.is_of_training(
            optimizer
        )
        if not belongs and here > apart.here:
            self._optimizers.add(optimizer)
            self._threads.add(threading.get_ident())
            self.any = True
            return None
        moves = belongs or apart.alone >= PRIMARY_PATIENCE
        if moves and optimizers.is_primary(optimizer):
            return True
        apart.alone = apart.alone + 1 if here == apart.here else 1
        apart.here = here
        return False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a thread's optimizer has made this step, which was counted."""
        # Also where two threads have made their first steps at once, and `step` was not asked.
        self._apart.setdefault(optimizer, _Apart(0)).steps += 1
        self._steps_apart += 1
