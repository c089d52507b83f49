"""Learning-rate schedules: how often those of an optimizer have been stepped.

They are noted when they are made, which takes nothing from a step. `ReduceLROnPlateau` and what is
no `LRScheduler` of PyTorch is not seen.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Final

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from tocsin.emitter.process.transparent_frames import transparent

if TYPE_CHECKING:
    from tocsin.emitter.process.isolation import Isolation

_schedules: Final[weakref.WeakSet[LRScheduler]] = weakref.WeakSet()
_optimizers: Final[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()


def install(isolation: Isolation) -> None:
    """Put the hook into torch. `isolation` is the one of this process."""
    original = LRScheduler.__init__

    @transparent
    @functools.wraps(original)
    def construct(
        self: LRScheduler, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> None:
        original(self, optimizer, *args, **kwargs)
        isolation.run("schedules", _note, self, optimizer)

    LRScheduler.__init__ = construct


def _note(schedule: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(schedule, SWALR):
        return  # made at the beginning, and stepped at the end of a training
    _schedules.add(schedule)
    _optimizers.add(optimizer)


def steps_of(optimizer: torch.optim.Optimizer) -> int | None:
    """How often the schedules of an optimizer have been stepped, the one that was most often; 0
    too where they are all gone. None: it has had none.
    """
    if optimizer not in _optimizers:
        return None
    # One step is made by the constructor.
    counts = [
        int(getattr(schedule, "_step_count", 1)) - 1
        for schedule in list(_schedules)
        if getattr(schedule, "optimizer", None) is optimizer
    ]
    return max(counts, default=0)
