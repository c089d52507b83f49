"""Time and ranks of all runs of a worker, and what stops have saved of them, for its metrics.

Their number of series is bounded: by part and by unit, never by run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.schemas.compute_estimates import NO_PRICES, saved_by_stop
from tocsin.schemas.records.goodput import PARTS
from tocsin.schemas.records.run_view import RunView

RANK_STATES: Final = ("heard", "late", "missing")


class RunAccounts:
    """The newest view of each run, as far as metrics need it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics: Final = metrics
        self._runs: dict[tuple[int, str], RunView] = {}
        self._ranks: dict[tuple[int, str], Counter[str]] = {}

    def apply(self, partition: int, view: RunView) -> None:
        """Take in the newest view of a run; what its stop has saved counts once, at its end."""
        self._ranks[partition, view.run_id] = _ranks(view)
        view = view.model_copy(update={"ranks": (), "rules": {}})
        before = self._runs.get((partition, view.run_id))
        self._runs[partition, view.run_id] = view
        # Of an end that came before this worker nothing is counted: another one has.
        same = before is not None and before.incarnation == view.incarnation
        if before is None or (same and before.ended_ms is not None):
            return
        saved = saved_by_stop(view, NO_PRICES)
        if saved is not None and saved.device_hours:
            self._metrics.add(names.SAVED_HOURS, saved.device_hours, unit=saved.unit)

    def drop(self, partition: int, run_id: str) -> None:
        """Forget a run."""
        self._runs.pop((partition, run_id), None)
        self._ranks.pop((partition, run_id), None)

    def release(self, partitions: Collection[int]) -> None:
        """Forget the runs of partitions that another worker has."""
        for key in [key for key in self._runs if key[0] in partitions]:
            self.drop(*key)

    def publish(self) -> None:
        """Set the time of all runs, by part, and their ranks, by state."""
        accounts = [view.goodput for view in self._runs.values() if view.goodput is not None]
        for part in PARTS:
            seconds = sum(goodput.part(part) for goodput in accounts)
            self._metrics.set(names.RUN_SECONDS, seconds, part=part)
        ranks = sum(self._ranks.values(), Counter[str]())
        for state in RANK_STATES:
            self._metrics.set(names.RANKS, ranks[state], state=state)


def _ranks(view: RunView) -> Counter[str]:
    """How many ranks of a run that is running are in each state."""
    counts = view.telemetry
    if view.state != "running" or counts is None:
        return Counter()
    heard = sum(not rank.ended for rank in view.ranks) - counts.ranks_late
    return Counter(heard=heard, late=counts.ranks_late, missing=counts.ranks_missing)
