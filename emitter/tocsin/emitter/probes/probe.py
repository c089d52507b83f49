"""What every probe has in common.

A probe looks at one thing of a training and sends what it finds. One that needs no hook in torch of
its own is a subclass in a module of its own, and a line in `PROBES`
(`tocsin.emitter.capture.probe_list`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    import torch

    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.plan.schedule import Due
    from tocsin.emitter.statistics.tables import Pending
    from tocsin.emitter.training.training import Training
    from tocsin.schemas.records.collections import Kind

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

    of: ClassVar[Kind | None] = None
    """What the collections that it reads consist of: `prepare`, `updating` and `read` are called
    for each step at which one of these collections is due."""

    patient: ClassVar[bool] = False
    """Whether it can wait, some steps of a millisecond, for one that is looked at anyway."""

    on: bool = True
    """Whether it has anything to do in this training. `start` sets it; if it is False, only `close`
    and `reset` are called after that."""

    wakes: int = NEVER
    """The step behind which `stepped` has something to do, or any one before it.

    It is compared at each step that is looked at, and all that a probe costs there until it is
    due; the probe sets it itself."""

    reads: int = NEVER
    """The first step that `prepare` and `read` are called for, whatever is due.

    Steps before it may take the fast path (`hooks.fast_path`). The probe sets it itself."""

    skipped: int = 0
    """Tensors that it could not read so far."""

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""

    # -- between two steps -----------------------------------------------------------------------

    def batch(self, batch: object, step: int) -> None:
        """A data loader returned a batch, which that step will use."""

    def evaluation_batch(self, batch: object) -> None:
        """A data loader returned a batch while the model is in `eval()`."""

    def last_batch(self) -> None:
        """A data loader, of training or of an evaluation, has no more batches."""

    def evaluation_loss(self, function: str, loss: torch.Tensor, *, here: bool) -> None:
        """This function computed a loss, a tensor of one element on any device, while the model is
        in `eval()`. `here`: on the thread that trains; this method alone is called on other threads
        too.
        """

    # -- a step ----------------------------------------------------------------------------------

    def prepare(self, step: int, due: Due) -> None:
        """The step before this one is over: get ready for the forward pass of this one."""

    def updating(self, watched: WatchedOptimizer, due: Due) -> None:
        """The optimizer whose steps count is about to change its weights."""

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> tuple[str, Pending] | None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost.
        """
        return None

    def dropped(self) -> None:
        """The step in progress is not made: its gradients were thrown away."""

    def stepped(self, training: Training, step: int) -> None:
        """A step of the training is over, and is `wakes` or a later one. Gradients are still there,
        unless the loop's own hooks have cleared them.
        """

    # -- the end ---------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Send what has arrived from a GPU, of evaluations. Whether something is still to come."""
        return False

    def close(self, training: Training) -> None:
        """The training is over: send what is left."""

    def reset(self) -> None:
        """Back to what it was before `start`: another training may begin."""
