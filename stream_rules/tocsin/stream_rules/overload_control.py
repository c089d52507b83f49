"""A worker that cannot keep up: which runs give way, and how those postponed catch up."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from tocsin.bus.port import MAX_POLL_BYTES, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.second_reader import ReadAgain, SecondReading
from tocsin.runtime.service import Poison, Tick
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.overload_decision import Fairness, RunKey
from tocsin.stream_rules.engine.partitions import PartitionEngine, UnusableRecord

logger = logging.getLogger(__name__)

LEAST_S: Final = 0.05
"""How long records of postponed runs are worked on in a round in which others took less, seconds;
else as long as the others took."""

LAGGING_SHARE: Final = 0.1
"""But while the others lag, this share of what they took."""

LAGGING_MS: Final = 2_000
"""The others lag for so long after a record of them that was read late."""

WAITING: Final = 500
"""So many records that were read again may wait, of `MAX_POLL_BYTES` together: no more are read
until there are less."""


class OverloadControl:
    """Measures the runs of an engine, and carries out what `Fairness` decides; in the service's
    thread.

    Args:
        wall_s: the clock by which records are timed, seconds.
        nudge: asks for a round soon.
    """

    def __init__(
        self,
        engine: PartitionEngine,
        fairness: Fairness,
        *,
        telemetry: str,
        wall_s: Callable[[], float],
        metrics: Metrics,
        nudge: Callable[[], None],
    ) -> None:
        self._engine: Final = engine
        self._fairness: Final = fairness
        self._telemetry: Final = telemetry
        self._wall_s: Final = wall_s
        self._metrics: Final = metrics
        self._nudge: Final = nudge
        self.may_postpone = True
        """Whether a run may be postponed. Where another process may serve it, its state is read
        only once a record of it comes, which may be too late for what was not read yet."""
        # Records that were read again by partition, of all its runs: without a gap since the turn
        # began, when none of those that are postponed had got further.
        self._again: dict[int, deque[Record]] = {}
        self._lagged_ms: int | None = None
        self._turn = 0
        self._postponements = 0

    def spent(self, run: RunKey, seconds: float) -> None:
        """A record of the run took so long; that one which is postponed was passed over is not of
        its rules."""
        if run not in self._engine.postponed():
            self._fairness.spent(run, seconds)

    def release(self, partitions: Collection[int]) -> None:
        """Drop what is of partitions that another worker owns now."""
        self._fairness.release(frozenset(partitions))
        self._restart()
        if not self._engine.runs():
            # There may be no round any more that would say so.
            for name in (names.LARGEST_SHARE, names.POSTPONED_RUNS, names.POSTPONED_SECONDS):
                self._metrics.set(name, 0)

    def settled(self) -> bool:
        """Whether no run is postponed."""
        return not self._engine.postponed()

    # -- a round ---------------------------------------------------------------------------

    def carry_out(self, tick: Tick) -> None:
        """Leave out what a run sends too much of, judge it again, or postpone the run, if it is
        time. At the end of a round: the checkpoint that this brings is made before anything of it
        is read."""
        if not self._fairness.round(tick.now_ms, tick.lag_ms):
            return
        postponed = self._engine.postponed()
        runs = {
            key: run
            for number, _, run in self._engine.runs()
            # One that is parked must not be written: it may be another worker's already.
            if number in tick.owned and (key := (number, run.state.run_id)) not in postponed
        }
        alive = sum(not (run.state.ended or run.state.lost) for run in runs.values())
        shed = {key: run.state.shedding.tiers for key, run in runs.items() if not run.expired}
        decision = self._fairness.close(tick.now_ms, runs=alive, shed=shed)
        self._metrics.set(names.LARGEST_SHARE, self._fairness.largest_share)
        if decision.run is None or decision.run not in runs:
            return
        number, run_id = decision.run
        if decision.action == "postpone":
            if not (self.may_postpone and self._engine.postpone(number, run_id, decision.why)):
                return
            change = "the run is postponed: the others of its partition go first"
        elif decision.action == "shed":
            runs[decision.run].shed(decision.tier, decision.why)
            change = f"summaries of tier {decision.tier}: left out"
        else:
            runs[decision.run].evaluate_again(decision.tier)
            change = f"summaries of tier {decision.tier}: judged again"
        _log(run_id, change, reason=decision.why)

    def catch_up(self, tick: Tick, took_s: float) -> tuple[list[Reported], list[Poison]]:
        """Work on the runs that are postponed, for as long as the others took in this round. They
        take part again once they have caught up with others that do not lag."""
        self._note_postponements()
        reported: list[Reported] = []
        poison: list[Poison] = []
        lags = self._others_lag(tick)
        until_s = self._wall_s() + (LAGGING_SHARE * took_s if lags else max(took_s, LEAST_S))
        while (record := self._next(tick.owned)) is not None:
            try:
                reported += self._engine.catch_up(record)
            except UnusableRecord as error:
                reported += error.reported
                poison.append(Poison(record, error.error))
            if self._wall_s() >= until_s:
                self._nudge()
                break
        for run in () if lags else self._engine.rejoin(tick.owned):
            _log(run.state.run_id, "the run was postponed, and has caught up", reason="")
            self._restart()
        clocks_ms = [state.clock_ms for state in self._engine.postponed().values()]
        behind_ms = max(0, tick.now_ms - min(clocks_ms, default=tick.now_ms))
        self._metrics.set(names.POSTPONED_RUNS, len(clocks_ms))
        self._metrics.set(names.POSTPONED_SECONDS, behind_ms / 1000)
        return reported, poison

    def _others_lag(self, tick: Tick) -> bool:
        if tick.lag_ms is not None and 2 * tick.lag_ms > self._fairness.policy.lag_ms:
            self._lagged_ms = tick.now_ms
        since_ms = self._lagged_ms
        return since_ms is not None and 0 <= tick.now_ms - since_ms < LAGGING_MS

    def _next(self, owned: Collection[int]) -> Record | None:
        """The next record for a run that is postponed, where the others are further."""
        for number, records in self._again.items():
            if records and number not in owned:
                self._restart()
                return None
            if not records:
                continue
            if records[0].offset < self._engine.next_offset(number):
                # The next time it is another partition's turn.
                self._again[number] = self._again.pop(number)
                return records.popleft()
            # All before it was read.
            self._engine.skip_to(number, records[0].offset)
        return None

    def _enough_waits(self) -> bool:
        sizes = [len(one.value or b"") for records in self._again.values() for one in records]
        return len(sizes) >= WAITING or sum(sizes) >= MAX_POLL_BYTES

    # -- what is read again ----------------------------------------------------------------

    def second_reading(self) -> SecondReading:
        """As `Service.second_reading`."""
        self._note_postponements()
        places: dict[Partition, int] = {}
        for (number, _), state in self._engine.postponed().items():
            partition = Partition(self._telemetry, number)
            places[partition] = min(state.next_offset, places.get(partition, state.next_offset))
        return SecondReading(places, paused=self._enough_waits(), turn=self._turn)

    def read_again(self, again: ReadAgain) -> None:
        """As `Service.read_again`."""
        if again.turn != self._turn:
            return
        for record in again.records:
            self._again.setdefault(record.partition.number, deque()).append(record)
        for partition, offset in again.reached.items():
            if not self._again.get(partition.number):
                self._engine.skip_to(partition.number, offset)

    def _note_postponements(self) -> None:
        """One that was postponed since then may be behind what was read for the others."""
        if self._postponements != self._engine.postponements:
            self._postponements = self._engine.postponements
            self._restart()

    def _restart(self) -> None:
        self._again.clear()
        self._turn += 1


def _log(run_id: str, change: str, *, reason: str) -> None:
    logger.warning(change, extra={"action": "rules", "run_id": run_id, "reason": reason})
