"""Checks that only the training process can make: faults that no number of a step shows.

Whether gradients arrive, are used and are cleared, whether frozen weights were ever trained,
whether the graphs of past steps are kept, what losses and the first layer are given, which mode the
layers are in, whether a schedule is stepped. Each part is isolated on its own. All of it happens in
the first steps and rarely after them; each step pays for two looks at an attribute.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from tocsin.emitter.model.cleared_gradients import Cleared
from tocsin.emitter.model.gradient_thread import gradient_thread
from tocsin.emitter.probes.probe import Probe
from tocsin.emitter.probes.program_checks import (
    frozen_weights,
    lr_schedules,
    module_calls,
    train_mode,
)
from tocsin.emitter.probes.program_checks.discarded_gradients import DiscardedGradients
from tocsin.emitter.probes.program_checks.frozen_weights import FrozenWeights
from tocsin.emitter.probes.program_checks.kept_graphs import KeptGraphs
from tocsin.emitter.probes.program_checks.loss_inputs import LossInputs
from tocsin.emitter.probes.program_checks.missing_gradients import MissingGradients
from tocsin.emitter.probes.program_checks.module_calls import Calls, FirstInputs, ModuleCalls
from tocsin.emitter.probes.program_checks.train_mode import TrainMode
from tocsin.emitter.probes.program_checks.uncleared_gradients import UnclearedGradients
from tocsin.emitter.process.isolation import REST, Isolation
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.program_facts import LayerInputsSeen

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

CALLS_AT: Final = (1, 2, 3, 4, 5, 6)
"""Steps whose calls of modules are watched; and those in which a gradient is missing anew."""

SCHEDULES_AT: Final = (20, 35, 50, 75, 100, 150, 200, 300, 400, 500, 700, 1000)
RENEWALS: Final = 3
"""Steps in a row by another optimizer each time, after which it is reported."""

FIRST_INPUTS: Final = 3
"""Steps whose first layer's inputs are reported."""

GRADIENTS, FROZEN, GRAPHS, LOSSES, MODES, SCHEDULES, CALLS = (
    "gradient flow",
    frozen_weights.PROBE,
    "kept graphs",
    "loss inputs",
    train_mode.PROBE,
    "schedules",
    module_calls.PROBE,
)


