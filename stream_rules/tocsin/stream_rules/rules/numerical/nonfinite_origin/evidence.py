"""Evidence for `nonfinite`: what was bad at one step, by rank, and what that shows of the origin.

Under data parallelism one rank's NaN is in every rank's gradients after the reduce, in the same
step. So the origin is a rank whose loss, or whose own gradients before the reduce, were bad; a rank
with only bad reduced gradients is a consequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.frames import Counts, TensorFrame

GRADIENTS: Final = "gradients"
LOCAL: Final = "local_gradients"
_NAMES: Final = 33


@dataclass(slots=True)
class BadTensors:
    """The bad rows of one collection at the step; `names` are the first of them, in frame order."""

    rows: int = 0
    bad: int = 0
    nans: int = 0
    infs: int = 0
    names: list[str] = field(default_factory=list)
    parts_left: int = 0


@dataclass(slots=True)
class RankEvidence:
    """What one rank sent of the step.

    Attributes:
        scalars: its scalars of that step are there.
        passed: it has spoken of a later step, or has ended: nothing of this one is to come.
        loss: the loss, if it was bad.
        bad_gradients: how many gradients were bad, by the scalars.
        row: bad steps in a row, this one the first; `last_bad` the last of them.
        clipped: its gradients were clipped by their common norm, before they were summarised.
        backward: the backward call of the step with which its own gradients became bad, from 0.
    """

    scalars: bool = False
    passed: bool = False
    loss: float | None = None
    bad_gradients: int = 0
    row: int = 0
    last_bad: int = -1
    backward: int = 0
    clipped: bool = False
    collections: dict[str, BadTensors] = field(default_factory=dict)

    def tensors(self, collection: str) -> BadTensors | None:
        """The collection, if it has bad rows."""
        found = self.collections.get(collection)
        return found if found is not None and found.bad else None

    @property
    def bad_at_home(self) -> bool:
        """Whether its loss or its own gradients were bad."""
        return self.loss is not None or self.tensors(LOCAL) is not None

    @property
    def bad(self) -> bool:
        """Whether anything was."""
        return (
            self.loss is not None
            or self.bad_gradients > 0
            or any(found.bad for found in self.collections.values())
        )

    def bad_again(self, step: int) -> None:
        """Another bad step, or more of the same one."""
        if step > self.last_bad:
            self.last_bad = step
            self.row += 1

    def complete(self, *, several_ranks: bool) -> bool:
        """Whether nothing more is to be expected from the rank for this step."""
        if self.passed:
            return True
        if not self.scalars or any(found.parts_left for found in self.collections.values()):
            return False
        if self.bad_gradients and GRADIENTS not in self.collections:
            return False
        # Whether gradients were bad before the reduce, a frame of their own would show.
        return not (several_ranks and self.bad_gradients) or self.bad_at_home


@dataclass(slots=True)
class Pending:
    """A step at which something was bad, until its origin is decided.

    `since_ms`: when it was bad for long enough; from then on the decision waits for evidence only.
    `late_ranks`: the time for that was over, and a rank had not reported the step yet.
    """

    step: int
    opened_ms: int
    several_ranks: bool
    since_ms: int | None = None
    late_ranks: bool = False
    ranks: dict[int, RankEvidence] = field(default_factory=dict)

    def rank(self, number: int) -> RankEvidence:
        """The rank's evidence, made if it is not there."""
        return self.ranks.setdefault(number, RankEvidence())

    def settled(self) -> bool:
        """Whether each rank that was bad has sent all, or those in which it began have."""
        bad = [rank for rank in self.ranks.values() if rank.bad]
        first = [rank for rank in bad if rank.bad_at_home]
        if first and min(rank.backward for rank in first) > 0:
            first = []  # an earlier average of the same step may have brought it from another rank
        return bool(bad) and all(
            rank.complete(several_ranks=self.several_ranks) for rank in first or bad
        )

    @property
    def begun_at_home(self) -> bool:
        """Whether a rank is known in which it may have begun."""
        return any(rank.bad_at_home for rank in self.ranks.values())

    def origin(self) -> tuple[int, RankEvidence]:
        """The rank in which it began.

        Where gradients are averaged after each of several backward calls, one rank's NaN is in the
        others' own gradients from the next call on: it began where it came with the first of them.
        """
        bad = [number for number, rank in self.ranks.items() if rank.bad]
        at_home = [number for number in bad if self.ranks[number].bad_at_home]
        number = min(at_home or bad, key=lambda rank: (self.ranks[rank].backward, rank))
        return number, self.ranks[number]


def bad_rows(frame: TensorFrame, *, only_nan: bool) -> Counts | None:
    """How many NaNs (and infinities) each row has; None if the frame does not count them."""
    nans = frame.count("nans")
    infs = None if only_nan else frame.count("infs")
    if nans is None or infs is None:
        return nans if infs is None else infs
    return nans + infs


def first_backward(frame: TensorFrame, counts: Counts) -> int:
    """The lowest number of a backward call that brought a bad row; 0 if that was not captured."""
    column = frame.column("backward")
    if column is None or not counts.any():
        return 0
    lowest = float(column[counts > 0].min())
    return int(lowest) if lowest > 0 else 0


def add_rows(found: BadTensors | None, frame: TensorFrame, counts: Counts) -> BadTensors:
    """Add a frame, or a part of one, to what is known of its collection."""
    found = found or BadTensors(parts_left=frame.parts)
    where = counts.nonzero()[0]
    nans, infs = frame.count("nans"), frame.count("infs")
    found.rows += len(frame.rows)
    found.bad += len(where)
    found.nans += 0 if nans is None else int(nans.sum())
    found.infs += 0 if infs is None else int(infs.sum())
    room = _NAMES - len(found.names)
    found.names += [frame.rows[i] for i in where[:room]]
    found.parts_left = max(0, found.parts_left - 1)
    return found
