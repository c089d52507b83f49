"""This rank's own gradients, before the ranks are averaged: their norm, and which are not finite.

After the reduce a NaN of one rank is everybody's; only before it can be seen whose it was. So each
gradient is looked at as soon as it is complete, on its way to the reduce. It has just been written
then and is in the cache, so that reading all of it costs little more than a block would (0.07 ns
per number, and some microseconds per tensor). Where that is more than the budget has for it, only
each n-th parameter is looked at, each step others, and of large ones only a block; and all of them
where the exact norm is due, or something was bad a step ago. Blocks are read as soon as all of the
large ones are over the budget at each step, and until they no longer would be.

A gradient that is averaged several times in a step, without `no_sync`, has the other ranks' NaN in
it from the second time on. So the number of the backward call in which it was first bad is sent,
too: where it began is where that is lowest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tocsin.emitter.model.tensor_refs import TensorRef, ref_to
from tocsin.emitter.plan.schedule import LOCAL, NORMS, CaptureSchedule
from tocsin.emitter.statistics.arrays import BLOCK, block, narrowed
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.reductions import dense, exact_row, norms
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import COUNT_COLUMNS, STATISTIC_COLUMNS, Counts, Floats

LOCAL_GRADIENTS: Final = "local_gradients"
"""The collection: rows of what was bad, with the column `backward`."""

EXACT_ROWS: Final = 3
"""Bad steps in a row whose rows are counted exactly; later ones only name the place."""

_COLUMNS: Final = (*STATISTIC_COLUMNS, "backward")
_Bad = tuple[Floats, Counts]


class LocalReading:
    """The numbers of this rank's own gradients of one step; on a GPU later."""

    def __init__(
        self,
        bad: dict[str, _Bad],
        square: float | None,
        copied: tuple[list[str], HostCopy] | None,
        backward: int,
    ) -> None:
        self._bad = bad
        self._square = square
        self._copied = copied
        self._backward = backward

    @property
    def ready(self) -> bool:
        """Whether the numbers are on the host; never waits."""
        return self._copied is None or self._copied[1].ready()

    @property
    def norm(self) -> float | None:
        """The L2 norm of all of them together, once ready; None: not all were read."""
        self._land()
        return None if self._square is None else math.sqrt(self._square)

    @property
    def bad(self) -> bool:
        """Whether any is not finite, once ready."""
        self._land()
        return bool(self._bad)

    def tables(self) -> Iterator[Table]:
        """One row for each that is not finite."""
        self._land()
        if self._bad:
            values, counts = zip(*self._bad.values(), strict=True)
            yield Table(
                LOCAL_GRADIENTS, tuple(self._bad), np.stack(values), np.stack(counts), _COLUMNS
            )

    def _land(self) -> None:
        if self._copied is None:
            return
        (names, copy), self._copied = self._copied, None
        for name, norm in zip(names, copy.values().tolist(), strict=True):
            if math.isfinite(norm):
                if self._square is not None:
                    self._square += norm**2
            else:
                self._square = None
                self._bad[name] = _lower_bound(norm, self._backward)


