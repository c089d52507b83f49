"""The probes that hooks in torch call directly: of phases, data, losses, other optimizers.

One object for the hooks and for capture, which exists before a training begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from tocsin.emitter.capture.probe_list import ProbeList
from tocsin.emitter.model.cleared_gradients import Cleared
from tocsin.emitter.probes.checkpoint_files import CheckpointFiles
from tocsin.emitter.probes.inputs.data import DataProbe
from tocsin.emitter.probes.inputs.data_loader import DataLoaderProbe
from tocsin.emitter.probes.losses import Loss
from tocsin.emitter.probes.named_losses import NamedLosses
from tocsin.emitter.probes.program_checks.checks import SourceChecks
from tocsin.emitter.probes.secondary_optimizers import SecondaryOptimizers
from tocsin.emitter.probes.step_phases import StepPhases
from tocsin.emitter.process.isolation import Isolation

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training


class HookProbes:
    """The probes that the hooks of this process call themselves, and the list of all."""

    def __init__(self, isolation: Isolation, cleared: Cleared) -> None:
        self._isolation: Final = isolation
        self.checkpoints: Final = CheckpointFiles()
        self.phases: Final = StepPhases()
        self.loaders: Final = DataLoaderProbe()
        self.data: Final = DataProbe()
        self.named: Final = NamedLosses()
        self.checks: Final = SourceChecks(isolation, cleared)
        self.others: Final = SecondaryOptimizers()
        self.probes: Final = ProbeList(
            isolation,
            (
                self.checkpoints,
                self.phases,
                self.others,
                self.named,
                self.loaders,
                self.data,
                self.checks,
            ),
        )
        self.thread = 0
        """The one that trains."""

    def reset(self) -> None:
        """The training is over; the next begins anew."""
        self.probes.reset()
        self.thread = 0

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """A training begins on this thread, with these optimizers."""
        self.moved()
        self.probes.start(training, optimizers)

    def moved(self) -> None:
        """The training goes on on this thread."""
        self.thread = threading.get_ident()

    @property
    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains."""
        return threading.get_ident() == self.thread

    def batch(self, iterator: object, began: float, ended: float, *, evaluating: bool) -> None:
        """A data loader's iterator gave a batch."""
        self.loaders.record_batch(iterator, evaluating=evaluating)
        if not self.on_its_thread:
            return  # somebody fetches ahead, and the training does not wait for it
        if evaluating:
            self.phases.evaluated(began, ended)
        else:
            if self.loaders.is_silent:
                self.checks.silent_batch()
            self.phases.loaded(began, ended)

    def other_stepped(
        self,
        optimizer: torch.optim.Optimizer,
        losses: list[Loss],
        modules: Callable[[], Iterable[nn.Module]],
        *,
        norm: bool,
    ) -> None:
        """An optimizer that does not count the steps has made one. Each of the losses is a number,
        or a tensor `[1]` on a GPU.
        """
        self.checks.other_stepped(optimizer)
        self._isolation.run(
            self.others.name, self.others.made_step, optimizer, losses, modules, norm=norm
        )

    def send_named(self, training: Training, step: int) -> None:
        """Send what the user has named since the step before this one."""
        self._isolation.run(self.named.name, self.named.stepped, training, step)
