"""From the tensors of a step to its records: scalars, full rows, and what is odd at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tocsin.emitter.activations import Seen
from tocsin.emitter.host_copy import HostCopy
from tocsin.emitter.outbox import StepRow
from tocsin.emitter.summaries import Rows, Summary, norms, rows_of_norms
from tocsin.emitter.training import Training
from tocsin.emitter.updates import UPDATE_COLUMNS, Updates
from tocsin.schemas.telemetry import (
    COUNT_COLUMNS,
    STATISTIC_COLUMNS,
    Counts,
    Floats,
    TensorFrame,
)

AT_ONCE: Final = 3
"""Non-finite steps in a row whose rows are sent at once; later ones wait for their interval."""


@dataclass(slots=True)
class Part:
    """What one optimizer's gradients say at one step: norms on the host, or on their way."""

    names: list[str]
    numel: list[int]
    norms: Floats | HostCopy
    rows: Rows | None = None
    summary: Summary | None = None
    copy: HostCopy | None = None
    scale: float = 1.0
    primary: bool = True


@dataclass(slots=True)
class Draft:
    """A finished step whose numbers may not all be here yet."""

    step: int
    at_us: int
    columns: list[str]
    values: list[float]
    losses: list[float] | HostCopy
    parts: list[Part]
    weights: Part | None
    due: bool
    local: list[tuple[str, Floats, Counts]]
    clipped: list[float] | HostCopy
    """The norms that the gradients had before they were clipped; empty: they were not."""

    updates: Updates | None = None
    activations: Seen | None = None

    @property
    def ready(self) -> bool:
        """Whether all numbers are here; never waits."""
        copies = [self.losses, self.clipped, *(c for p in self.parts for c in (p.norms, p.copy))]
        if self.weights is not None:
            copies.append(self.weights.copy)
        if self.updates is not None and isinstance(self.updates.packed, HostCopy):
            copies.append(self.updates.packed)
        if self.activations is not None:
            copies.append(self.activations.copy)
        return all(copy.ready() for copy in copies if isinstance(copy, HostCopy))


def part_of(names: list[str], flat: list[torch.Tensor], *, full: bool) -> Part:
    """Read flat tensors: norms, and full rows if wanted. On a GPU the numbers come later."""
    numel = [tensor.numel() for tensor in flat]
    with torch.no_grad():
        devices = {tensor.device for tensor in flat}
        if devices == {torch.device("cpu")}:
            if not full:
                return Part(names, numel, norms(flat).numpy())
            rows = rows_now(flat)
            return Part(names, numel, _norms_of(rows), rows)
        if len(devices) > 1:
            home = flat[0].device
            stacked = torch.stack([norms([tensor])[0].to(home) for tensor in flat])
            return Part(names, numel, HostCopy(stacked))
        part = Part(names, numel, HostCopy(norms(flat)))
        if full:
            part.summary = Summary(flat)
            packed = part.summary.packed
            part.copy = None if packed is None else HostCopy(packed)
        return part


def rows_now(flat: list[torch.Tensor]) -> Rows:
    """Full rows of tensors on the CPU."""
    with torch.no_grad():
        return Summary(flat).rows()


def _norms_of(rows: Rows) -> Floats:
    """The norms that belong to full rows: NaN where a tensor is not finite."""
    l2 = rows.values[:, STATISTIC_COLUMNS.index("l2")].copy()
    l2[rows.counts[:, 3] > 0] = np.inf
    l2[rows.counts[:, 2] > 0] = np.nan
    return l2


