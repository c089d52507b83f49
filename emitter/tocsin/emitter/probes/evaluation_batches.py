"""Activations and inputs of evaluations and predictions: which of their batches are looked at.

Each of the two modes counts its batches from 0, on over all evaluations of the training. A batch is
what a data loader gives while the model is in eval(): what its modules put out until the next one
comes belongs to it. (A loop that fetches ahead has come to the batch before by then.) In an
evaluation without a data loader each loss ends a batch; the function counts that it uses first.
Nothing tells where the first of these batches begins: if it is due, the second is looked at.

The intervals are those of a budget of its own for each mode, a share of the time of its batches.
Frames carry the mode, and the last step of training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from torch import nn

from tocsin.emitter.plan.collections import PREDICT, CollectionPlan
from tocsin.emitter.plan.schedule import CaptureSchedule
from tocsin.emitter.probes.activations.probe import ACTIVATIONS, ActivationProbe
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.inputs.batch_rows import INPUTS, InputProbe
from tocsin.emitter.statistics.tables import Pending
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.collections import Mode

if TYPE_CHECKING:
    from tocsin.emitter.training.training import Training

PROBE: Final = "evaluation batches"

MAX_WAITING: Final = 64
"""Batches whose numbers may be on their way from a GPU."""

EVALUATING: Final[tuple[Mode, ...]] = ("eval", "predict")


class FastPath(Protocol):
    """Where steps go at which nothing is due."""

    until: int
    """The first step that goes the long way again."""


class _Batches:
    """Those of one mode."""

    def __init__(self, training: Training, mode: Mode) -> None:
        settings, isolation = training.settings, training.isolation
        self.mode: Final[Mode] = mode
        self.schedule: Final = CaptureSchedule(settings, mode)
        self.activations: Final = ActivationProbe(
            self.schedule, isolation, settings.of(ACTIVATIONS), mode
        )
        self.inputs: Final = InputProbe(self.schedule, isolation, settings.of(INPUTS), mode)
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
class _Said:
    """What a batch has said, here or on its way."""

    batches: _Batches
    step: int
    at_us: int
    name: str
    pending: Pending


class EvaluationBatches:
    """The evaluation batches of one training, on the thread that trains."""

    def __init__(
        self,
        training: Training,
        steps: ActivationProbe,
        quick: FastPath,
        root: Callable[[], nn.Module | None],
        on_its_thread: Callable[[], bool],
    ) -> None:
        """`steps` looks at the steps of training, and makes room for batches; `root` gives the
        model; `on_its_thread`: whether this thread is the one that trains.
        """
        self._training: Final = training
        self._isolation: Final = training.isolation
        self._steps: Final = steps
        self._quick: Final = quick
        self._root: Final = root
        modes = {mode: _Batches(training, mode) for mode in EVALUATING}
        self._modes: Final = {mode: batches for mode, batches in modes.items() if batches.on}
        self.on: Final = bool(self._modes)
        """Whether anything of evaluations is to be looked at."""
        self._on_its_thread: Final = on_its_thread
        self._waiting: deque[_Said] = deque(maxlen=MAX_WAITING)
        self._armed: tuple[_Batches, int] | None = None
        self._displaced = False
        self._began = self._fed = False
        self._function: str | None = None

    @property
    def busy(self) -> bool:
        """Whether the next step has something to end here."""
        return (self._began or bool(self._waiting)) and not self._isolation.rests(PROBE)

    def on_batch(self, batch: object) -> None:
        """A data loader has given a batch of an evaluation."""
        self._isolation.run(PROBE, self._begin, batch)

    def lost(self, function: str) -> None:
        """A loss of an evaluation was computed, by that function."""
        if self.on and not self._fed:
            self._isolation.run(PROBE, self._end, function)

    def drained(self) -> None:
        """A data loader has no more batches."""
        if self._began and self._on_its_thread():
            self._isolation.run(PROBE, self._pause)

    def over(self, *, in_time: bool = True) -> None:
        """Training goes on, or ends; not `in_time`: its next step was made already."""
        self._isolation.run(PROBE, self._over, in_time=in_time)

    # -- what goes on -----------------------------------------------------------------------------

    def _begin(self, batch: object) -> None:
        step = self._training.last_step
        if step is None or not self._on_its_thread():
            return
        self._collect()
        self._began = self._fed = True
        self._quick.until = 0
        batches = self._batches()
        if batches is not None:
            number = batches.another()
            batches.inputs.on_batch(batch, number)
            if (said := batches.inputs.drain()) is not None:
                self._keep(batches, step, said)
            self._arm(batches, step, number)
        self._give_back()

    def _end(self, function: str) -> None:
        step = self._training.last_step
        if step is None or not self._on_its_thread():
            return
        first, self._began = not self._began, True
        if first:
            self._function = function
            self._quick.until = 0
        elif function != self._function:
            return
        self._collect()
        batches = self._batches()
        if batches is not None:
            number = batches.another()
            missed = batches.schedule.due(number).get(ACTIVATIONS, ()) if first else ()
            self._arm(batches, step, number + 1, missed)
        self._give_back()

    def _over(self, *, in_time: bool) -> None:
        if not in_time and self._displaced:
            self._displaced = False
            self._steps.postpone()
        self._pause()
        self._began = self._fed = False
        self._function = None
        self._poll()

    def _pause(self) -> None:
        self._collect()
        self._give_back()
        for batches in self._modes.values():
            batches.pause()

    def _batches(self) -> _Batches | None:
        return self._modes.get("predict" if PREDICT in self._training.phases else "eval")

    def _arm(
        self, batches: _Batches, step: int, number: int, also: tuple[CollectionPlan, ...] = ()
    ) -> None:
        armed = activations.armed
        if batches.activations.prepare(number, self._root(), also):
            self._armed = batches, step
            self._displaced |= armed

    def _collect(self) -> None:
        """Take what the batch that is over has said."""
        armed, self._armed = self._armed, None
        if armed is not None:
            batches, step = armed
            if (said := batches.activations.drain()) is not None:
                self._keep(batches, step, said)

    def _give_back(self) -> None:
        """Give the next step of training its place back, unless another batch has it."""
        if self._displaced and self._armed is None:
            self._displaced = False
            self._steps.prepare_again(self._root())

    # -- what is sent -----------------------------------------------------------------------------

    def _keep(self, batches: _Batches, step: int, said: tuple[str, Pending]) -> None:
        self._waiting.append(_Said(batches, step, unix_us(), *said))
        self._poll()

    def _poll(self) -> None:
        while self._waiting and self._waiting[0].pending.ready:
            self._send(self._waiting.popleft())

    def _send(self, said: _Said) -> None:
        schedule, training = said.batches.schedule, self._training
        with schedule.costs(said.name, more=True):
            for table in said.pending.tables():
                if not table.names:
                    continue
                every = schedule.interval(
                    table.collection if schedule.has(table.collection) else said.name
                )
                frame = table.frame(
                    training.speaker, said.step, said.batches.mode, every=every, at_us=said.at_us
                )
                training.frame(frame)
