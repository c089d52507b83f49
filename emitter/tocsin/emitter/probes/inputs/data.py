"""Labels, predictions, tokens and inputs: the batches of a training, and what it makes of them.

Either the user names the tensors (`run.data`), or a plain cross-entropy is found without code: a
call of `torch.nn.functional.cross_entropy` (which `CrossEntropyLoss` makes) with class indices as
targets. Of up to 1,000 classes labels and predictions are counted; the targets of more are tokens.

In training each tenth step is looked at, one loss call of it, fewer where that would cost more than
0.1 % of the time, but each hundredth at least; from step 1,000 on fewer where it would cost more
than its part of what a step may (`tocsin.emitter.probes.spacing`); in an evaluation as many batches
as may cost 0.5 % of it, at least one. Where capture is paced by steps it is each tenth step, and
each batch. A look takes a sample of at most 4,096 rows; on a GPU the ids are copied without
waiting. Behind the steps 10, 20, 50, then each 100 steps, and at the end of an evaluation, the
counts are sent as the collections `labels`, `confusion`, `tokens` and `input_channels`, and begin
at zero again.

In a compiled graph a loss is not seen; nothing of ours is in there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tocsin.emitter.probes.inputs.input_channels import ChannelLook, InputChannels, sample_channels
from tocsin.emitter.probes.inputs.label_counts import MAX_CLASSES, Ids, LabelCounts
from tocsin.emitter.probes.inputs.named_data import NamedData
from tocsin.emitter.probes.inputs.token_counts import TokenCounts
from tocsin.emitter.probes.probe import Probe
from tocsin.emitter.probes.spacing import LATE, Spacing
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.readable import NUMBERS, readable
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.frames import Mode, TensorFrame

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

EVERY: Final = 10
"""Steps between two looks in training, at least."""

MAX_INTERVAL: Final = 100
"""Steps between two looks in training, at most: one in each record."""

TRAIN_SHARE: Final = 0.001
"""Of the time of training that looking may cost."""

INTERVALS: Final = (EVERY, 20, 50, MAX_INTERVAL)

SEND_EVERY: Final = 100
"""Steps between two records of what was counted in training."""

SEND_EARLY: Final = (10, 20, 50)
"""Steps of the first records: labels of one class are a fault from the first batch on."""

SHARE: Final = 0.005
"""Of the time of an evaluation that looking at its batches may cost."""

IGNORED: Final = -100
"""The target that a cross-entropy leaves out unless it is given another."""

ROWS: Final = 4096
SCORES: Final = 1 << 17
"""Scores that are compared at a look, so that fewer rows are taken of many classes."""

MAX_WAITING: Final = 64


@dataclass(slots=True, eq=False)
class _Counted:
    """What was counted in one mode, since it was sent."""

    classes: LabelCounts = field(default_factory=LabelCounts)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    inputs: InputChannels = field(default_factory=InputChannels)

    @np.errstate(all="ignore")
    def tables(self) -> list[Table]:
        return [*self.classes.drain(), *self.tokens.drain(), *self.inputs.drain()]

    def __bool__(self) -> bool:
        return bool(self.classes) or bool(self.tokens) or bool(self.inputs)


class _Sample:
    """Ids on the host or on their way: labels, and predictions behind them."""

    def __init__(self, parts: Sequence[torch.Tensor], classes: int, *, tokens: bool) -> None:
        self.rows: Final = parts[0].numel()
        self.classes: Final = classes
        self.tokens: Final = tokens
        packed = torch.cat([part.reshape(-1).to(torch.int64) for part in parts])
        self._packed = packed if packed.device.type == "cpu" else HostCopy(packed)

    @property
    def ready(self) -> bool:
        """Whether they are on the host; never waits."""
        return not isinstance(self._packed, HostCopy) or self._packed.ready()

    def ids(self) -> tuple[Ids, Ids | None]:
        """Labels and predictions, once they are ready."""
        held = self._packed
        found = held.values().astype(np.int64) if isinstance(held, HostCopy) else held.numpy()
        behind = found[self.rows :]
        return found[: self.rows], behind if len(behind) else None


class DataProbe(Probe):
    """Looks at the data of one training."""

    name = "labels"
    patient = True

    def __init__(self) -> None:
        self.spent_s = 0.0
        """What all looks together have cost, seconds of CPU."""
        self.reset()

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """A training begins."""
        self._by_steps = training.settings.pacing == "steps"
        self._late.start(training, self.name)

    def reset(self) -> None:
        """Another training begins."""
        self._by_steps = False
        self._late = Spacing(EVERY)
        self.due = True
        """Whether the next loss of a step of training is looked at."""
        self._named = False
        self._counted: dict[Mode, _Counted] = {"train": _Counted(), "eval": _Counted()}
        self._waiting: deque[tuple[Mode, _Sample | ChannelLook]] = deque(maxlen=MAX_WAITING)
        self.wakes = 0
        self._next = 0
        self._every = SEND_EVERY
        self._send_at = SEND_EARLY[0]
        self._costs: deque[float] = deque(maxlen=3)
        self._armed_at: tuple[int, float] | None = None
        self._began: float | None = None
        self._eval_spent = 0.0

    # -- what is looked at ----------------------------------------------------------------------

    def cross_entropy(
        self, args: Sequence[object], kwargs: Mapping[str, object], mode: Mode
    ) -> None:
        """Called after a call of `torch.nn.functional.cross_entropy` with these arguments: scores
        `[B, K, ...]` or `[K]`, and class ids `[B, ...]` or a scalar. Others are ignored.
        """
        if self._named or not self._wanted(mode):
            return
        began = time.thread_time()
        scores = readable(args[0] if args else kwargs.get("input"))
        target = readable(args[1] if len(args) > 1 else kwargs.get("target"), NUMBERS)
        if scores is not None and target is not None and not is_recording():
            fits = target.dim() == max(0, scores.dim() - 1) and target.device == scores.device
            if fits and not target.is_floating_point():
                ignored = kwargs.get("ignore_index", IGNORED)
                self._sample_classes(
                    scores, target, mode, ignored if isinstance(ignored, int) else IGNORED
                )
        self._paid(began, mode)

    def named(self, mode: Mode, data: NamedData) -> None:
        """The user names the tensors. A loss that was found is of no interest then."""
        labels, predictions, tokens = data.labels, data.predictions, data.tokens
        if labels is not None or tokens is not None:
            self._named = True
        if not self._wanted(mode) or is_recording():
            return
        began = time.thread_time()
        if labels is not None and predictions is not None and predictions.is_floating_point():
            self._sample_classes(predictions, labels, mode)
        elif labels is not None:
            apart = _apart(labels.numel(), ROWS)
            ids = [labels.reshape(-1)[::apart]]
            if predictions is not None:
                ids.append(predictions.reshape(-1)[::apart])
            self._keep(mode, _Sample(ids, 0, tokens=False))
        if tokens is not None:
            sample = tokens.reshape(-1)[:: _apart(tokens.numel(), ROWS)]
            self._keep(mode, _Sample([sample], 0, tokens=True))
        for name, batch in data.inputs.items():
            seen = sample_channels(name, batch)
            if seen is not None:
                self._keep(mode, seen)
        self._paid(began, mode)

    def _sample_classes(
        self, scores: torch.Tensor, target: torch.Tensor, mode: Mode, ignored: int = IGNORED
    ) -> None:
        with torch.no_grad():
            classes = scores.shape[min(1, scores.dim() - 1)]
            if target.numel() == 0 or classes < 2:
                return
            if classes > MAX_CLASSES:
                sample = target.reshape(-1)[:: _apart(target.numel(), ROWS)]
                self._keep(mode, _Sample([_left_out(sample, ignored)], 0, tokens=True))
                return
            rows = max(1, min(ROWS, SCORES // classes))
            if target.dim() == 0:
                scores, target = scores[None], target[None]
            elif target.dim() > 1:
                width = target.shape[-1]
                scores, target = scores.flatten(2), target.flatten(1)
                apart = min(_apart(target.numel(), rows), target.shape[1])
                if apart > 1 and apart % width == 0:
                    apart += 1  # not the same column of the image each time
                scores, target = scores[:, :, ::apart], target[:, ::apart]
            apart = _apart(target.numel(), rows)
            scores, target = scores[::apart], target[::apart]
            target = _left_out(target, ignored)
            self._keep(mode, _Sample([target, scores.argmax(1)], classes, tokens=False))

    # -- when, and what becomes of it -----------------------------------------------------------

    def _wanted(self, mode: Mode) -> bool:
        if mode == "train":
            return self.due
        now = time.perf_counter()
        if self._began is None:
            self._began, self._eval_spent = now, 0.0
            self.wakes = 0
        return self._by_steps or self._eval_spent <= SHARE * (now - self._began)

    def _paid(self, began: float, mode: Mode) -> None:
        spent = time.thread_time() - began
        self.spent_s += spent
        if mode == "train":
            self.due = False
            self._costs.append(spent)
        else:
            self._eval_spent += spent

    def _keep(self, mode: Mode, seen: _Sample | ChannelLook) -> None:
        self._waiting.append((mode, seen))
        self._poll()
        if self._waiting:
            self.wakes = 0

    def _poll(self) -> None:
        while self._waiting and self._waiting[0][1].ready:
            mode, seen = self._waiting.popleft()
            counted = self._counted[mode]
            if isinstance(seen, ChannelLook):
                counted.inputs.add(seen)
                continue
            labels, predictions = seen.ids()
            if seen.tokens:
                counted.tokens.add(labels)
            else:
                counted.classes.add(labels, predictions, seen.classes)

    def stepped(self, training: Training, step: int) -> None:
        """A step of training is over; to be called once it is `wakes` or later."""
        if step + 1 >= self._next:
            every = self._interval(step)
            if self.due and step >= MAX_INTERVAL and not self._by_steps:
                every = MAX_INTERVAL  # no loss has come by: the next that does is looked at
            if self._costs:
                training.schedule.others["labels"] = every
            self._next = step + 1 + every
            if every >= MAX_INTERVAL:
                self._next -= step % every  # behind the step at which the record is sent
            self._every = max(SEND_EVERY, every)
            self.due = True
        if self._waiting:
            self._poll()
        if self._began is not None:
            # An evaluation came before this step; what it has copied has long arrived.
            self._began = None
            self._send(training, "eval", max(0, step - 1))
        if step >= self._send_at:
            self._send_at = _next_record(step)
            self._send(training, "train", step)
        self.wakes = 0 if self._waiting else min(self._next - 1, self._send_at)

    def _interval(self, step: int) -> int:
        """Steps to the look after the next."""
        if self._by_steps:
            return EVERY
        late = self._late.checked(step)
        if step >= LATE:
            return late
        now = time.perf_counter()
        last, self._armed_at = self._armed_at, (step, now)
        if last is None or not self._costs or step == last[0]:
            return EVERY
        step_s = (now - last[1]) / (step - last[0])
        # The cheapest of the last: a first look pays for much that comes once.
        wanted = round(min(self._costs) / max(1e-9, TRAIN_SHARE * step_s))
        # Round ones, so that it is not one step for this look and the next for another.
        return next((every for every in INTERVALS if every >= wanted), MAX_INTERVAL)

    def close(self, training: Training) -> None:
        """The training is over: send what was counted."""
        self._poll()
        step = training.last_step or 0
        for mode in self._counted:
            self._send(training, mode, step)

    def _send(self, training: Training, mode: Mode, step: int) -> None:
        counted = self._counted[mode]
        if not counted:
            return
        for table in counted.tables():
            training.frame(
                TensorFrame(
                    origin=training.origin,
                    step=step,
                    mode=mode,
                    collection=table.collection,
                    rows=table.names,
                    columns=table.columns,
                    values=table.values,
                    count_columns=table.count_columns,
                    counts=table.counts,
                    at_us=unix_us(),
                    every=self._every if mode == "train" else 1,
                )
            )


def _next_record(step: int) -> int:
    """The step behind which what was counted is sent next."""
    later = (step // SEND_EVERY + 1) * SEND_EVERY
    return next((early for early in SEND_EARLY if early > step), later)


def _apart(numel: int, wanted: int) -> int:
    return max(1, -(-numel // wanted))


def _left_out(target: torch.Tensor, ignored: int) -> torch.Tensor:
    """The targets, below zero where the loss leaves them out: padding is no class."""
    return target if ignored < 0 else target.masked_fill(target == ignored, -1)
