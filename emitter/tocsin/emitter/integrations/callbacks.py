"""What the callbacks of training frameworks share: named numbers, phases, the stop.

Capture sees a framework's training and its checkpoints without them. They add what cannot be seen
from outside: what a number is called, and where an evaluation begins and ends; and a stop ends the
framework's loop in good order.

Nothing here raises into the training but wrong arguments, and the stop that was asked for.
"""

from __future__ import annotations

import math
import numbers
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, ParamSpec, TypedDict

import torch

from tocsin.emitter.api import start
from tocsin.emitter.hooks.torch_patches import hooks
from tocsin.emitter.run import Run
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.stop import exit_points, saving
from tocsin.emitter.stop.exception import StopTraining, take_over
from tocsin.emitter.training.context import current
from tocsin.emitter.training.training import Training
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.frames import Mode

P = ParamSpec("P")

MAX_NAME: Final = 190
"""Characters of a name that are kept."""

MAX_WAITING: Final = 64
"""Groups of numbers that may be on their way from a GPU."""

EVALUATION_LOSSES: Final = ("loss", "val_loss", "valid_loss", "validation_loss", "eval_loss")
"""What a loss is called where an evaluation has several numbers."""


class Options(TypedDict, total=False):
    """The arguments of `start`, which each callback takes."""

    run_id: str | None
    labels: Mapping[str, str] | None
    config: str | Path | None
    services: bool
    capture: Mapping[str, object] | None


class _Waiting:
    """Numbers of one step, some of them on their way from a GPU."""

    def __init__(self, step: int, mode: Mode, names: list[str], copy: HostCopy) -> None:
        self.step: Final = step
        self.mode: Final[Mode] = mode
        self.names: Final = names
        self.copy: Final = copy


