"""What rules know of other runs: the summaries and losses of those that an instance names.

A rule sees one run. One that compares it with another names that (`Rule.other_runs`), and is handed
what the other's records have told (`Rule.on_references`): live, the service reads them from the
bus beside its own partitions, and in a replay they are among the records, in front of the run's
own. Reading is idempotent, so it does not matter how often a record comes, nor by which way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tocsin.bus.port import Record
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.stream_rules.reading.tensor_rows import LowestRankRows

COLLECTIONS: Final = ("gradients", "weights", "optimizer_state")
"""Collections of another run that are kept."""

MAX_BYTES: Final = 64 << 20
"""Of summaries of one other run; what comes later is not kept: the first difference counts."""

_NAME_BYTES: Final = 100
_LOSS_BYTES: Final = 100


@dataclass(slots=True)
class Reference:
    """The lowest rank of the newest incarnation of another run, in training.

    `full`: not all of it was kept, up to `last_step`.
    """

    run_id: str
    incarnation: str = ""
    full: bool = False
    rank: int | None = None
    last_step: int = -1
    _losses: dict[int, float] = field(default_factory=dict)
    _frames: dict[tuple[str, int], TensorFrame] = field(default_factory=dict)
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _whole: dict[str, LowestRankRows] = field(default_factory=dict)
    _past: set[str] = field(default_factory=set)
    _bytes: int = 0

    @property
    def known(self) -> bool:
        """Whether anything of it has come."""
        return self.last_step >= 0

    def frame(self, collection: str, step: int) -> TensorFrame | None:
        """The whole summary of that collection and step; None: there is none."""
        return self._frames.get((collection, step))

    def loss(self, step: int) -> float | None:
        """The loss of that step; None: it is not known."""
        return self._losses.get(step)

    def add(self, value: object) -> None:
        """A record of that run."""
        if not isinstance(value, TensorFrame | StepFrame) or value.mode != "train":
            return
        origin = value.origin
        if not self._start(origin.incarnation) or not self._leads(origin.rank):
            return
        if isinstance(value, StepFrame):
            self._add_losses(value)
        elif value.collection in COLLECTIONS:
            whole = self._whole.setdefault(value.collection, LowestRankRows()).assemble(value)
            if whole is not None:
                self._keep(whole)

    def _start(self, incarnation: str) -> bool:
        """Whether it is of the incarnation at hand, or of a new one, which begins."""
        if incarnation in self._past:
            return False
        if incarnation != self.incarnation:
            if self.incarnation:
                self._past.add(self.incarnation)
            self.incarnation = incarnation
            self._reset()
        return True

    def _leads(self, rank: int) -> bool:
        if self.rank is not None and rank > self.rank:
            return False
        if rank != self.rank:
            self._reset()
            self.rank = rank
        return True

    def _reset(self) -> None:
        self.full = False
        self.rank, self.last_step = None, -1
        self._losses, self._frames, self._names, self._whole = {}, {}, {}, {}
        self._bytes = 0

    def _add_losses(self, frame: StepFrame) -> None:
        losses = frame.column("loss")
        if losses is None or self.full:
            return
        for step, loss in zip(frame.steps.tolist(), losses.tolist(), strict=True):
            self._losses.setdefault(step, loss)
            self.last_step = max(self.last_step, step)
        self._grow(_LOSS_BYTES * frame.steps.size)

    def _keep(self, frame: TensorFrame) -> None:
        if self.full:
            return
        self.last_step = max(self.last_step, frame.step)
        if (frame.collection, frame.step) in self._frames:
            return
        names = self._names.get(frame.collection)
        if names == frame.rows:
            # The names weigh more than the numbers, and are the same each time.
            frame = replace(frame, rows=names)
        else:
            self._names[frame.collection] = frame.rows
            self._grow(_NAME_BYTES * len(frame.rows))
        self._frames[frame.collection, frame.step] = frame
        self._grow(frame.values.nbytes + frame.counts.nbytes)

    def _grow(self, size: int) -> None:
        self._bytes += size
        self.full = self._bytes >= MAX_BYTES


class References:
    """The other runs that the rules of an engine name."""

    def __init__(self, run_ids: Iterable[str] = ()) -> None:
        self._runs: Final = {run_id: Reference(run_id) for run_id in run_ids}

    @property
    def run_ids(self) -> Collection[str]:
        """Which runs are named."""
        return self._runs.keys()

    def get(self, run_id: str) -> Reference | None:
        """The data of a referenced run; None if no rule names it."""
        return self._runs.get(run_id)

    def read(self, record: Record) -> None:
        """Take in a record of telemetry, if it is of one of them. One that cannot be read is
        passed over."""
        reference = self._runs.get(record.key.decode(errors="replace"))
        if reference is None or record.value is None:
            return
        try:
            reference.add(decode(read_meta(record.headers), record.value))
        except RecordError:
            return


def differs(
    ours: TensorFrame, theirs: TensorFrame, rtol: float
) -> list[tuple[str, str, float, float]]:
    """Where two summaries of the same tensors differ: name, statistic, our value, theirs.

    One statistic of each tensor, that which differs most. Places and averages are measured against
    the largest absolute value, sums and lengths against themselves; values that are no numbers
    differ where only one of them is none. Tensors that only one of the runs has are left out.
    """
    at = {name: i for i, name in enumerate(theirs.rows)}
    pairs = [(i, at[name]) for i, name in enumerate(ours.rows) if name in at]
    if not pairs:
        return []
    mine, other = (list(side) for side in zip(*pairs, strict=True))
    columns = [c for c in _COMPARED if c in ours.columns and c in theirs.columns]
    counted = [c for c in ("nans", "infs") if c in ours.count_columns and c in theirs.count_columns]
    a = np.array([_column(ours, c)[mine] for c in (*columns, *counted)], np.float64)
    b = np.array([_column(theirs, c)[other] for c in (*columns, *counted)], np.float64)
    scale = np.maximum(np.abs(a), np.abs(b))
    if "absmax" in columns:
        largest = scale[columns.index("absmax")]
        for i, name in enumerate(columns):
            if name in _PLACES:
                scale[i] = largest
    with np.errstate(all="ignore"):
        ratio = np.abs(a - b) / scale
    ratio = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(ratio, nan=np.inf))
    worst = ratio.argmax(axis=0)
    found = []
    for k in np.flatnonzero(ratio.max(axis=0) > rtol).tolist():
        i = int(worst[k])
        name = (*columns, *counted)[i]
        found.append((ours.rows[mine[k]], name, float(a[i, k]), float(b[i, k])))
    return found


_COMPARED: Final[tuple[str, ...]] = ("l2", "l1", "mean", "std", "min", "max", "absmax")
_PLACES: Final[tuple[str, ...]] = ("mean", "std", "min", "max")


def _column(frame: TensorFrame, name: str) -> npt.NDArray[np.float64]:
    found = frame.column(name) if name in frame.columns else frame.count(name)
    assert found is not None
    return found.astype(np.float64)
