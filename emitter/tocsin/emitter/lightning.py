"""A callback for Lightning, under either of its names (`lightning` and `pytorch_lightning`).

    from tocsin.emitter.lightning import TocsinCallback

    trainer = lightning.Trainer(callbacks=[TocsinCallback()])

Capture needs no callback, and sees Lightning's checkpoints without one. This one adds what the
module logs (`self.log("train_loss", …)`), by name; marks evaluations, so that no stall is seen in
them; and has a stop end `fit` as Lightning itself would: the batch is finished, the end hooks run,
and then the process exits with code 79.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol, Unpack

import torch

from tocsin.emitter.integrations.callbacks import Framework, Options, loss_among
from tocsin.emitter.run import Run
from tocsin.emitter.stop.exception import StopTraining

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""Lightning, by the name of each of its distributions."""


def _bases() -> tuple[type, ...]:
    """`Callback` of each name under which Lightning is in use here, else of the one there is."""
    used = [name for name in PACKAGES if sys.modules.get(name) is not None]
    for name in () if used else PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            used = [name]
            break
    if not used:
        raise ImportError("tocsin.emitter.lightning needs Lightning: pip install lightning")
    return tuple(dict.fromkeys(sys.modules[name].Callback for name in used))


class _Connector(Protocol):
    @property
    def metrics(self) -> Mapping[str, Mapping[str, torch.Tensor]]: ...


class Trainer(Protocol):
    """What is used of Lightning's."""

    should_stop: bool
    global_step: int
    world_size: int
    default_root_dir: str
    checkpoint_callback: object
    sanity_checking: bool
    log_every_n_steps: int
    _logger_connector: _Connector

    def save_checkpoint(self, filepath: str) -> None: ...


_Base = type("_Base", _bases(), {})


class TocsinCallback(_Base):  # type: ignore[valid-type, misc]  # found when it is imported
    """Names what Lightning does, for tocsin.

    Numbers that the module logs on a step are recorded every `log_every_n_steps` of the trainer, as
    its loggers do; those of an epoch at its end. `run` is what `tocsin.emitter.start` gives, and
    the arguments are its own.

    Raises:
        ConfigurationError: an argument or the configuration is wrong.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__()
        self._framework = Framework("lightning", options)
        self._logged: int | None = None
        self._saving = False

    @property
    def run(self) -> Run:
        """The run, to log more to."""
        return self._framework.run

    # -- the loop

    def on_fit_start(self, trainer: Trainer, pl_module: object) -> None:
        """The loop begins."""

        self._saving = False

        def end_loop(stop: StopTraining) -> bool:
            trainer.should_stop = True
            self._saving = stop.save
            return True

        self._framework.start(end_loop)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: object,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """A batch was trained on: record what was logged, as often as loggers do; where a stop asks
        for a checkpoint, save it first.
        """
        # Here and not when the loop has ended: Lightning may validate in between, for longer than a
        # stop waits, or must make more steps first.
        if self._saving:
            self._saving = False
            self._framework.safely(_save, trainer)
        step = self._framework.last_step
        if step is None or step == self._logged:
            return  # a micro-batch: the optimizer has made no step
        if (step + 1) % max(1, trainer.log_every_n_steps) == 0 or trainer.should_stop:
            self._logged = step
            self._framework.safely(self._log_step, trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: object) -> None:
        """An epoch was trained on."""
        self._framework.safely(self._log_epoch, trainer)

    def on_exception(self, trainer: Trainer, pl_module: object, exception: BaseException) -> None:
        """The loop was left by an exception."""
        self._framework.failed()

    def teardown(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        """The last that `fit` does. Raises StopTraining if a stop has ended it."""
        if stage == "fit":
            self._framework.end()

    # -- evaluations

    def on_validation_start(self, trainer: Trainer, pl_module: object) -> None:
        """An evaluation begins; Lightning's trial before the first step is none."""
        if not trainer.sanity_checking:
            # Ranks leave an evaluation each for itself, and saving waits for all of them.
            saver = partial(_save, trainer) if trainer.world_size == 1 else None
            self._framework.evaluation_begins(saver)

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        """An evaluation ends."""
        if not trainer.sanity_checking:
            self._framework.safely(self._log_evaluation, trainer)
            self._framework.evaluation_ends()

    def on_test_start(self, trainer: Trainer, pl_module: object) -> None:
        """A test begins."""
        self._framework.phase_begins("test")

    def on_test_end(self, trainer: Trainer, pl_module: object) -> None:
        """A test ends."""
        self._framework.safely(self._log_evaluation, trainer)
        self._framework.phase_ends("test")

    def on_predict_start(self, trainer: Trainer, pl_module: object) -> None:
        """Predictions begin."""
        self._framework.phase_begins("predict")

    def on_predict_end(self, trainer: Trainer, pl_module: object) -> None:
        """Predictions end."""
        self._framework.phase_ends("predict")

    # -- numbers

    def _log_step(self, trainer: Trainer) -> None:
        values = _metrics(trainer)
        # A number that is logged on steps and on epochs comes under its name and with each suffix.
        names = [name for name in values if name.removesuffix("_step") == name]
        names += [name for name in values if name not in names and name[:-5] not in values]
        self._framework.log({name: values[name] for name in names})

    def _log_epoch(self, trainer: Trainer) -> None:
        values = _metrics(trainer)
        self._framework.log(
            {name: value for name, value in values.items() if f"{name}_epoch" not in values}
        )

    def _log_evaluation(self, trainer: Trainer) -> None:
        values = _metrics(trainer)
        kept = {name: value for name, value in values.items() if f"{name}_epoch" not in values}
        self._framework.evaluated(kept, loss_among(values))


def _save(trainer: Trainer) -> str:
    """Save a checkpoint where the trainer's own are, or would be; its path."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    path = os.path.join(folder, f"stop-step={trainer.global_step}.ckpt")
    trainer.save_checkpoint(path)
    return path


def _metrics(trainer: Trainer) -> Mapping[str, torch.Tensor]:
    """What was logged of the loop in progress, but nothing older; `callback_metrics` has all."""
    return trainer._logger_connector.metrics["callback"]
