"""Evaluations of a run, each with the training loss of the steps before it.

An evaluation is all evaluation losses that one rank has sent after the same training step. It is
complete when those of a later step come, when the training has gone on for some steps (the losses
of a GPU arrive late), or when the run is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Series
from tocsin.schemas.records.runs import RunData, RunEnded
from tocsin.stream_rules.outcomes import Moment
from tocsin.stream_rules.reading.rank_series import PointHistory

PATIENCE_STEPS: Final = 20
TRAIN_STEPS: Final = 100
"""The training loss beside an evaluation is the mean over so many steps before it, at most."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation: after which step, and its mean losses; `at_ms` is the append time of its first
    loss."""

    step: int
    train: float | None
    loss: float
    at_ms: int


@dataclass(slots=True)
class _Under:
    step: int
    at_ms: int
    total: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Evaluations:
    """The evaluations of the lowest rank that evaluates, as they become complete.

    The training losses are those of the lowest rank that sends any: under data parallelism they
    tell the same, and not every rank evaluates.
    """

    rank: int | None = None
    train_rank: int | None = None
    last_train: int = -1
    recent: list[tuple[int, float]] = field(default_factory=list)
    under: _Under | None = None
    done: int = -1
    losses: PointHistory = field(default_factory=PointHistory)

    def complete(self, frame: StepFrame, at: Moment) -> Iterator[Evaluation]:
        """Take losses in; give the evaluations that are complete now."""
        column, rank = frame.column("loss"), frame.origin.rank
        if column is None or frame.mode not in ("train", "eval"):
            return
        training = frame.mode == "train"
        lead = self.train_rank if training else self.rank
        if lead is not None and rank > lead:
            return
        if rank != lead and training:
            self.train_rank, self.last_train, self.recent = rank, -1, []
        elif rank != lead:
            self.rank, self.under = rank, None
        for step, loss in zip(frame.steps.tolist(), column.tolist(), strict=True):
            if training:
                yield from self._train(step, loss)
            elif step > self.done:
                yield from self._evaluated(step, loss, at)

    def end(self, data: RunData, at: Moment) -> Iterator[Evaluation]:
        """The last one is complete when its rank, or the run, has ended."""
        if isinstance(data, RunEnded) and (at.run.ended or data.rank == self.rank):
            yield from self._close()

    def series(self, name: str, limit: float | None = None) -> Series:
        """The evaluation losses, for the evidence."""
        return self.losses.series(name, limit=limit)

    def _train(self, step: int, loss: float) -> Iterator[Evaluation]:
        if self.under is not None and step > self.under.step + PATIENCE_STEPS:
            yield from self._close()
        if step > self.last_train:
            self.last_train = step
            if math.isfinite(loss):
                # Those that come before an evaluation is complete are kept beside those before it.
                self.recent = [*self.recent, (step, loss)][-TRAIN_STEPS - PATIENCE_STEPS - 1 :]

    def _evaluated(self, step: int, loss: float, at: Moment) -> Iterator[Evaluation]:
        if self.under is not None and step != self.under.step:
            yield from self._close()
        if self.under is None:
            self.under = _Under(step, at.now_ms)
        if math.isfinite(loss):
            self.under.total += loss
            self.under.count += 1

    def _close(self) -> Iterator[Evaluation]:
        under, self.under = self.under, None
        if under is None:
            return
        self.done = max(self.done, under.step)
        if not under.count:
            return
        loss = under.total / under.count
        self.losses.append(under.step, loss)
        before = [value for step, value in self.recent if step <= under.step][-TRAIN_STEPS:]
        train = sum(before) / len(before) if before else None
        yield Evaluation(under.step, train, loss, under.at_ms)