class LocalGradients:
    """Looks at the gradients of the parameters that it was given."""

    def __init__(self) -> None:
        self.backward = 0
        """The number of the backward call under way, in its step."""
        self.all_due = True
        """Whether every parameter is looked at in this step."""
        self.scaled = False
        """Whether a loss of this step was scaled: by how much, is known to a GPU alone."""
        self._stride = 1
        self._turn = self._block = 0
        self._whole = True
        self._whole_s: deque[float] = deque(maxlen=7)
        self._partly = False
        self._streak = 0
        self._places = 0
        self._in_use = False
        self._bad: dict[int, _Bad] = {}
        self._squares: dict[int, float] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._watched: dict[int, TensorRef] = {}

    @property
    def active(self) -> bool:
        """Whether there is anything to look at: a model of an earlier training is none."""
        return self._in_use

    def is_new(self, parameter: torch.Tensor) -> int | None:
        """The number of this parameter, of any shape, if it was not watched yet; it is from now on.

        Nothing is written on the parameter itself: it would be pickled with it.
        """
        self._in_use = True
        known = self._watched.get(id(parameter))
        if known is not None and known.get() is parameter:
            return None
        self._watched[id(parameter)] = ref_to(parameter)
        self._places += 1
        return self._places - 1

    def wants(self, place: int) -> bool:
        """Whether it is the turn of the parameter with that number."""
        if self.all_due or (place + self._turn) % self._stride == 0:
            return True
        self._partly = True
        return False

    def read(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter, of any shape, is complete on this rank, so far."""
        gradient = parameter.grad
        if gradient is None:
            return
        self._in_use = True
        values = _readable(gradient)
        if values is None:
            self._sample_other(id(parameter), gradient)
            return
        if values.size > BLOCK and not (self._whole or self.all_due):
            values = values[block(self._block, values.size)]
            self._partly = True
        # An overflow must not warn, nor raise where the user has asked NumPy for that.
        with np.errstate(all="ignore"):
            square = _square(values)
        if square - square != 0.0:  # NaN or infinite
            self._found(id(parameter), gradient)
        else:
            self._squares[id(parameter)] = square

    def drain(self, names: Mapping[int, str]) -> LocalReading | None:
        """The numbers of the step's gradients; None: none was read. They are reset."""
        if not (self._squares or self._bad or self._norms):
            self._partly = False
            return None
        whole = not (self._partly or self._bad or self.scaled)
        square = sum(self._squares.values()) if whole else None
        copied = None
        if self._norms:
            with torch.no_grad():
                home = next(iter(self._norms.values())).device
                packed = torch.cat([norm.to(home) for norm in self._norms.values()])
            copied = [names.get(i, "?") for i in self._norms], HostCopy(packed)
        bad = {names.get(i, "?"): row for i, row in self._bad.items()}
        self._streak = self._streak + 1 if bad else 0
        reading = LocalReading(bad, square, copied, self.backward)
        self.clear()
        return reading

    def clear(self) -> None:
        """Forget them: the step was skipped."""
        self._bad.clear()
        self._squares.clear()
        self._norms.clear()
        self._partly = self.scaled = False

    def reset(self) -> None:
        """Another training begins. What is watched stays so while it lives."""
        self.clear()
        self.backward = self._turn = self._block = self._streak = 0
        self._stride = 1
        self.all_due = self._whole = True
        self._whole_s.clear()
        self._in_use = False
        self._watched = {key: ref for key, ref in self._watched.items() if ref.get() is not None}

    def plan(self, schedule: CaptureSchedule, step: int, spent_s: float) -> None:
        """Before the step of that number; the one before has cost `spent_s`."""
        if spent_s:
            # Where only each n-th was looked at, all of them would have cost n times as much.
            schedule.spent(LOCAL, spent_s, pass_s=spent_s * (1 if self.all_due else self._stride))
            if self.all_due or (self._whole and self._stride == 1):
                self._whole_s.append(spent_s)
                self._whole = schedule.affords(LOCAL, median(self._whole_s))
        self._turn = step
        self._stride = schedule.interval(LOCAL)
        self._whole = self._whole and self._stride == 1
        # Another block whenever its turn comes, not at each step: it could always be the same one.
        self._block = step // self._stride
        self.all_due = self._streak > 0 or schedule.is_due(NORMS, step)

    def _sample_other(self, key: int, gradient: torch.Tensor) -> None:
        """One that NumPy cannot read where it lies."""
        if is_recording():
            return
        with torch.no_grad():
            flat = gradient.detach()
            if flat.layout is torch.sparse_coo:
                # Not coalesced: that costs more than all the rest, and NaN is NaN before it, too.
                flat = flat._values().reshape(-1)
                self._partly = True
            else:
                found = dense(flat)
                if found is None:
                    return
                flat = found
            if flat.numel() == 0:
                return
            if flat.numel() > BLOCK and not (self._whole or self.all_due):
                flat = flat[block(self._block, flat.numel())]
                self._partly = True
            norm = norms([flat])
            if not flat.is_cpu:
                self._norms[key] = norm
                return
            number = float(norm)
        if math.isfinite(number):
            self._squares[key] = number * number
        else:
            self._found(key, gradient)

    def _found(self, key: int, gradient: torch.Tensor) -> None:
        """It may be bad. What was found first in a step stays."""
        if key in self._bad:
            return
        if self._streak >= EXACT_ROWS:
            self._bad[key] = _lower_bound(math.nan, self.backward)
            return
        flat = dense(gradient)
        if flat is None:
            return
        values, counts = exact_row(flat)
        if counts[2] + counts[3]:
            self._bad[key] = (narrowed(np.append(values, self.backward)), counts)
        else:  # its square alone is too large for a float32
            self._partly = True


def _readable(gradient: torch.Tensor) -> npt.NDArray[np.float32] | None:
    """Its numbers in the order of memory, not copied, if NumPy can have them so."""
    if type(gradient) is not torch.Tensor or gradient.dtype is not torch.float32:
        return None
    if not gradient.is_cpu or gradient.requires_grad or gradient.is_neg():
        return None
    try:
        found: npt.NDArray[np.float32] = gradient.numpy().ravel("K")
    except TypeError:  # a sparse one
        return None
    return found


def _square(values: npt.NDArray[np.float32]) -> float:
    """The sum of the squares, with one thread."""
    n = values.size
    if n <= BLOCK:
        return float(np.dot(values, values))
    rows = values[: n - n % BLOCK].reshape(-1, BLOCK)
    rest = values[n - n % BLOCK :]
    return float(_row_squares(rows).sum(dtype=np.float64)) + float(np.dot(rest, rest))


def _row_squares(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if hasattr(np, "vecdot"):  # NumPy 2
        found: npt.NDArray[np.float32] = np.vecdot(rows, rows)
        return found
    return np.array([np.dot(row, row) for row in rows], np.float32)


def _lower_bound(norm: float, backward: int) -> _Bad:
    """A row of which only is known that something is bad."""
    counts = np.zeros(len(COUNT_COLUMNS), np.uint64)
    counts[COUNT_COLUMNS.index("nans" if math.isnan(norm) else "infs")] = 1
    values = np.zeros(len(_COLUMNS), np.float32)
    values[-1] = backward
    return values, counts
