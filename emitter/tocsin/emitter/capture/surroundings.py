"""What goes on around the numbers of a step: where its time goes, what it is fed, who else steps.

One object for the hooks and for capture. Its parts are switched off on their own: each is isolated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from tocsin.emitter.probes.cuda_timing import DeviceTime, events_on
from tocsin.emitter.probes.inputs.data import DataProbe
from tocsin.emitter.probes.inputs.data_loader import Loaders
from tocsin.emitter.probes.losses import Loss
from tocsin.emitter.probes.named_losses import NamedLosses
from tocsin.emitter.probes.probe import Probe
from tocsin.emitter.probes.program_checks.checks import SourceChecks
from tocsin.emitter.probes.program_checks.untracked_gradients import UntrackedGradients
from tocsin.emitter.probes.secondary_optimizers import OtherOptimizers
from tocsin.emitter.probes.step_phases import Edge, StepPhases
from tocsin.emitter.process.isolation import REST, Isolation
from tocsin.schemas.records.runs import PhaseMark

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

PROBES: Final[tuple[type[Probe], ...]] = (UntrackedGradients,)
"""Those that need no more than `Probe` gives them, a line for each: made anew for each training."""


class Around:
    """The surroundings of the training of this process."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation: Final = isolation
        self.phases: Final = StepPhases()
        self.loaders: Final = Loaders()
        self.data: Final = DataProbe()
        self.named: Final = NamedLosses()
        self.checks: Final = SourceChecks(isolation)
        self.others: Final = OtherOptimizers()
        self._lasting: Final = (self.others, self.named, self.loaders, self.data, self.checks)
        """Those that the hooks feed: they are there before a training begins."""
        self._probes: tuple[Probe, ...] = self._lasting
        self.marks_evaluations = True
        """Whether evaluations are marked here; a framework's callback knows better when."""
        self.thread = 0
        """The one that trains."""

    def reset(self) -> None:
        """The training is over; the next begins anew."""
        self.phases.reset()
        self.phases.report = None
        for probe in self._probes:
            self._isolation.run("clean-up", probe.reset)
        self._probes = self._lasting
        self.thread = 0

    def begin(self, training: Training, optimizers: Optimizers) -> None:
        """A training begins on this thread, with these optimizers."""
        self.thread = threading.get_ident()
        root = optimizers.root
        self._probes = (*self._lasting, *(probe() for probe in PROBES))
        for probe in self._probes:
            self._isolation.run(probe.name, probe.begin, training, optimizers)

        def mark_evaluation(edge: Edge, duration_s: float | None) -> bool:
            if edge == "begin" and not self.marks_evaluations:
                return False
            # Not `training.phase`: its end is only noticed when training goes on, and until then a
            # loop that hangs would look busy.
            mark = PhaseMark(
                **training.who,
                name="evaluation",
                edge=edge,
                step=training.last_step,
                duration_s=duration_s,
            )
            training.emit(mark)
            return True

        self.phases.report = lambda edge, duration_s: bool(
            self._isolation.run("phases", mark_evaluation, edge, duration_s)
        )
        first = None if root is None else next(root.parameters(), None)
        if first is not None and first.device.type == "cuda":

            def report(step: int, columns: tuple[str, ...], values: tuple[float, ...]) -> None:
                training.row(columns, values, step=step)

            self.phases.timer = DeviceTime(
                report, events_on(first.device), isolation=self._isolation
            )

    def moved(self) -> None:
        """The training goes on on this thread."""
        self.thread = threading.get_ident()

    @property
    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains."""
        return threading.get_ident() == self.thread

    # -- what the hooks see --------------------------------------------------------------------

    def batch(self, iterator: object, began: float, ended: float, *, evaluating: bool) -> None:
        """A data loader's iterator gave a batch."""
        self.loaders.gave(iterator, evaluating=evaluating)
        if not self.on_its_thread:
            return  # somebody fetches ahead, and the training does not wait for it
        if evaluating:
            self.phases.evaluated(began, ended)
        else:
            if self.loaders.is_silent:
                self.checks.silent_batch()
            self.phases.batch(began, ended)

    def wakes(self, step: int) -> bool:
        """Whether `stepped` has something to do behind this step."""
        for probe in self._probes:
            if step >= probe.wakes:
                return True
        return self.phases.timer is not None

    @property
    def next_wake(self) -> int:
        """The first step that has to be looked at for what goes on around it; 0: the next one."""
        if self.phases.timer is not None:
            return 0
        return min(probe.wakes for probe in self._probes if not probe.patient)

    # -- what capture asks and tells -------------------------------------------------------------

    def other_stepped(
        self,
        optimizer: torch.optim.Optimizer,
        losses: list[Loss],
        modules: Callable[[], Iterable[nn.Module]],
        *,
        norm: bool,
    ) -> None:
        """An optimizer that does not count the steps has made one."""
        self.checks.other_stepped(optimizer)
        self._isolation.run(
            self.others.name, self.others.made_step, optimizer, losses, modules, norm=norm
        )

    def stepped(self, training: Training, step: int, at_us: int) -> None:
        """A step of the training is over."""
        self.others.at_us = at_us
        if self.phases.timer is not None:
            self._isolation.run("device time", self.phases.after_step, step)
        for probe in self._probes:
            if step >= probe.wakes:
                self._isolation.run(probe.name, probe.stepped, training, step)
                if self._isolation.rests(probe.name):
                    probe.wakes = step + REST

    def send_named(self, training: Training, step: int) -> None:
        """Say what the user has named since the step before this one."""
        self._isolation.run(self.named.name, self.named.stepped, training, step)

    def close(self, training: Training) -> None:
        """The training is over: say what is left."""
        self._isolation.run("phases", self.phases.close)
        for probe in self._probes:
            self._isolation.run(probe.name, probe.close, training)