class SourceChecks(Probe):
    """The program checks of this process's training."""

    name = "source checks"

    def __init__(self, isolation: Isolation, cleared: Cleared) -> None:
        """`cleared` follows the gradients of this process."""
        self._isolation: Final = isolation
        self._cleared: Final = cleared
        self.losses: Final = LossInputs()
        self.modes: Final = TrainMode()
        self._uncleared: Final = UnclearedGradients()
        self._discarded: Final = DiscardedGradients()
        self._missing: Final = MissingGradients()
        self._frozen: Final = FrozenWeights()
        self._calls: Final = ModuleCalls()
        self._graphs: Final = KeptGraphs()
        self._training: Training | None = None
        self._optimizers: Optimizers | None = None
        self._reset()

    def _reset(self) -> None:
        self.wakes = 0
        self._step = -1
        self._epochs = 0
        self._epoch_news = False
        self._inputs: list[tuple[int, FirstInputs]] = []
        self._inputs_captured = 0
        self._seen: Calls | None = None
        self._stepping: int | None = None
        self._last: weakref.ref[torch.optim.Optimizer] | None = None
        self._last_step = -1
        self._renewed = self._renewed_reported = 0

    def reset(self) -> None:
        """The training is over."""
        self._training = self._optimizers = None
        for part in (self.losses, self.modes, self._uncleared, self._missing, self._calls):
            part.reset()
        self._discarded.reset()
        self._frozen.reset()
        self._graphs.reset()
        self._reset()

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """A training begins, with these optimizers."""
        self._training, self._optimizers = training, optimizers
        self.modes.start(training, optimizers.root)
        self.losses.spacing.start(training, LOSSES)
        self._graphs.spacing.start(training, GRAPHS)
        self._missing.spacing.start(training, GRADIENTS)

    # -- what the hooks see ----------------------------------------------------------------------

    def backward(self, tensors: object) -> None:
        """A backward call from these tensors is about to begin, outside of any optimizer's step."""
        training = self._training
        if training is None:
            return
        self.modes.found = self._calls.switched_on = False
        step = training.next_step
        if step != self._step:
            self._step = step
            if self._calls.due:
                self._isolation.run(CALLS, self._called, step)
            if self.modes.changed:
                self._isolation.run(MODES, self.modes.backward)
            if step >= self._graphs.next_mark:
                self._isolation.run(GRAPHS, self._graphs.backward, tensors, step)
        if not (gradient_thread.several or self._uncleared.is_usual(step)):
            self._isolation.run(GRADIENTS, self._uncleared.backward, step)

    def batch_skipped(self) -> None:
        """In front of a backward call: the gradients of those before it were cleared."""
        self._isolation.run(GRADIENTS, self._discard)

    def stepped_after_skips(self, step: int, iterator: object | None) -> None:
        """That step was made behind such calls; `iterator` is that of the data loader which gave
        the newest batch.
        """
        self._isolation.run(GRADIENTS, self._stepped_after_skips, step, iterator)

    def loss(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """A loss function was called with gradients on, in a step whose losses are looked at.

        To be called within the isolation.
        """
        if self._training is not None:
            self.losses.see(name, args, kwargs, self._calls.tokens)

    def silent_loss(self, *, evaluating: bool) -> None:
        """A loss was computed without gradients."""
        if self._calls.switched_on:
            self.modes.called_in_training()
            self._calls.switched_on = False
        self._isolation.run(MODES, self.modes.silent_loss, evaluating=evaluating)

    def silent_batch(self) -> None:
        """A data loader gave a batch, and no backward call has followed the one before it."""
        if self._training is not None:
            self._isolation.run(MODES, self.modes.silent_batch)

    def epoch(self) -> None:
        """A data loader that feeds the training has given its last batch."""
        self._epochs += 1
        self._epoch_news = True
        self.wakes = 0

    # -- what capture calls ----------------------------------------------------------------------

    def other_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that does not count the steps has made one."""
        training = self._training
        if training is not None and training.next_step >= self._missing.next:
            self._isolation.run(GRADIENTS, self._check, optimizer, training.next_step)

    def stepped(self, training: Training, step: int) -> None:
        """A step of the training is over; to be called once it is `wakes` or later."""
        call = self._isolation.run
        optimizers = self._optimizers
        optimizer = None if optimizers is None else optimizers.primary.optimizer()
        if optimizers is None or optimizer is None:
            return
        call(GRADIENTS, self._gradients, training, optimizers, optimizer, step)
        call(GRADIENTS, self._renewals, training, optimizer, step)
        if not self._frozen.over:
            call(FROZEN, self._frozen_weights, training, optimizers, step)
        if step >= self._graphs.next_check:
            call(GRAPHS, self._kept_graphs, training, step)
        call(LOSSES, self.losses.stepped, training, step)
        call(CALLS, self._arm, training, optimizers, step)
        due = step in SCHEDULES_AT or self._epoch_news
        if due:
            self._epoch_news = False
            call(SCHEDULES, self._report_schedule, training, optimizer, step)
        self.wakes = self._wakes(step)

    def close(self, training: Training) -> None:
        """The training is over: send what is left."""
        optimizers = self._optimizers
        optimizer = None if optimizers is None else optimizers.primary.optimizer()
        step = training.last_step
        if optimizer is not None and step is not None and step not in SCHEDULES_AT:
            self._isolation.run(SCHEDULES, self._report_schedule, training, optimizer, step)

    # -- its parts -------------------------------------------------------------------------------

    @property
    def _witness(self) -> torch.Tensor | None:
        """The parameter, of any shape, in which gradients are looked for, if its steps count."""
        weight, optimizers = self._cleared.witness, self._optimizers
        if weight is None or optimizers is None or gradient_thread.several:
            return None
        return weight if optimizers.primary.holds(weight) else None

    def _discard(self) -> None:
        weight = self._witness
        if weight is not None and self._training is not None:
            self._discarded.discarded(self._training.next_step, weight)

    def _stepped_after_skips(self, step: int, iterator: object | None) -> None:
        weight, training = self._witness, self._training
        if weight is None or training is None or iterator is None:
            return
        self._discarded.stepped(step, weight, iterator, kept=self._cleared.keeps_left)
        self._report_discarded(training, step)

    def _report_discarded(self, training: Training, step: int) -> None:
        news = self._discarded.news(step)
        if news is not None:
            training.row(("gradients_discarded", "steps_discarding"), news, step=step)

    def _wakes(self, step: int) -> int:
        if self._inputs or self._epoch_news:
            return 0
        schedule = next((at for at in SCHEDULES_AT if at > step), sys.maxsize)
        armed = step + 1 if self._calls.due else sys.maxsize
        found = [schedule, armed, max(step + 1, self._graphs.next_check)]
        if self._isolation.rests(GRADIENTS) or self._isolation.rests(LOSSES):
            found.append(step + REST)
        if not self._isolation.rests(GRADIENTS):
            # The calls of a step are watched from the end of the one before.
            found.append(self._missing.next - bool(self._missing.suspects))
        if not self._isolation.rests(LOSSES):
            found.append(self.losses.wakes)
        return min(found)

    def _gradients(
        self,
        training: Training,
        optimizers: Optimizers,
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        parameters = optimizers.watched(optimizer).parameters
        self._uncleared.over()
        self._uncleared.choose(parameters)
        uncleared = self._uncleared.news()
        if uncleared is not None:
            training.row(("gradients_uncleared",), (uncleared,), step=step)
        self._report_discarded(training, step)
        self._uncleared.due = step < 8 or step % 50 < 4
        if step < self._missing.next:
            return
        missing = self._missing
        self._check(optimizer, step)
        missing.checked(step)
        table = missing.news()
        if table is not None:
            columns = ("trainable_tensors", "without_gradient")
            training.row(columns, (missing.trainable, missing.missing), step=step)
            if table.names:
                self._send(training, table, step)
        missing.trainable = 0

    def _frozen_weights(self, training: Training, optimizers: Optimizers, step: int) -> None:
        calls = self._seen if self._stepping == step else None
        table = self._frozen.inspect(optimizers, calls, step)
        if table is not None:
            self._send(training, table, step)

    def _kept_graphs(self, training: Training, step: int) -> None:
        kept = self._graphs.count(step)
        if kept is not None:
            training.row(("graphs_kept",), (kept,), step=step)

    def _renewals(self, training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Count the steps in a row that were made by an optimizer which was not there before."""
        last, before = None if self._last is None else self._last(), self._last_step
        new = self._last is not None and last is not optimizer
        self._last, self._last_step = weakref.ref(optimizer), step
        if step != before + 1:
            new = new and self._renewed > 0
        self._renewed = self._renewed + 1 if new and _remembers(optimizer) else 0
        reported = self._renewed_reported
        if (self._renewed >= RENEWALS and self._renewed >= 2 * reported) or (
            reported and not self._renewed
        ):
            self._renewed_reported = self._renewed
            training.row(("optimizer_renewed",), (float(self._renewed),), step=step)

    def _check(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self._optimizers is not None:
            calls = self._seen if self._stepping == step else None
            self._missing.inspect(step, self._optimizers.watched(optimizer).parameters, calls)

    def _called(self, step: int) -> None:
        """The forward pass of a step that was watched is over."""
        self._seen, self._stepping = self._calls.drain(), step
        first, self._calls.first = self._calls.first, None
        if first is not None and self._inputs_captured < FIRST_INPUTS:
            self._inputs_captured += 1
            self._inputs.append((step, first))

    def _arm(self, training: Training, optimizers: Optimizers, step: int) -> None:
        while self._inputs and self._inputs[0][1].ready:
            at, first = self._inputs.pop(0)
            low, high, mean, std, apart, whole = first.numbers()
            training.emit(
                LayerInputsSeen(
                    **training.who,
                    layer=clip(first.name, 500),
                    kind=clip(first.kind, 100),
                    step=at,
                    values=first.count,
                    minimum=low,
                    maximum=high,
                    mean=mean,
                    std=std,
                    sample_std=None if apart < 0 else apart,
                    whole_numbers=whole > 0,
                )
            )
        if step + 1 in CALLS_AT or (step + 1 == self._missing.next and self._missing.suspects):
            self._calls.arm(optimizers.root, inputs=self._inputs_captured < FIRST_INPUTS)
        else:
            self._calls.stop()  # no backward call has ended the step that was watched

    def _report_schedule(
        self, training: Training, optimizer: torch.optim.Optimizer, step: int
    ) -> None:
        made = lr_schedules.steps_of(optimizer)
        if made is not None:
            columns = ("schedule_steps", "epochs")
            training.row(columns, (float(made), float(self._epochs)), step=step)

    def _send(self, training: Training, table: Table, step: int) -> None:
        at_us = unix_us()
        training.frame(table.frame(training.origin, step, every=1, at_us=at_us))


def _remembers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps something of the gradients, so that a new one has forgotten it."""
    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0
        for held in list(optimizer.state.values())[:1]
        if isinstance(held, Mapping)
        for value in held.values()
    )
