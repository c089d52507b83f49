"""Numbers of runs, for pages that somebody looks at: from the store and the live bus, kept open.

Each run that is looked at is read once, and then only what has come since. All of it blocks, and
belongs into a thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tocsin.bus.port import BusError
from tocsin.console.charts import Line, Mark
from tocsin.console.context import CommandContext
from tocsin.console.run_lookup import run_of
from tocsin.schemas.errors import MissingExtra, require_extra
from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.text import plain_line
from tocsin.store import NotCaptured, UnknownRun
from tocsin.store.errors import StoreError

if TYPE_CHECKING:
    from tocsin.store import Run, Series
    from tocsin.store.catalog import Store

T = TypeVar("T")

Floats = npt.NDArray[np.float64]

OPEN_RUNS: Final = 12
"""Runs whose numbers are kept in memory at once; the one not asked for longest goes first."""

MIN_S: Final = 0.8
"""Least time between two readings of one run."""

UNKNOWN_S: Final = 5.0
"""After so long a run without numbers is looked for again."""


@dataclass(slots=True)
class _Opened:
    """A run whose numbers are kept; one thread at a time."""

    run: Run | None = None
    read_s: float = -UNKNOWN_S
    alone: threading.Lock = field(default_factory=threading.Lock)


class Numbers:
    """The open runs of one server. Safe for several threads; all of it blocks."""

    def __init__(self, context: CommandContext, store: Store | None) -> None:
        self._context = context
        self._store = _readable(store)
        self._opened: OrderedDict[tuple[str, str | None], _Opened] = OrderedDict()
        self._alone = threading.Lock()

    def read(self, run_id: str, work: Callable[[Run | None], T]) -> T:
        """What `work` makes of the run with what has come by now; of None if no numbers of it are
        kept anywhere. A bus that is away leaves what was read before.
        """
        opened = self._kept(run_id, None)
        with opened.alone:
            waited_s = time.monotonic() - opened.read_s
            if waited_s >= (UNKNOWN_S if opened.run is None else MIN_S):
                with suppress(UnknownRun, BusError, StoreError):
                    self._bring_up_to_date(opened, run_id, None)
                opened.read_s = time.monotonic()
            return work(opened.run)

    def read_known(self, run_id: str, incarnation: str | None, work: Callable[[Run], T]) -> T:
        """What `work` makes of a run that must be there, or of one training of it.

        Raises:
            UnknownRun: neither the store nor the bus has numbers of it.
            BusError: the bus does not answer.
        """
        opened = self._kept(run_id, incarnation)
        with opened.alone:
            return work(self._bring_up_to_date(opened, run_id, incarnation))

    def glance(self, run_id: str, work: Callable[[Run | None], T]) -> T:
        """What `work` makes of the run as it is now, without keeping it in memory."""
        with self._alone:
            opened = self._opened.get((run_id, None))
        if opened is not None:
            with opened.alone:
                if opened.run is not None:
                    return work(opened.run)
        try:
            return work(self._open(run_id, None))
        except (UnknownRun, BusError, StoreError):
            return work(None)

    def _kept(self, run_id: str, incarnation: str | None) -> _Opened:
        with self._alone:
            opened = self._opened.setdefault((run_id, incarnation), _Opened())
            self._opened.move_to_end((run_id, incarnation))
            while len(self._opened) > OPEN_RUNS:
                self._opened.popitem(last=False)
        return opened

    def _bring_up_to_date(self, opened: _Opened, run_id: str, incarnation: str | None) -> Run:
        if opened.run is None:
            opened.run = self._open(run_id, incarnation)
        else:
            opened.run.refresh()
        return opened.run

    def _open(self, run_id: str, incarnation: str | None) -> Run:
        return run_of(self._context, self._store, run_id, incarnation)


def _readable(store: Store | None) -> Store | None:
    """The store if this environment can read numbers from it, else None: then live runs have what
    the bus has. `StoredRuns` says so where there are stored runs."""
    try:
        require_extra("store", "reading stored runs", "duckdb")
    except MissingExtra:
        return None
    return store


def series_of(
    run: Run | None, column: str, mode: Mode = "train", rank: int | None = None
) -> tuple[int, Series] | None:
    """A scalar and the rank that it is of; None: it was not captured. Without a rank of the lowest
    one that has it: of a pipeline only the last stage has the loss.
    """
    if run is None or (rank is None and column not in run.scalars(mode)):
        return None
    for one in run.ranks() if rank is None else (rank,):
        with suppress(NotCaptured):
            return one, run.series(column, mode, one)
    return None


def line_of(
    run: Run | None, column: str, name: str, mode: Mode = "train", rank: int | None = None
) -> Line | None:
    """The same as a line of a chart. A rank that was not asked for is named unless it is 0."""
    found = series_of(run, column, mode, rank)
    if found is None:
        return None
    shown, series = found
    if rank is None and shown:
        name = f"{name} (rank {shown})"
    return Line(name, series.steps.astype(np.float64), series.values)


def scalars_of(run: Run | None, mode: Mode = "train") -> Sequence[str]:
    """Names of the scalars of a run; empty without numbers."""
    return () if run is None else run.scalars(mode)


def newest_of(run: Run | None) -> tuple[int, float] | None:
    """The last step with a loss, and that loss; None without one."""
    line = line_of(run, "loss", "loss")
    return None if line is None else (int(line.x[-1]), float(line.y[-1]))


def marks_of(issues: Sequence[IssueFiring], incarnation: str) -> list[Mark]:
    """Where the issues of a training began, for its charts."""
    return [
        Mark(issue.first_step, issue.severity, f"{plain_line(issue.rule)}: {_short(issue)}")
        for issue in issues
        if issue.first_step is not None and issue.incarnation == incarnation
    ]


def _short(issue: IssueFiring) -> str:
    text = plain_line(issue.reason)
    return text if len(text) <= 120 else f"{text[:119]}…"
