"""What goes on around the numbers of a step: where its time goes, what it is fed, who else steps.

One object for the hooks and for capture. Its parts are switched off on their own: each has a wall.
"""

from __future__ import annotations

import math
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
from tocsin.emitter.probes.program_checks.checks import SourceChecks
from tocsin.emitter.probes.secondary_optimizers import OtherOptimizers
from tocsin.emitter.probes.step_phases import Edge, StepPhases
from tocsin.emitter.process.isolation import Wall
from tocsin.emitter.send.outbox import StepRow
from tocsin.schemas.records.runs import PhaseMark

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training


class Around:
    """The surroundings of the training of this process."""

    def __init__(self, wall: Wall) -> None:
        self._wall: Final = wall
        self.phases: Final = StepPhases()
        self.loaders: Final = Loaders()
        self.data: Final = DataProbe()
        self.named: Final = NamedLosses()
        self.checks: Final = SourceChecks(wall)
        self.others = OtherOptimizers()
        self.marks_evaluations = True
        """Whether evaluations are marked here; a framework's callback knows better when."""
        self.thread = 0
        """The one that trains."""

    def forget(self) -> None:
        """The training is over; the next begins anew."""
        self.phases.forget()
        self.phases.say = None
        self.loaders.forget()
        self.data.forget()
        self.named.forget()
        self.checks.forget()
        self.others = OtherOptimizers()
        self.thread = 0

    def begin(self, training: Training, optimizers: Optimizers) -> None:
        """A training begins on this thread, with these optimizers."""
        self.thread = threading.get_ident()
        root = optimizers.root
        self.checks.begin(training, optimizers)
        self.data.begin(training)

        def say(edge: Edge, duration_s: float | None) -> bool:
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

        self.phases.say = lambda edge, duration_s: bool(
            self._wall.call("phases", say, edge, duration_s)
        )
        first = None if root is None else next(root.parameters(), None)
        if first is not None and first.device.type == "cuda":

            def report(step: int, columns: tuple[str, ...], values: tuple[float, ...]) -> None:
                training.row(columns, values, step=step)

            self.phases.timer = DeviceTime(report, events_on(first.device), wall=self._wall)

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
        return (
            step >= self.data.wakes
            or step >= self.checks.wakes
            or self.others.any
            or self.named.any
            or self.loaders.news
            or self.phases.timer is not None
        )

    @property
    def next_wake(self) -> int:
        """The first step that has to be looked at for what goes on around it; 0: the next one.

        What was counted of the data can wait until then.
        """
        if self.others.any or self.named.any or self.loaders.news:
            return 0
        return 0 if self.phases.timer is not None else self.checks.wakes

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
        self._wall.call(
            "other optimizers", self.others.stepped, optimizer, losses, modules, norm=norm
        )

    def stepped(self, training: Training, step: int, at_us: int) -> None:
        """A step of the training is over."""
        call = self._wall.call
        if self.phases.timer is not None:
            call("device time", self.phases.after_step, step)
        if self.others.any:
            self.send_others(training, step, at_us)
        if self.named.any:
            self.send_named(training, step)
        if self.loaders.news:
            call("loaders", self.loaders.tell, training)
        if step >= self.data.wakes:
            call("labels", self.data.stepped, training, step)
        if step >= self.checks.wakes:
            call("source checks", self.checks.stepped, training, step)

    def close(self, training: Training) -> None:
        """The training is over: say what is left."""
        self._wall.call("phases", self.phases.close)
        self._wall.call("labels", self.data.close, training)
        self.send_named(training, training.next_step)
        self._wall.call("loaders", self.loaders.tell, training)
        self._wall.call("source checks", self.checks.close, training)

    def send_named(self, training: Training, step: int) -> None:
        """Say what the user has named since the step before this one."""
        self._wall.call("named losses", self.named.send, training, step, "train")

    def send_others(self, training: Training, step: int, at_us: int) -> None:
        """Say what the other optimizers have to say with this step of the main one."""
        self._wall.call("other optimizers", self._send_others, training, step, at_us)

    def _send_others(self, training: Training, step: int, at_us: int) -> None:
        for row in self.others.take(step):
            columns, values = row.row()
            odd = not all(map(math.isfinite, values))
            training.step_row(StepRow(row.step, at_us, columns, values), urgent=odd)
