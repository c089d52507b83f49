"""Rules of a user's, of which one does what `how` says from step `at` on."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcome
from tocsin.stream_rules.reading.tensor_rows import doubles
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule

_KEPT: list[bytearray] = []


class HighLossParams(Params):
    """Parameters of `high_loss`."""

    limit: float = 3.0
    """A loss above it is high."""


@dataclass(slots=True)
class HighLossState:
    """The highest loss so far."""

    highest: float = 0.0
    steps: int = 0


class HighLoss(Rule[HighLossParams, HighLossState]):
    """The loss is above a limit."""

    meta = RuleMeta(
        name="high_loss",
        version=1,
        family="progress",
        meaning="The loss is above a limit.",
        severity="warning",
        inputs=(scalar("loss"),),
        remedy="Lower it.",
        params=HighLossParams,
        capture_hint="Log a loss.",
        resolve_after_steps=0,
    )
    state_type = HighLossState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        losses = frame.column("loss")
        assert losses is not None
        for step, loss in zip(frame.steps.tolist(), losses.tolist(), strict=True):
            self.state.steps += 1
            self.state.highest = max(self.state.highest, loss)
            if loss > self.params.limit:
                yield Finding(
                    subject=Subject(kind="loss", name="loss"),
                    reason=f"loss {loss:g} at step {step}, the {self.state.steps}th",
                    first_step=step,
                )
            else:
                yield Clear(step)


class LargeRowParams(Params):
    """Parameters of `large_row`."""

    limit: float = 10.0
    """A value above it is large."""


class LargeRow(TensorRowRule[LargeRowParams, RowState]):
    """A weight has a large value; where ranks have parts of the model, each part is read."""

    meta = RuleMeta(
        name="large_row",
        version=1,
        family="numerical",
        meaning="A weight has a large value.",
        severity="warning",
        inputs=(tensors("weights"),),
        remedy="Lower it.",
        params=LargeRowParams,
        resolve_after_steps=0,
    )
    state_type = RowState
    columns = ("absmax",)

    def reads(self, frame: TensorFrame) -> bool:
        return not any(row.startswith("skipped") for row in frame.rows)

    def on_table(self, table: TensorFrame, at: Moment) -> Iterable[Outcome]:
        size = doubles(table, "absmax")
        rows = [i for i, value in enumerate(size) if value > self.params.limit]
        if rows:
            reason = f"{table.rows[rows[0]]} has a value of {size[rows[0]]:g}"
            yield self.row_finding(table, rows, reason=reason, first_step=table.step)


How = Literal[
    "well",
    "raise",
    "loop",
    "sleep",
    "slow",
    "leak",
    "exit",
    "segfault",
    "sys_exit",
    "kill",
    "loop_in_snapshot",
    "exit_in_restore",
    "huge",
]


class SickParams(Params):
    """Parameters of `sick`."""

    how: How = "well"
    """What it does."""
    at: int = 10
    """From which step on."""


@dataclass(slots=True)
class SickState:
    """The steps seen."""

    steps: list[int] = field(default_factory=list)


class Sick(Rule[SickParams, SickState]):
    """It does what it is told."""

    meta = RuleMeta(
        name="sick",
        version=1,
        family="progress",
        meaning="It does what it is told.",
        severity="info",
        inputs=(scalar("loss"),),
        remedy="None.",
        params=SickParams,
    )
    state_type = SickState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        for step in frame.steps.tolist():
            self.state.steps.append(step)
            if step >= self.params.at:
                self._do(self.params.how)
        return ()

    def snapshot(self) -> bytes:
        if self.params.how == "loop_in_snapshot" and self.state.steps[-1:] >= [self.params.at]:
            self._do("loop")
        return super().snapshot()

    def restore(self, payload: bytes) -> None:
        super().restore(payload)
        if self.params.how == "exit_in_restore" and self.state.steps[-1:] >= [self.params.at]:
            os._exit(3)

    def _do(self, how: How) -> None:
        if how == "raise":
            raise ValueError("sick")
        if how == "loop":
            while True:
                pass
        if how == "sleep":
            time.sleep(3600)
        if how == "slow":
            time.sleep(0.3)
        if how == "leak":
            _KEPT.append(bytearray(os.urandom(1) * (8 * 2**20)))
        if how == "exit":
            os._exit(0)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "sys_exit":
            raise SystemExit(1)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "huge":
            bytearray(2**40)
