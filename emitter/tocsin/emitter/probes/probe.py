"""What every probe has in common, and who is asked about each training.

A probe looks at one thing of a training and sends what it finds. What is sent of each training, and
needs no hook in torch of its own, is a subclass in a module of its own, and a line in `PROBES`
(`tocsin.emitter.capture.surroundings`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

NEVER: Final = sys.maxsize
"""A step that does not come."""


class Probe:
    """Something that is watched of one training. A method does nothing unless it is overridden.

    All are called on the thread that trains, and isolated (`process.isolation`): what one raises
    switches this probe off under its `name`, is reported, and reaches neither the loop nor another
    probe. None may change a tensor, keep a graph alive, or wait for a GPU.
    """

    name: ClassVar[str]
    """Under which it is switched off: `capture of NAME was switched off`."""

    patient: ClassVar[bool] = False
    """Whether it can wait, some steps of a millisecond, for one that is looked at anyway."""

    wakes: int = NEVER
    """The step behind which `stepped` has something to do, or any one before it.

    It is compared at each step that is looked at, and all that a probe costs there until it is
    due; the probe sets it itself."""

    def begin(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""

    def stepped(self, training: Training, step: int) -> None:
        """A step of the training is over, and is `wakes` or a later one. Gradients are still there,
        unless the loop's own hooks have cleared them.
        """

    def close(self, training: Training) -> None:
        """The training is over: send what is left."""

    def reset(self) -> None:
        """Back to what it was before `begin`: another training may begin."""
