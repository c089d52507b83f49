"""How many steps a framework has planned: read where its trainer calls the first one.

No callback is needed: the trainer's own method is on the stack. Only frames of that one module and
name are looked into, whose few variables live as long as it does: in older Pythons a look keeps
what it finds alive as long as the frame.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

_MODULES: Final = {
    ("transformers.trainer", "train"): "transformers",
    ("lightning.pytorch.trainer.trainer", "fit"): "lightning",
    ("pytorch_lightning.trainer.trainer", "fit"): "lightning",
}
"""Module and method of a trainer, and what its framework is called."""

_DEEPEST: Final = 200


def plan_of_framework(training: Training) -> None:
    """Tell what the framework has planned, if one is training. Called at the first step."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        place = (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        if (name := _MODULES.get(place)) is not None:
            trainer = frame.f_locals.get("self")
            total, done = _transformers(trainer) if name == "transformers" else _lightning(trainer)
            if total is not None or done is not None:
                training.plan(total, done, name)
            return
        frame = frame.f_back


def _transformers(trainer: object) -> tuple[int | None, int | None]:
    state = getattr(trainer, "state", None)
    return _count(getattr(state, "max_steps", None)), _made(getattr(state, "global_step", None))


def _lightning(trainer: object) -> tuple[int | None, int | None]:
    if len(getattr(trainer, "optimizers", ())) != 1:
        return None, None  # it counts the steps of all, we those of one
    limits = [_count(getattr(trainer, "max_steps", None))]
    epochs = _count(getattr(trainer, "max_epochs", None))
    batches = _count(getattr(trainer, "num_training_batches", None))
    together = _count(getattr(trainer, "accumulate_grad_batches", None)) or 1
    if epochs is not None and batches is not None:
        limits.append(epochs * math.ceil(batches / together))
    total = min((limit for limit in limits if limit is not None), default=None)
    return total, _made(getattr(trainer, "global_step", None))


def _count(found: object) -> int | None:
    # Lightning's are -1 or infinite where there is no limit.
    if isinstance(found, float) and math.isfinite(found):
        found = int(found)
    return found if isinstance(found, int) and found > 0 else None


def _made(found: object) -> int | None:
    return found if isinstance(found, int) and found >= 0 else None
