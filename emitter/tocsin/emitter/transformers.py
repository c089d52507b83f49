"""A callback for the Trainer of Hugging Face's transformers.

    from tocsin.emitter.transformers import TocsinCallback

    trainer = Trainer(model=model, args=arguments, callbacks=[TocsinCallback()])

Capture needs no callback, and sees the Trainer's checkpoints without one. This one adds what the
Trainer logs, by name; marks evaluations, so that no stall is seen in them; and has a stop end
`train` as the Trainer itself would: the step is finished, the end hooks run, and then the process
exits with code 79.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Unpack

from tocsin.emitter.integrations.callbacks import Framework, Options, loss_among
from tocsin.emitter.run import Run
from tocsin.emitter.stop.exception import StopTraining

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "tocsin.emitter.transformers needs transformers and accelerate: "
        "pip install transformers accelerate"
    ) from error


class Control(Protocol):
    """What is used of TrainerControl."""

    should_training_stop: bool
    should_evaluate: bool
    should_save: bool


class TocsinCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Names what the Trainer does, for tocsin. `run` is what `tocsin.emitter.start` gives, and the
    arguments are its own.

    Raises:
        ConfigurationError: an argument or the configuration is wrong.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self._framework = Framework("transformers", options)
        self._stopping = self._saving = False

    @property
    def run(self) -> Run:
        """The run, to log more to."""
        return self._framework.run

    # -- the loop

    def on_train_begin(
        self, args: object, state: object, control: Control, **kwargs: object
    ) -> None:
        """The loop begins."""
        self._stopping = self._saving = False

        def end_loop(stop: StopTraining) -> bool:
            self._stopping, self._saving = True, stop.save
            return True

        self._framework.start(end_loop)

    def on_step_end(
        self, args: object, state: object, control: Control, **kwargs: object
    ) -> Control:
        """A step was made. The Trainer ends its loop here if a stop is due."""
        if self._stopping:
            control.should_training_stop = True
            # It would come before the checkpoint, and may last longer than a stop waits.
            control.should_evaluate = False
            if self._saving:
                control.should_save = True
        return control

    def on_epoch_end(
        self, args: object, state: object, control: Control, **kwargs: object
    ) -> Control:
        """An epoch has ended, perhaps early by a stop: then it is not evaluated either."""
        if self._stopping:
            control.should_evaluate = False
        return control

    def on_train_end(self, args: object, state: object, control: Control, **kwargs: object) -> None:
        """The loop has ended. Raises StopTraining if a stop has ended it."""
        self._framework.end()

    # -- evaluations

    def on_prediction_step(
        self, args: object, state: object, control: Control, **kwargs: object
    ) -> None:
        """A batch of an evaluation or of predictions; the first of them begins it."""
        self._framework.phase_begins("evaluation")

    def on_evaluate(
        self,
        args: object,
        state: object,
        control: Control,
        metrics: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """An evaluation has ended."""
        values = metrics or {}
        runtimes = [value for name, value in values.items() if name.endswith("_runtime")]
        runtime = runtimes[0] if runtimes else None
        self._framework.evaluated({}, loss_among(values))
        self._framework.phase_ends("evaluation", runtime if isinstance(runtime, float) else None)

    def on_predict(
        self, args: object, state: object, control: Control, metrics: object, **kwargs: object
    ) -> None:
        """Predictions were made."""
        self._framework.phase_ends("evaluation")

    # -- numbers

    def on_log(
        self,
        args: object,
        state: object,
        control: Control,
        logs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """The Trainer has logged something: the training's, or an evaluation's."""
        values = {name: value for name, value in (logs or {}).items() if name != "step"}
        evaluation = any(name.startswith(("eval_", "test_")) for name in values)
        self._framework.log(values, "eval" if evaluation else "train")
