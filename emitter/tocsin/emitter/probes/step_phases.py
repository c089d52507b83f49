"""Where the time of a step goes, from the clock of the training thread.

The hooks mark the begins and ends that they see; what lies between two marks belongs to a phase, or
to none. Durations are added up from one step of the primary optimizer to the next, over all
micro-batches and all optimizers, so that those of a GAN's other optimizer, and of steps that a loss
scaler skipped, are in them. All are in seconds:

- `data_wait_s`: inside of data loaders' `__next__`, outside of evaluations;
- `forward_s`: from the last mark (a batch, a backward call, a step, a checkpoint, the end of an
  evaluation) to the begin of a backward call. The forward pass is in it, and whatever else the
  loop does there, like moving the batch or `zero_grad`;
- `backward_s`: inside of `torch.autograd.backward`, waiting for other ranks included;
- `optimizer_s`: inside of `Optimizer.step`, without what a closure computes there;
- `checkpoint_s`: inside of calls that write a file; only where there were some;
- `evaluation_s`: from the first batch or loss of an evaluation (`model.eval()` was called) to the
  next batch of training, or to its own last batch or loss if no training batch follows; only where
  there was one.

The rest of `step_time_s` is what the loop does between: clipping, logging, metrics. On a GPU this
clock shows when work was handed over; what the GPU itself needed:
`tocsin.emitter.probes.cuda_timing`.

Plain arithmetic on the training thread: a mark costs 0.1 to 0.2 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from tocsin.emitter.probes import cuda_timing
from tocsin.emitter.probes.cuda_timing import CudaTiming, events_on
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.process.isolation import REST
from tocsin.schemas.records.runs import PhaseMark

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

MARKED_S: Final = 0.1
"""Evaluations shorter than this are not marked as a phase; a loop may have one at each step."""

_USUAL: Final = ("forward_s", "backward_s", "optimizer_s")
_LOADING: Final = (*_USUAL, "data_wait_s")

Edge = Literal["begin", "end"]
Report = Callable[[Edge, float | None], bool]


class StepPhases(Probe):
    """The durations since the last step."""

    name = "phases"

    def __init__(self) -> None:
        self.timer: CudaTiming | None = None
        """Where the model is on a GPU."""
        self.device: CudaTiming | None = None
        """The same, while a step is timed on the GPU, too."""
        self.report: Report | None = None
        """Called at the begin and the end of an evaluation, with its duration in seconds at the
        end; returns whether it has marked it.
        """
        self.marks_evaluations = True
        """Whether evaluations are marked here; a framework's callback knows better when."""
        self.resumes: Callable[[], None] = _nothing
        """Called before something is marked that is no part of a plain step."""
        self.reset()

    def reset(self) -> None:
        """Another training begins."""
        self.wakes = NEVER
        self.timer = self.device = None
        self.looks_every: Callable[[], int] = _each
        """Steps between two that are looked at: the GPU is timed at each tenth of these."""
        self.report = None
        self._loads = False
        self.cursor: float | None = None
        """The last mark."""
        self._depth = 0
        self._zero()
        self._stepping: float | None = None
        self._within = 0.0
        self._evaluating: float | None = None
        self._evaluated = self._evaluation_began = 0.0
        self._announced: bool | None = None
        self._named: list[tuple[str, float]] = []

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first optimizer step of a training is being made."""
        isolation, root = training.isolation, optimizers.root

        def mark(edge: Edge, duration_s: float | None) -> bool:
            if edge == "begin" and not self.marks_evaluations:
                return False
            # Not `training.phase`: its end is only noticed when training goes on, and until then a
            # loop that hangs would look busy.
            step = training.last_step
            training.emit(
                PhaseMark(
                    **training.who, name="evaluation", edge=edge, step=step, duration_s=duration_s
                )
            )
            return True

        def report(step: int, columns: tuple[str, ...], values: tuple[float, ...]) -> None:
            training.row(columns, values, step=step)

        self.report = lambda edge, duration_s: bool(
            isolation.run(self.name, mark, edge, duration_s)
        )
        first = None if root is None else next(root.parameters(), None)
        if first is not None and first.device.type == "cuda":
            self.timer = CudaTiming(report, events_on(first.device), isolation=isolation)
            self.looks_every = lambda: training.schedule.budget.looks_every
            self.wakes = 0

    def _zero(self) -> None:
        self._wait = self._forward = self._backward = self._optimizer = 0.0
        self._checkpoint = self._evaluation = 0.0

    # -- marks, each with the time.perf_counter() of when it was --------------------------------

    def loaded(self, began: float, ended: float) -> None:
        """A data loader gave a batch of training."""
        if self._evaluating is not None:
            self._evaluation_over(began)
        self._loads = True
        self._wait += ended - began
        self.cursor = ended
        if self.device is not None:
            self.device.forward()

    def backward_begins(self, now: float) -> None:
        """A backward call begins; one inside of another (checkpointing) is part of it."""
        self._depth += 1
        if self._depth > 1:
            return
        if self._evaluating is not None:
            self._evaluation_over(self._evaluated)
        if self.cursor is not None and now > self.cursor:
            self._forward += now - self.cursor
        self.cursor = now
        if self.device is not None:
            self.device.backward()

    def backward_ends(self, now: float) -> None:
        """Called when a backward call ends, also by an error. Ignored without a begin."""
        self._depth -= 1
        if self._depth:
            self._depth = max(0, self._depth)
            return
        if self.cursor is not None:
            self._backward += now - self.cursor
        self.cursor = now
        if self.device is not None:
            self.device.forward()

    def step_begins(self, now: float) -> None:
        """An optimizer's step begins."""
        if self._evaluating is not None:
            self._evaluation_over(self._evaluated)
        if self._depth and self.cursor is not None:
            self._backward += now - self.cursor  # a step in the middle of a backward call
        self._stepping, self.cursor = now, now
        self._within = self._wait + self._forward + self._backward
        if self.device is not None:
            self.device.optimizer()

    def step_ends(self, now: float) -> None:
        """Called when an optimizer step ends. Its closure counts for the other phases."""
        if self._stepping is not None:
            within = self._wait + self._forward + self._backward - self._within
            self._optimizer += max(0.0, now - self._stepping - within)
            self._stepping = None
        self.cursor = now
        if self.device is not None:
            self.device.forward()

    def wrote(self, began: float, ended: float) -> None:
        """A checkpoint was written."""
        self.resumes()
        if self._evaluating is not None:
            # What is written between the last batch of an evaluation and the next of training.
            self._evaluation += max(0.0, began - self._evaluating)
            self._evaluating = self._evaluated = ended
        self._checkpoint += ended - began
        self.cursor = ended

    def evaluated(self, began: float, ended: float) -> None:
        """A batch or a loss of an evaluation came by."""
        self.resumes()
        if self._named:
            return
        if self._evaluating is None:
            self._evaluating = self._evaluation_began = began
            self._announced = None
        self._evaluated = ended
        if self._announced is None and ended - self._evaluation_began >= MARKED_S:
            self._announced = self.report is not None and self.report("begin", None)

    def _evaluation_over(self, now: float) -> None:
        if self._evaluating is None:
            return
        self._evaluation += max(0.0, now - self._evaluating)
        self._evaluating = None
        self.cursor = now
        if self._announced and self.report is not None:
            self.report("end", max(0.0, now - self._evaluation_began))

    def named(self, name: str, edge: str, now: float) -> None:
        """The user's own code marks that a phase begins or ends. `evaluation` and `checkpoint` are
        counted; the time of others is of no phase.
        """
        self.resumes()
        if edge == "begin":
            if name == "evaluation":
                self._evaluation_over(now)
            self._named.append((name, now))
            return
        for i in range(len(self._named) - 1, -1, -1):
            if self._named[i][0] == name:
                began = self._named.pop(i)[1]
                if name == "evaluation":
                    self._evaluation += now - began
                elif name == "checkpoint":
                    self._checkpoint += now - began
                self.cursor = now
                return

    # -- the values of a step ---------------------------------------------------------------------

    def drain(self) -> tuple[list[str], list[float]]:
        """Names and seconds since the last call; all begin at zero again."""
        columns = ["forward_s", "backward_s", "optimizer_s"]
        values = [self._forward, self._backward, self._optimizer]
        if self._loads:
            columns.append("data_wait_s")
            values.append(self._wait)
        if self._checkpoint > 0:
            columns.append("checkpoint_s")
            values.append(self._checkpoint)
        if self._evaluation > 0:
            columns.append("evaluation_s")
            values.append(self._evaluation)
        self._zero()
        return columns, values

    def is_usual(self, columns: tuple[str, ...]) -> bool:
        """Whether nothing but the phases of these columns, which are `usual_columns`, has taken
        time since the last step, and the GPU is not timed at this one.
        """
        return (
            self._checkpoint == 0.0
            and self._evaluation == 0.0
            and self._evaluating is None
            and self.device is None
            and columns is (_LOADING if self._loads else _USUAL)
        )

    @property
    def usual_columns(self) -> tuple[str, ...]:
        """The names that belong to `usual_step_ends`."""
        return _LOADING if self._loads else _USUAL

    def usual_step_ends(self, now: float) -> tuple[float, ...]:
        """A step of the main optimizer is over, and all was usual: the seconds of the usual phases
        since the last one; they begin at zero again.
        """
        if self._stepping is not None:
            within = self._wait + self._forward + self._backward - self._within
            self._optimizer += max(0.0, now - self._stepping - within)
            self._stepping = None
        found: tuple[float, ...]
        if self._loads:
            found = (self._forward, self._backward, self._optimizer, self._wait)
        else:
            found = (self._forward, self._backward, self._optimizer)
        self._forward = self._backward = self._optimizer = self._wait = 0.0
        return found

    def starts_anew(self, now: float) -> None:
        """Steps were passed over until then, and nothing is known of their phases."""
        self._forward = self._backward = self._optimizer = self._wait = 0.0
        self._stepping, self.cursor = None, now

    def stepped(self, training: Training, step: int) -> None:
        """A step of the training is over, and is `wakes` or a later one. Read what the GPU has
        passed, and time the next step if it is due."""
        training.isolation.run(cuda_timing.PROBE, self.after_step, step)
        if training.isolation.rests(cuda_timing.PROBE):
            self.device, self.wakes = None, step + REST

    def after_step(self, step: int) -> None:
        """A step was counted: read what the GPU has passed, and time the next step if it is due."""
        timer = self.timer
        if timer is None:
            return
        if self.device is not None:
            self.device = None
            timer.close_step(step)
        if timer.waiting:
            timer.poll()
        every = cuda_timing.EVERY * self.looks_every()
        if (step + 1) % every == 0:
            self.device = timer
            timer.forward()
        # Until the GPU has come by, each step asks.
        at_once = self.device is not None or timer.waiting
        self.wakes = step + 1 if at_once else step + every - 1 - step % every

    def close(self, training: Training) -> None:
        """The training is over: send what is left."""
        self.end_evaluation()

    def end_evaluation(self) -> None:
        """An evaluation under way is over, at its last batch or loss."""
        self._evaluation_over(self._evaluated)


def _nothing() -> None:
    pass


def _each() -> int:
    return 1
