"""Activations and inputs of evaluations and predictions: which of their batches are read.

Each of the two modes counts its batches from 0, on over all evaluations of the training. A batch is
what a data loader returns while the model is in eval(): what its modules put out until the next one
comes belongs to it. (A loop that fetches ahead has come to the batch before by then.) In an
evaluation without a data loader each loss ends a batch; the function counts that it uses first.
Nothing shows where the first of these batches begins: if it is due, the second is read.

The intervals are those of a budget of its own for each mode, a share of the time of its batches.
Frames carry the mode, and the last step of training.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.plan.collections import PREDICT, CollectionPlan
from tocsin.emitter.plan.schedule import CaptureSchedule, Due
from tocsin.emitter.probes.activations.probe import ACTIVATIONS, ActivationProbe
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.inputs.batch_rows import INPUTS, InputProbe
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.statistics.tables import Pending
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.collections import Mode

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
    from tocsin.emitter.training.training import Training

MAX_WAITING: Final = 64
"""Batches whose numbers may be on their way from a GPU."""

EVALUATING: Final[tuple[Mode, ...]] = ("eval", "predict")


class _Batches:
    """Those of one mode."""

    def __init__(self, training: Training, optimizers: Optimizers, mode: Mode) -> None:
        self.mode: Final[Mode] = mode
        self.schedule: Final = CaptureSchedule(training.settings, mode)
        self.activations: Final = ActivationProbe(mode, self.schedule)
        self.inputs: Final = InputProbe(mode, self.schedule)
        for probe in (self.activations, self.inputs):
            probe.start(training, optimizers)
        self.on: Final = self.activations.on or self.inputs.on
        self.count = 0
        """Batches so far; the number of the next."""
        self._last: float | None = None

    def another(self) -> int:
        """One more; its number."""
        now, number = time.perf_counter(), self.count
        self.count = number + 1
        if self._last is not None:
            self.schedule.stepped(now - self._last, 0.0)
        self._last = now
        return number

    def pause(self) -> None:
        """The next one comes in another evaluation: what is between is no batch's time."""
        self._last = None


@dataclass(frozen=True, slots=True)
class _Read:
    """The tables of a batch, here or on their way."""

    batches: _Batches
    step: int
    at_us: int
    name: str
    pending: Pending


class EvaluationBatches(Probe):
    """The batches of the evaluations of one training."""

    name = "evaluation batches"

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        self._training, self._isolation = training, training.isolation
        modes = (_Batches(training, optimizers, mode) for mode in EVALUATING)
        self._modes = {batches.mode: batches for batches in modes if batches.on}
        self.on = bool(self._modes)
        self._waiting: deque[_Read] = deque(maxlen=MAX_WAITING)
        self._armed: tuple[_Batches, int] | None = None
        self._displaced = False
        """Whether a step of training was armed, and a batch has taken its place."""
        self._began = self._loads = False
        self._function: str | None = None

    def evaluation_batch(self, batch: object) -> None:
        """A data loader returned a batch while the model is in `eval()`."""
        step = self._training.last_step
        if step is None:
            return
        self._collect()
        self._began = self._loads = True
        self.reads = 0
        batches = self._batches()
        if batches is not None:
            number = batches.another()
            self._isolation.run(INPUTS, batches.inputs.batch, batch, number)
            if (read := batches.inputs.drain()) is not None:
                self._keep(batches, step, read)
            self._arm(batches, step, number)
        self._give_back()

    def evaluation_loss(self, function: str, loss: torch.Tensor, *, here: bool) -> None:
        """This function computed a loss, a tensor of one element, while the model is in eval()."""
        step = self._training.last_step
        if self._loads or step is None or not here:
            return
        first, self._began = not self._began, True
        if first:
            self._function, self.reads = function, 0
        elif function != self._function:
            return
        self._collect()
        batches = self._batches()
        if batches is not None:
            number = batches.another()
            missed = batches.schedule.due(number).get(ACTIVATIONS, ()) if first else ()
            self._arm(batches, step, number + 1, missed)
        self._give_back()

    def last_batch(self) -> None:
        """A data loader, of training or of an evaluation, has no more batches."""
        if self._began:
            self._pause()

    def batch(self, batch: object, step: int) -> None:
        """A data loader returned a batch, which that step will use. Training goes on."""
        if self.reads != NEVER:
            self._over()

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> None:
        """The optimizer has changed its weights: the tables of this step, which may still be on
        their way from a GPU, and the name of the collection that bears their cost. Training has
        gone on without a data loader."""
        if self._displaced:
            self._displaced = False
            if activations.holder is not None:
                activations.holder.postpone()
        self._over()

    def flush(self) -> bool:
        """Send what has arrived from a GPU, of evaluations."""
        self._over()
        return bool(self._waiting)

    def _over(self) -> None:
        self._pause()
        self._began = self._loads = False
        self._function = None
        self._poll()
        self.reads = 0 if self._waiting else NEVER

    def _pause(self) -> None:
        self._collect()
        self._give_back()
        for batches in self._modes.values():
            batches.pause()

    def _batches(self) -> _Batches | None:
        return self._modes.get("predict" if PREDICT in self._training.phases else "eval")

    def _arm(
        self, batches: _Batches, step: int, number: int, missed: tuple[CollectionPlan, ...] = ()
    ) -> None:
        armed, due = activations.armed, batches.schedule.due(number).get(ACTIVATIONS, ())
        if self._isolation.run(ACTIVATIONS, batches.activations.arm, (*due, *missed)):
            self._armed = batches, step
            self._displaced |= armed

    def _collect(self) -> None:
        """Keep the tables of the batch that is over."""
        armed, self._armed = self._armed, None
        if armed is not None:
            batches, step = armed
            read = self._isolation.run(ACTIVATIONS, batches.activations.drain)
            if read is not None:
                self._keep(batches, step, read)

    def _give_back(self) -> None:
        """Give the next step of training its place back, unless another batch has it."""
        if self._displaced and self._armed is None:
            self._displaced = False
            if activations.holder is not None:
                self._isolation.run(ACTIVATIONS, activations.holder.arm_again)

    # -- what is sent -----------------------------------------------------------------------------

    def _keep(self, batches: _Batches, step: int, read: tuple[str, Pending]) -> None:
        self._waiting.append(_Read(batches, step, unix_us(), *read))
        self._poll()

    def _poll(self) -> None:
        while self._waiting and self._waiting[0].pending.ready:
            self._send(self._waiting.popleft())

    def _send(self, read: _Read) -> None:
        schedule, training = read.batches.schedule, self._training
        with schedule.costs(read.name, more=True):
            for table in read.pending.tables():
                if not table.names:
                    continue
                every = schedule.interval(
                    table.collection if schedule.has(table.collection) else read.name
                )
                frame = table.frame(
                    training.origin, read.step, read.batches.mode, every=every, at_us=read.at_us
                )
                training.frame(frame)
