"""A monitored run, as `start` returns it: what the training's own code tells tocsin.

The only exceptions are `ConfigurationError` for wrong arguments and `StopTraining` for a stop.
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, SupportsFloat

from tocsin.emitter.capture import user_values
from tocsin.emitter.process.environment import RUN_ID
from tocsin.emitter.stop import saving
from tocsin.emitter.stop.side_group import ranks_here, ranks_to_come
from tocsin.emitter.training.context import current
from tocsin.emitter.training.session import Session, succeeded
from tocsin.emitter.training.training import Training
from tocsin.emitter.training.user_arrays import as_array, frame_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.fields import MAX_INT
from tocsin.schemas.records.runs import Outcome

if TYPE_CHECKING:
    import torch

    from tocsin.emitter.probes.inputs.named_data import NamedData
    from tocsin.emitter.probes.losses import Loss

LOOP_WITHOUT_OPTIMIZER: Final = 100
"""After so many of them without a step, and without backward calls that one may follow, none is
expected any more."""


class Run:
    """A monitored run, returned by `start`. Also a context manager, which calls `finish`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run_id = os.environ.get(RUN_ID, "")
        self._isolation = session.isolation
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether `finish` has been called."""
        return self._finished

    @property
    def run_id(self) -> str:
        """Id of this run, as in records, issues and commands."""
        return self._run_id

    def watch(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Select the model, and the optimizer whose steps count.

        tocsin finds both by itself. Call this if there are several optimizers, or if the model
        cannot be found: after `gc.freeze()`, or in a very large heap.

        Raises:
            ConfigurationError: an argument is not a torch module or optimizer.
        """
        import torch

        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"watch: expected a torch.nn.Module, found {type(model).__name__}"
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"watch: expected a torch.optim.Optimizer, found {type(optimizer).__name__}"
            )
        self._isolation.run("api", self._name_model, model)
        if optimizer is not None:
            self._isolation.run("api", self._prefer, optimizer)

    def log(self, values: Mapping[str, SupportsFloat], step: int | None = None) -> None:
        """Record your own scalars, by name.

        In a loop without torch, each call without `step` counts as a step, "loss" is the training
        loss, and stops take effect in this call. It waits for tensors on a GPU.

        Args:
            values: names of 1 to 200 characters, and numbers or tensors of one element. They become
                columns `log.NAME`.
            step: the step they belong to; by default the last completed one.

        Raises:
            ConfigurationError: a name or number is not valid, or the step is negative.
        """
        columns, numbers = [], []
        for name, value in values.items():
            if not isinstance(name, str) or not 0 < len(name) <= 200:
                raise ConfigurationError(
                    f"log: expected a name of 1 to 200 characters, found {name!r}"
                )
            try:
                numbers.append(float(value))
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise ConfigurationError(f"log: {name!r} is not a number: {error}") from error
            columns.append(name)
        if step is not None and (not isinstance(step, int) or step < 0):
            raise ConfigurationError(f"log: expected a step of 0 or more, found {step!r}")
        if not self._finished and self._isolation.run("api", self._log, columns, numbers, step):
            training = self._session.training
            if training is not None:
                training.check("optimizer_step")

    def plan(self, total_steps: int | None = None, *, done_steps: int | None = None) -> None:
        """Say how many optimizer steps are planned, to estimate what a stop saves.

        The Trainer of Hugging Face and Lightning are asked for it; a loop of your own can call
        this, at any time and again.

        Args:
            total_steps: planned steps of the whole training, over all its restarts.
            done_steps: of those, steps made before this process started: it continues from there.

        Raises:
            ConfigurationError: a number is not a whole number of this range.
        """
        for name, number, least in (
            ("total_steps", total_steps, 1),
            ("done_steps", done_steps, 0),
        ):
            whole = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (whole and least <= number <= MAX_INT):
                raise ConfigurationError(
                    f"plan: {name}: expected a whole number of at least {least}, found {number!r}"
                )
        if not self._finished:
            self._isolation.run(
                "api",
                self._report_after_start,
                lambda: self._training().plan(total_steps, done_steps, "run.plan"),
            )

    def loss(self, name: str, value: SupportsFloat) -> None:
        """Record one of several losses as `loss.NAME` of the current step.

        Several values of one step are averaged; in `eval()`, each value counts for the evaluation.
        Pass the tensor, not its `item()`: this call does not wait for a GPU. The loss whose
        `backward` you call is captured without this.

        Args:
            name: a text of 1 to 200 characters.
            value: a number, or a tensor of one element, on any device.

        Raises:
            ConfigurationError: the name or the number is not valid.
        """
        number = user_values.check_loss(name, value)
        if not self._finished:
            self._isolation.run("api", self._loss, name, number)

    def data(
        self,
        *,
        inputs: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        labels: torch.Tensor | None = None,
        predictions: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Name the inputs, labels, predictions or tokens of a batch, to record their statistics.

        Call it for each batch. It samples at most every tenth one, and sends the counts every 100
        steps and at the end of an evaluation (while the model is in `eval()`). For a plain
        cross-entropy, tocsin finds labels and predictions, or tokens, without this call; once you
        name labels or tokens, only those count.

        Args:
            inputs: a batch `[B, C, ...]` (images, volumes) or `[B, ..., C]`, or several by name.
                Collection `input_channels`: mean, spread and range of each channel C.
            labels: class ids `[B, ...]`, up to 1,000 classes. Collection `labels`.
            predictions: class ids shaped like `labels`, or scores `[B, ..., K]` or `[B, K, ...]` as
                for `torch.nn.functional.cross_entropy`. Collection `confusion`.
            tokens: token ids of any shape. Collection `tokens`: the 64 most frequent, and the rest.

        Raises:
            ConfigurationError: an argument is not a torch tensor of this kind.
        """
        from tocsin.emitter.probes.inputs.named_data import check_data

        named = check_data(inputs, labels, predictions, tokens)
        if not self._finished:
            self._isolation.run("labels", self._data, named)

    def record(
        self,
        name: str | Mapping[str, object],
        array: object = None,
        *,
        kind: str = "tensors",
        step: int | None = None,
    ) -> None:
        """Record a row of statistics for an array of any framework and any shape.

        Args:
            name: name of the array, or `{name: array}` for several. Record all arrays of one
                collection in one call.
            array: a NumPy array, a PyTorch tensor (this call waits for a GPU), anything with
                `__array__` or DLPack, or a list of numbers.
            kind: the collection; rules read `gradients` and `weights`.
            step: the step it belongs to; by default the last completed one.

        Raises:
            ConfigurationError: this is not an array of numbers, or it has no name.
        """
        arrays = name if isinstance(name, Mapping) else {name: array}
        if isinstance(name, Mapping) and array is not None:
            raise ConfigurationError("record: expected a name and an array, or {name: array, …}")
        if not isinstance(kind, str) or not all(isinstance(n, str) and n for n in (kind, *arrays)):
            raise ConfigurationError("record: expected names, and a kind, that are text")
        if step is not None and (not isinstance(step, int) or step < 0):
            raise ConfigurationError(f"record: expected a step of 0 or more, found {step!r}")
        numbers = {n[:400]: as_array(each) for n, each in arrays.items()}
        if self._finished or not numbers:
            return

        def send() -> None:
            training = self._training()
            at = step if step is not None else training.last_step or 0
            frame = frame_of(training.origin, numbers, kind[:64], at)
            training.frame(frame, urgent=bool(frame.counts[:, 2:].any()))

        self._isolation.run("api", self._report, send)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase, such as "evaluation": until it ends, rules expect no steps."""
        began = time.monotonic()
        self._isolation.run("api", self._mark, name, "begin", None)
        try:
            yield
        finally:
            self._isolation.run("api", self._mark, name, "end", time.monotonic() - began)

    def on_stop_save(self, save: Callable[[], object] | None) -> None:
        """Say how to save a checkpoint, for a stop with `checkpoint: save`. None: not any more.

        It is called on the training's thread, between two steps, before the loop is left, and only
        if the weights are finite: on all ranks at the same step, as `save` may wait for the others.
        An exception in it is reported, and the run stops without a checkpoint. It has the stop's
        grace twice; then the job gets SIGTERM. The callbacks for Lightning and transformers save
        without this.

        Args:
            save: writes the checkpoint; it may return the path.

        Raises:
            ConfigurationError: this cannot be called.
        """
        if save is not None and not callable(save):
            raise ConfigurationError(
                f"on_stop_save: expected a function, found {type(save).__name__}"
            )
        saving.on_stop(save)

    def finish(self, outcome: Outcome = "completed") -> None:
        """End the run: send the remaining records, then wait for rules and deliveries (max. 15 s).

        Args:
            outcome: how the training ended.
        """
        if self._finished:
            return
        self._finished = True
        self._isolation.run("last values", self._report_early)
        self._session.end(outcome)
        torch_patches = sys.modules.get("tocsin.emitter.hooks.torch_patches")
        if torch_patches is not None:
            torch_patches.hooks.reset()
        current.session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        exited = isinstance(error, SystemExit) and succeeded(error.code)
        if kind is None or exited:
            self.finish()
        elif issubclass(kind, KeyboardInterrupt):
            self.finish("interrupted")
        else:
            self.finish("failed")

    def _training(self) -> Training:
        training = self._session.start(*ranks_here())
        self._session.announce({})
        return training

    def _report_after_start(self, call: Callable[[], None]) -> None:
        """Do it now, or once a training has begun: its model and optimizer are not known before."""
        torch_patches = sys.modules.get("tocsin.emitter.hooks.torch_patches")
        if torch_patches is not None and self._session.training is None:
            self._session.keep(call)
        else:
            self._report(call)

    def _report(self, call: Callable[[], None]) -> None:
        """Do it now, or once the ranks of this job know which training they are in."""
        if self._session.training is None and ranks_to_come(os.environ):
            self._session.keep(call)
        else:
            call()

    def _log(self, columns: list[str], numbers: list[float], step: int | None) -> bool:
        """Whether this is a step of a loop without torch."""
        torch_patches = sys.modules.get("tocsin.emitter.hooks.torch_patches")

        def row() -> None:
            self._row(columns, numbers, step)

        if torch_patches is not None and self._session.training is None:
            kept = len(self._session.early)
            if kept < LOOP_WITHOUT_OPTIMIZER or torch_patches.hooks.accumulates:
                self._session.keep(row)
                return False
            # A loop in JAX that uses a data loader of torch, or with an optimizer of its own.
        self._report(row)
        return torch_patches is None or torch_patches.hooks.capture is None

    def _row(self, columns: list[str], numbers: list[float], step: int | None) -> None:
        training, torch_patches = (
            self._training(),
            sys.modules.get("tocsin.emitter.hooks.torch_patches"),
        )
        if torch_patches is not None and torch_patches.hooks.capture is not None:
            at = step if step is not None else training.last_step or 0
            training.row([f"log.{name}" for name in columns], numbers, step=at)
            return
        at = step if step is not None else training.next_step
        names = [name if name == "loss" else f"log.{name}" for name in columns]
        nonfinite = any(not math.isfinite(number) for number in numbers)
        training.row(names, numbers, step=at, urgent=nonfinite)
        training.next_step = max(training.next_step, at + 1)

    def _mark(self, name: str, edge: str, duration_s: float | None) -> None:
        if self._finished:
            return
        self._report(lambda: self._training().phase(str(name), edge, duration_s))
        watching = user_values.watching()
        if watching is not None:
            watching.phases.named(str(name), edge, time.perf_counter())

    def _loss(self, name: str, number: Loss) -> None:
        watching = user_values.watching()
        if watching is not None:
            user_values.add_loss(watching, self._session.training, name, number)
        else:
            self._report(lambda: self._loss_row(name, float(number)))

    def _loss_row(self, name: str, number: float) -> None:
        training = self._training()
        training.row([f"loss.{name}"], [number], step=training.next_step)

    def _data(self, data: NamedData) -> None:
        watching = user_values.watching()
        if watching is not None:
            user_values.sample(watching, self._session.training, data)

    def _name_model(self, model: torch.nn.Module) -> None:
        from tocsin.emitter.hooks import torch_patches

        torch_patches.hooks.name_model(model)

    def _prefer(self, optimizer: torch.optim.Optimizer) -> None:
        from tocsin.emitter.hooks import torch_patches

        torch_patches.hooks.preferred = weakref.ref(optimizer)

    def _report_early(self) -> None:
        if self._session.early:
            self._training()
