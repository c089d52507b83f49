"""What all hooks know of the loop that trains, from one step to the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.capture.hook_probes import HookProbes
from tocsin.emitter.hooks.threads import OtherThreads
from tocsin.emitter.model.cleared_gradients import Cleared
from tocsin.emitter.model.gradient_thread import gradient_thread, leaves
from tocsin.emitter.probes.clipped_norms import ClippedNorms
from tocsin.emitter.probes.local_gradients import LocalGradients
from tocsin.emitter.probes.losses import LossBuffer
from tocsin.emitter.training.context import current

if TYPE_CHECKING:
    from tocsin.emitter.capture.capture import Capture


_leaves: Final = partial(leaves, max_nodes=64)
"""To be found in front of each backward call of another thread."""


class LoopState:
    """The state of the training loop in this process."""

    def __init__(self) -> None:
        self.isolation: Final = current.isolation
        self.capture: Capture | None = None
        self.losses: Final = LossBuffer()
        self.cleared: Final = Cleared()
        self.local: Final = LocalGradients()
        self.clipped: Final = ClippedNorms()
        self.gradients: Final = gradient_thread
        self.hook_probes: Final = HookProbes(self.isolation, self.cleared)
        self.threads: Final = OtherThreads()
        self.stepping: list[weakref.ref[torch.optim.Optimizer]] = []
        """Optimizers whose steps are under way; or have raised, and may be gone."""
        self.made_step = False
        """Whether there was one since the last update of a GradScaler."""
        self.backwards = 0
        """Backward calls since the last step."""
        self.most_backwards = 0
        """The most of them between two steps of this training."""
        self.discarded = False
        """Whether gradients were cleared without a step."""
        self.scaled: tuple[int, torch.Tensor | list[torch.Tensor], int | None] | None = None
        """The id of what a GradScaler has scaled last, the loss or losses before that, and the
        number of its node in the graph: the node itself would keep the activations."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of all optimizers, of any shape; none before the first step."""
        return iter(()) if self.capture is None else self.capture.optimizers.each_parameter()

    def may_read(self, loss: object) -> bool:
        """In front of a backward call of this loss: whether gradients of the training can be read
        on this thread, here and behind that call.
        """
        here, known = get_ident(), self.gradients.here
        if here == known:
            return True
        witness = self.cleared.witness
        if self.capture is not None:
            primary = self.capture.optimizers.primary
            ours = any(map(primary.holds, _leaves(loss)))
            if ours and not (witness is not None and primary.holds(witness)):
                self.cleared.reset()  # it may be of whoever called backward before
        else:
            ours = known == 0 or any(leaf is witness for leaf in _leaves(loss))
        if not ours:
            self.gradients.is_another()
            return False
        self.gradients.here = here
        return True

    def find_skipped(self) -> None:
        """In front of a backward call: whether the loop has cleared the gradients in place of a
        step.
        """
        with self.gradients.lock:
            gone = self.cleared.is_gone(None if self.gradients.several else self.parameters())
        if not gone:
            return
        self.discarded = True
        if self.capture is None:
            self.losses.drain()
        else:
            self.capture.batch_skipped()

    def find_left(self) -> None:
        """Look for the gradients that a backward call has left; called after it."""
        if self.cleared.is_left():
            return
        with self.gradients.lock:
            if not self.gradients.several:
                self.cleared.backward_ended(self.parameters())