class Reporter:
    """Makes the records of finished steps, in order."""

    def __init__(self, training: Training) -> None:
        self.odd_streak = 0
        self.last_odd: int | None = None
        self._training = training
        self._finite: bool | None = None
        self._finite_step = -1

    def finish(self, draft: Draft) -> None:
        """Send what a step has to say; all its numbers are here."""
        values = draft.losses.values() if isinstance(draft.losses, HostCopy) else draft.losses
        columns, numbers = [], []
        if len(values):
            total = float(sum(float(v) for v in values))
            columns.append("loss")
            numbers.append(total)
            if len(values) > 1:
                columns += ("loss_mean", "micro_batches")
                numbers += (total / len(values), float(len(values)))
        bad = 0
        square = 0.0
        for part in draft.parts:
            norm = part.norms.values() if isinstance(part.norms, HostCopy) else part.norms
            if part.copy is not None and part.summary is not None:
                part.rows = part.summary.rows(part.copy.values())
            bad += int(
                (~np.isfinite(norm)).sum() if part.rows is None else part.rows.nonfinite.sum()
            )
            if part.primary:
                square += float(np.square(norm.astype(np.float64)).sum()) / part.scale**2
        if draft.parts:
            norm_now = math.sqrt(square) if square >= 0 else math.nan
            clipped = draft.clipped
            before = clipped.values() if isinstance(clipped, HostCopy) else np.asarray(clipped)
            if before.size:
                scale = next((part.scale for part in draft.parts if part.primary), 1.0)
                columns += ("gradient_norm", "gradient_norm_clipped")
                numbers += (float(np.linalg.norm(before)) / scale, norm_now)
            else:
                columns.append("gradient_norm")
                numbers.append(norm_now)
            columns.append("gradient_nonfinite")
            numbers.append(float(bad))
        odd = bad > 0 or bool(draft.local) or (len(values) > 0 and not math.isfinite(numbers[0]))
        row = StepRow(
            draft.step,
            draft.at_us,
            (*columns, *draft.columns),
            (*numbers, *draft.values),
        )
        self._training.sender.row(row, urgent=odd)
        self.odd_streak = self.odd_streak + 1 if odd else 0
        if odd:
            self.last_odd = draft.step
        if draft.due or (odd and self.odd_streak <= AT_ONCE):
            self._send_gradients(draft, odd)
        if draft.local:
            names, rows, counts = zip(*draft.local, strict=True)
            self._send("local_gradients", draft, names, np.stack(rows), np.stack(counts), odd)
        if draft.weights is not None:
            self._send_weights(draft, draft.weights)
        if draft.updates is not None:
            self._send_sampled("updates", draft, draft.updates.rows(), UPDATE_COLUMNS)
        if draft.activations is not None:
            self._send_sampled("activations", draft, draft.activations.rows(), ("dead",))

    def _send_gradients(self, draft: Draft, odd: bool) -> None:
        full = [p for p in draft.parts if p.rows is not None]
        if full:
            names = tuple(name for p in full for name in p.names)
            values = np.concatenate([p.rows.values for p in full if p.rows is not None])
            counts = np.concatenate([p.rows.counts for p in full if p.rows is not None])
            self._send("gradients", draft, names, values, counts, odd)
            return
        if not draft.parts:
            return
        # On a GPU the tensors had gone when their norms arrived: what the norms say.
        names = tuple(name for p in draft.parts for name in p.names)
        pairs = [
            rows_of_norms(
                p.norms.values() if isinstance(p.norms, HostCopy) else p.norms,
                p.numel,
            )
            for p in draft.parts
        ]
        self._send(
            "gradients",
            draft,
            names,
            np.concatenate([v for v, _ in pairs]),
            np.concatenate([c for _, c in pairs]),
            odd,
            columns=("l2",),
            count_columns=("numel", "nans", "infs"),
        )

    def _send_weights(self, draft: Draft, part: Part) -> None:
        rows = part.rows
        if rows is None and part.summary is not None and part.copy is not None:
            rows = part.summary.rows(part.copy.values())
        if rows is None:
            return
        self._finite, self._finite_step = not bool(rows.nonfinite.any()), draft.step
        self._send("weights", draft, tuple(part.names), rows.values, rows.counts, not self._finite)

    def _send_sampled(
        self,
        collection: str,
        draft: Draft,
        rows: tuple[tuple[str, ...], Floats, Counts],
        columns: tuple[str, ...],
    ) -> None:
        """What a sample of each tensor says: names, `columns`, and how many numbers it is of."""
        names, values, counts = rows
        if names:
            self._send(
                collection,
                draft,
                names,
                values,
                counts,
                False,
                columns=columns,
                count_columns=("numel",),
            )

    def _send(
        self,
        collection: str,
        draft: Draft,
        names: tuple[str, ...],
        values: Floats,
        counts: Counts,
        urgent: bool,
        *,
        columns: tuple[str, ...] = STATISTIC_COLUMNS,
        count_columns: tuple[str, ...] = COUNT_COLUMNS,
    ) -> None:
        kept = "weights" if collection == "updates" else collection
        every = self._training.settings.every.get(kept, 1)
        frame = TensorFrame(
            speaker=self._training.speaker,
            step=draft.step,
            collection=collection,
            rows=names,
            columns=columns,
            values=values,
            count_columns=count_columns,
            counts=counts,
            at_us=draft.at_us,
            every=every,
        )
        self._training.frame(frame, urgent=urgent)

    def finite_at(self, step: int) -> bool:
        """Whether the weights after this step are finite, from what was seen so far."""
        if self.last_odd is None or self.last_odd > step:
            return self._finite is not False
        return bool(self._finite) and self._finite_step > self.last_odd