class Framework:
    """One framework's training in this process.

    Args:
        name: the framework's, for what is reported.
        options: see `tocsin.emitter.start`, which is called with them.

    Raises:
        ConfigurationError: an option or the configuration is wrong.
    """

    def __init__(self, name: str, options: Options) -> None:
        self._probe: Final = f"{name} callback"
        self._options: Final = options
        self._waiting: deque[_Waiting] = deque()
        self._began: dict[str, float] = {}
        start(**options)

    def __getstate__(self) -> dict[str, object]:
        # Strategies that spawn their ranks send callbacks there, and nothing of this process.
        return {"_probe": self._probe, "_options": self._options}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._waiting = deque()
        self._began = {}

    @property
    def run(self) -> Run:
        """The run, the same that `start()` gives."""
        return start(**self._options)

    def start(self, end_loop: Callable[[StopTraining], bool]) -> None:
        """The loop begins. `end_loop` is to end it when a stop is due, and returns whether it will;
        if the stop asks for it, with a checkpoint."""
        self._began.clear()
        hooks.hook_probes.phases.marks_evaluations = False
        take_over(end_loop)

    def evaluation_begins(self, saver: saving.Saver | None) -> None:
        """An evaluation begins, in which a stop that asks for a checkpoint calls `saver`: the loop
        is left there, without a step at whose end the framework could save."""
        self.phase_begins("evaluation")
        saving.framework_saves(saver)

    def evaluation_ends(self) -> None:
        """The evaluation has ended."""
        saving.framework_saves(None)
        self.phase_ends("evaluation")

    def end(self) -> None:
        """The loop has ended. Raises StopTraining if that was because of a stop."""
        hooks.hook_probes.phases.marks_evaluations = True
        take_over(None)
        self.safely(self._flush)
        training = self.training
        try:
            exit_points.leave()
        except StopTraining:
            if training is not None:
                training.left = True
            raise

    def failed(self) -> None:
        """An exception has left the loop."""
        hooks.hook_probes.phases.marks_evaluations = True
        take_over(None)
        saving.framework_saves(None)
        for name in list(self._began):
            self.phase_ends(name)

    @property
    def training(self) -> Training | None:
        """The training, once its first step was seen; no number has a step before."""
        session = current.session
        if session is None or hooks.capture is None:
            return None
        return session.training

    @property
    def last_step(self) -> int | None:
        """The step that was made last; None before the first."""
        training = self.training
        return None if training is None else training.last_step

    def safely(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it; an exception switches this callback's own part off, and is reported once."""
        current.isolation.run(self._probe, function, *args, **kwargs)

    def log(self, values: Mapping[str, object], mode: Mode = "train") -> None:
        """Record numbers as `log.NAME` at the last step; others of `values` are left out.

        Those on a GPU are copied without waiting, and sent with a later call.
        """
        self.safely(self._log, values, mode)

    def evaluated(self, values: Mapping[str, object], loss: object = None) -> None:
        """Record the numbers of an evaluation.

        `loss` is its loss: it stands for the losses of the batches where none of those was seen.
        """
        self.safely(self._evaluated, values, loss)

    def phase_begins(self, name: str) -> None:
        """Something that is no training begins: no step is expected."""
        if name not in self._began:
            self._began[name] = time.monotonic()
            self.safely(self._mark, name, "begin", None)

    def phase_ends(self, name: str, duration_s: float | None = None) -> None:
        """End the phase; its duration is `duration_s` if the framework measured it."""
        began = self._began.pop(name, None)
        if began is not None:
            lasted = time.monotonic() - began if duration_s is None else duration_s
            self.safely(self._mark, name, "end", lasted)

    def _mark(self, name: str, edge: str, duration_s: float | None) -> None:
        training = self.training
        if training is not None:
            training.phase(name, edge, duration_s)
            hooks.hook_probes.phases.named(name, edge, time.perf_counter())

    def _log(self, values: Mapping[str, object], mode: Mode) -> None:
        training = self.training
        self._flush()
        if training is None or training.last_step is None:
            return
        columns, found = [], []
        later: list[tuple[str, torch.Tensor]] = []
        for name, value in values.items():
            column = f"log.{name[:MAX_NAME]}"
            if isinstance(value, torch.Tensor):
                if value.numel() != 1 or value.is_complex() or value.is_meta:
                    continue
                if value.device.type != "cpu":
                    later.append((column, value.detach()))
                    continue
            elif not isinstance(value, numbers.Real):
                continue
            columns.append(column)
            found.append(float(value))
        if columns:
            self._send(training, training.last_step, mode, columns, found)
        if later and not is_recording():
            self._copy(training.last_step, mode, later)

    def _copy(self, step: int, mode: Mode, values: list[tuple[str, torch.Tensor]]) -> None:
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, value in values:
            by_device.setdefault(value.device, []).append((name, value))
        with torch.no_grad():
            for group in by_device.values():
                flat = torch.cat([value.reshape(1).to(torch.float32) for _, value in group])
                names = [name for name, _ in group]
                self._waiting.append(_Waiting(step, mode, names, HostCopy(flat)))
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()

    def _flush(self) -> None:
        training = self.training
        while training is not None and self._waiting and self._waiting[0].copy.ready():
            arrived = self._waiting.popleft()
            values = [float(value) for value in arrived.copy.values()]
            self._send(training, arrived.step, arrived.mode, arrived.names, values)

    def _evaluated(self, values: Mapping[str, object], loss: object) -> None:
        self._log(values, "eval")
        training = self.training
        step = None if training is None else training.last_step
        if training is None or step is None or loss is None:
            return
        if training.evaluated_step != step and isinstance(loss, numbers.Real | torch.Tensor):
            if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
                self._copy(step, "eval", [("loss", loss.detach())])
            else:
                self._send(training, step, "eval", ["loss"], [float(loss)])

    @staticmethod
    def _send(
        training: Training, step: int, mode: Mode, columns: list[str], values: list[float]
    ) -> None:
        row = StepRow(step, unix_us(), tuple(columns), tuple(values), mode)
        nonfinite = not all(math.isfinite(value) for value in values)
        training.step_row(row, urgent=nonfinite)


def loss_among(values: Mapping[str, object]) -> object:
    """The loss among the numbers of an evaluation, by its name; None if none is called so."""
    for name in EVALUATION_LOSSES:
        for key, value in values.items():
            if key.replace("/", "_").lower() == name:
                return value
    return None
