"""What all hooks know of the loop that trains, from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.capture.surroundings import Around
from tocsin.emitter.hooks.threads import OtherThreads
from tocsin.emitter.model.cleared_gradients import Cleared
from tocsin.emitter.probes.clipped_norms import ClippedNorms
from tocsin.emitter.probes.local_gradients import LocalGradients
from tocsin.emitter.probes.losses import LossBuffer
from tocsin.emitter.training.context import current

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture


class LoopState:
    """The state of the training loop in this process."""

    def __init__(self) -> None:
        self.isolation: Final = current.isolation
        self.capture: Capture | None = None
        self.losses: Final = LossBuffer()
        self.cleared: Final = Cleared()
        self.local: Final = LocalGradients()
        self.clipped: Final = ClippedNorms()
        self.around: Final = Around(self.isolation)
        self.threads: Final = OtherThreads()
        self.stepping: list[torch.optim.Optimizer] = []
        """Optimizers whose steps are under way."""
        self.made_step = False
        """Whether there was one since the last update of a GradScaler."""
        self.backwards = 0
        """Backward calls since the last step."""
        self.most_backwards = 0
        """The most of them between two steps of this training."""
        self.discarded = False
        """Whether gradients were cleared without a step."""
        self.scaled: tuple[int, torch.Tensor] | None = None
        """The id of what a GradScaler has scaled last, and the loss before it was scaled."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of all optimizers; none before the first step."""
        return iter(()) if self.capture is None else self.capture.optimizers.each_parameter()

    def look_for_skipped(self) -> None:
        """In front of a backward call: whether the loop has cleared the gradients in place of a
        step.
        """
        if not self.cleared.is_gone(self.parameters()):
            return
        self.discarded = True
        if self.capture is None:
            self.losses.drain()
        else:
            self.capture.batch_skipped()
