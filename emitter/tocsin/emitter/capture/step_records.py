"""From the numbers of a step to its records: scalars, tables, and what is not finite at once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tocsin.emitter.plan.collections import Schedule
from tocsin.emitter.plan.schedule import CaptureSchedule
from tocsin.emitter.probes.clipped_norms import Clipped
from tocsin.emitter.probes.gradients import GRADIENTS, Reading
from tocsin.emitter.probes.local_gradients import LocalReading
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.statistics.async_copy import HostCopy
from tocsin.emitter.statistics.reductions import rows_of_norms
from tocsin.emitter.statistics.tables import Pending, Table
from tocsin.emitter.statistics.tensor_rows import TensorRows
from tocsin.emitter.training.training import Training

AT_ONCE: Final = 3
"""Non-finite steps in a row whose rows are sent at once; later ones wait for their interval."""


@dataclass(slots=True)
class Draft:
    """A finished step whose numbers may not all be here yet."""

    step: int
    at_us: int
    columns: list[str]
    values: list[float]
    losses: list[float] | HostCopy
    readings: list[Reading]
    clipped: Clipped | None
    """The norms that the gradients had before they were clipped; None: they were not."""

    local: LocalReading | None
    weights: TensorRows | None = None
    probed: list[tuple[str, Pending]] = field(default_factory=list)
    """What else was looked at, with the name of its collection in the schedule."""

    def __post_init__(self) -> None:
        # A step that counts makes its optimizer the main one, which may be news since the reading.
        for reading in self.readings:
            reading.settle()

    @property
    def ready(self) -> bool:
        """Whether all numbers are here; never waits."""
        return (
            (not isinstance(self.losses, HostCopy) or self.losses.ready())
            and all(reading.ready for reading in self.readings)
            and (self.clipped is None or self.clipped.ready)
            and (self.local is None or self.local.ready)
            and (self.weights is None or self.weights.ready)
            and all(pending.ready for _, pending in self.probed)
        )


class Reporter:
    """Makes the records of finished steps, in order."""

    def __init__(self, training: Training, schedule: CaptureSchedule) -> None:
        self.nonfinite_streak = 0
        self.last_nonfinite: int | None = None
        self._training = training
        self._schedule = schedule
        self._finite: bool | None = None
        self._finite_step = -1
        plan = training.settings.plan("losses")
        self._losses = None if plan is None else plan.schedule()
        self.each_loss: Final = self._losses == Schedule()
        """Whether each step sends its loss, which is the default: none has to ask."""

    # The user may have asked NumPy to raise where numbers get too large or too small.
    @np.errstate(all="ignore")
    def finish(self, draft: Draft) -> None:
        """Send the records of a step; all its numbers are here."""
        columns, numbers = [], []
        losses = draft.losses
        found: Sequence[float] = (
            losses.values().tolist() if isinstance(losses, HostCopy) else losses
        )
        nonfinite = draft.local is not None and draft.local.bad
        if found:
            total = sum(found)
            nonfinite = nonfinite or not math.isfinite(total)
            if nonfinite or self.each_loss or self._is_loss_due(draft.step):
                columns.append("loss")
                numbers.append(total)
                if len(found) > 1:
                    columns += ("loss_mean", "micro_batches")
                    numbers += (total / len(found), float(len(found)))
        bad_counts: list[int] = []
        if draft.readings:
            bad_counts = [bad for reading in draft.readings if (bad := reading.bad) is not None]
            nonfinite = nonfinite or any(bad_counts)
        if draft.readings or draft.clipped is not None:
            _norms(draft, columns, numbers, world_size=self._training.origin.world_size)
        if bad_counts:
            columns.append("gradient_nonfinite")
            numbers.append(float(sum(bad_counts)))
        parted = any(reading.parts is not None for reading in draft.readings)
        if draft.local is not None and not parted and (own := draft.local.norm) is not None:
            columns.append("local_gradient_norm")
            numbers.append(own)
        columns += draft.columns
        numbers += draft.values
        row = StepRow(draft.step, draft.at_us, tuple(columns), tuple(numbers))
        self._training.step_row(row, urgent=nonfinite)
        self.nonfinite_streak = self.nonfinite_streak + 1 if nonfinite else 0
        if nonfinite:
            self.last_nonfinite = draft.step
            if self.nonfinite_streak <= AT_ONCE:
                # The newest step, not this one: from a GPU its numbers may have come late.
                self._schedule.alarmed(max(draft.step, self._training.next_step - 1))
        if draft.readings:
            self._send_gradients(draft, nonfinite)
        if draft.local is not None:
            for table in draft.local.tables():
                self._send(draft, table, urgent=nonfinite)
        if draft.weights is not None:
            rows_ = draft.weights.rows
            if draft.weights.whole:
                self._finite = not bool(rows_.nonfinite.any())
                self._finite_step = draft.step
            for table in draft.weights.tables():
                self._send(draft, table, urgent=bool(rows_.nonfinite.any()))
        for name, pending in draft.probed:
            with self._schedule.costs(name, more=True):
                for table in pending.tables():
                    known = self._schedule.has(table.collection)
                    every = self._schedule.interval(table.collection if known else name, draft.step)
                    self._send(draft, table, every=every)

    def _is_loss_due(self, step: int) -> bool:
        return self._losses is not None and self._losses.due(step, 1)

    def _send_gradients(self, draft: Draft, nonfinite: bool) -> None:
        tables = [
            table
            for reading in draft.readings
            if reading.rows is not None
            for table in reading.rows.tables(reading.divisor)
        ]
        if tables:
            for table in _joined(tables):
                self._send(draft, table, urgent=nonfinite)
        elif nonfinite and self.nonfinite_streak <= AT_ONCE:
            # On a GPU the tensors had gone when their norms arrived: rows of the norms.
            for reading in draft.readings:
                exact = reading.exact
                if exact is not None:
                    values, counts = rows_of_norms(exact / reading.divisor, reading.numel)
                    table = Table(
                        GRADIENTS, tuple(reading.names), values, counts,
                        ("l2",), ("numel", "nans", "infs"),
                    )  # fmt: skip
                    self._send(draft, table, urgent=True)

    def _send(
        self, draft: Draft, table: Table, *, urgent: bool = False, every: int | None = None
    ) -> None:
        if not table.names:
            return
        began = time.thread_time()
        frame = table.frame(
            self._training.origin,
            draft.step,
            every=self._schedule.interval(table.collection, draft.step) if every is None else every,
            at_us=draft.at_us,
        )
        self._training.frame(frame, urgent=urgent)
        if every is None:
            self._schedule.spent(table.collection, time.thread_time() - began, more=True)

    def finite_at(self, step: int) -> bool:
        """Whether the weights after this step are finite, from what was seen so far."""
        if self.last_nonfinite is None or self.last_nonfinite > step:
            return self._finite is not False
        return bool(self._finite) and self._finite_step > self.last_nonfinite


def _norms(draft: Draft, columns: list[str], numbers: list[float], *, world_size: int) -> None:
    """The gradient norm of the primary optimizer: exact where it is known, else as estimated.

    Of gradients that are in parts on the ranks, this rank's part: the root of what it adds to the
    square of the norm, since the square itself may be too large for a float32.
    """
    square: float | None = None
    scale, sampled, parted = 1.0, None, False
    for reading in draft.readings:
        if not reading.primary:
            continue
        scale = reading.divisor
        exact = reading.exact
        if reading.parts is not None:
            parted = True
            if exact is not None and draft.clipped is None:
                columns.append("gradient_norm_local_part")
                share = reading.share_of_square(exact, world_size)
                numbers.append(math.sqrt(share) / scale if share >= 0 else math.nan)
            continue
        square = None if exact is None else float(np.square(exact.astype(np.float64)).sum())
        sampled = None if reading.blocks is None else reading.blocks.estimate
    now = None if square is None else math.sqrt(square) if square >= 0 else math.nan
    if draft.clipped is not None:
        before, after = draft.clipped.norms()
        columns += ("gradient_norm", "gradient_norm_clipped")
        numbers += (before / scale, (after if now is None or parted else now) / scale)
    elif parted:
        pass  # the part of this rank is not the norm
    elif now is not None:
        columns.append("gradient_norm")
        numbers.append(now / scale)
    elif sampled is not None:
        columns.append("gradient_norm_sampled")
        numbers.append(sampled / scale)


def _joined(tables: Sequence[Table]) -> list[Table]:
    """Tables of the same collection, one for each optimizer, as one."""
    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[Table]] = {}
    for table in tables:
        key = (table.collection, table.columns, table.count_columns)
        groups.setdefault(key, []).append(table)
    return [
        group[0]
        if len(group) == 1
        else Table(
            collection,
            tuple(name for table in group for name in table.names),
            np.concatenate([table.values for table in group]),
            np.concatenate([table.counts for table in group]),
            columns,
            count_columns,
        )
        for (collection, columns, count_columns), group in groups.items()
    ]
