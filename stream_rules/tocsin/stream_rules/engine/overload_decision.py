"""The decision in an overload: which run gives way when a worker cannot keep up, and why. Pure.

All runs of a partition are read in one order, so what one of them costs all wait for. A worker that
lags and spends most of its time on one run leaves summaries of this run's tensors out, those first
that fewest rules read. Events, scalars, samples of nodes and rare tables are never left out, nor is
a summary with NaN or Inf. If that is not enough, the run is postponed: the others go first, and it
is read a second time, in at most as much time as the others take.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final, Literal

from tocsin.schemas.records.collections import Tier

RunKey = tuple[int, str]
"""Partition and run id."""

ORDER: Final[tuple[Tier, ...]] = (2, 1)
"""What is left out, in this order; it comes back in the other."""


@dataclass(frozen=True, slots=True)
class FairnessPolicy:
    """When a run gives way.

    Attributes:
        window_ms: decisions come once each; a decision has an effect before the next one.
        lag_ms: a worker lags if, throughout a window, what it read was older than this.
        busy: and if its rules took at least this share of the window: otherwise the rules are not
            what it waits for.
        least_share: a run below this share of the rules' time gives way in no case.
        calm_windows: after so many windows with less than half of `lag_ms`, one tier comes back.
    """

    window_ms: int = 10_000
    lag_ms: int = 30_000
    busy: float = 0.5
    least_share: float = 0.2
    calm_windows: int = 6


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker was at in one window.

    `lag_ms` is the least age of the records that it read; `lag_before_ms` that of the window
    before, None: there was none. `spent_s` is the time of each run that is not postponed: those
    that are have what the others leave. `runs` is how many runs are alive and not postponed; `calm`
    how many windows in a row were without lag.
    """

    took_ms: int
    lag_ms: int
    lag_before_ms: int | None
    spent_s: Mapping[RunKey, float]
    runs: int
    calm: int = 0

    @property
    def catches_up(self) -> bool:
        """Whether the lag gets smaller, or is that of partitions that have just come, or come back:
        no lag of a worker grows faster than time goes by."""
        if self.lag_before_ms is None:
            return True
        grown_ms = self.lag_ms - self.lag_before_ms
        return not -self.took_ms / 2 < grown_ms <= 2 * self.took_ms

    @property
    def largest(self) -> tuple[RunKey, float] | None:
        """The run with the most time, and its share of the time of those not postponed."""
        if not (total := sum(self.spent_s.values())):
            return None
        run, spent_s = max(self.spent_s.items(), key=lambda item: (item[1], item[0]))
        return run, spent_s / total


@dataclass(frozen=True, slots=True)
class Decision:
    """`shed`: leave this tier of the run out from now on; `judge`: do so no more; `postpone`: read
    the run later than the others; `keep`: all stays as it is. `why` is for people."""

    action: Literal["keep", "shed", "judge", "postpone"]
    why: str
    run: RunKey | None = None
    tier: Tier = 0


def decide(load: Load, shed: Mapping[RunKey, Set[Tier]], policy: FairnessPolicy) -> Decision:
    """What changes after a window; `shed` is what is left out now of which run that is not
    postponed. One that is takes part again once it has caught up."""
    if load.lag_ms <= policy.lag_ms:
        return _recovered(load, shed, policy)
    lag_s = load.lag_ms / 1000
    if load.catches_up:
        return Decision("keep", f"{lag_s:.0f} s behind, and catching up or just started")
    busy_s = sum(load.spent_s.values())
    if 1000 * busy_s < policy.busy * load.took_ms or load.largest is None:
        return Decision("keep", f"{lag_s:.0f} s behind, but not because of the rules")
    run, share = load.largest
    if load.runs < 2:
        return Decision("keep", "no other run waits")
    # Twice what each of the others has on average, so that two alike are never over it.
    fair = max(policy.least_share, 2 / (load.runs + 1))
    if share <= fair:
        return Decision("keep", f"no run uses more than its share: the largest {share:.0%}")
    why = (
        f"the worker was {lag_s:.0f} s behind, and this run used {share:.0%} of the time of its "
        f"rules, which {load.runs} runs share"
    )
    tier = next((tier for tier in ORDER if tier not in shed.get(run, ())), None)
    if tier is None:
        return Decision("postpone", why, run)
    return Decision("shed", why, run, tier)


def _recovered(load: Load, shed: Mapping[RunKey, Set[Tier]], policy: FairnessPolicy) -> Decision:
    waiting = sorted((run, tiers) for run, tiers in shed.items() if tiers)
    if not waiting:
        return Decision("keep", "no lag")
    if load.calm < policy.calm_windows:
        return Decision("keep", "no lag, but not for long")
    run, tiers = waiting[0]
    tier = next(tier for tier in reversed(ORDER) if tier in tiers)
    return Decision("judge", "no lag for some time", run, tier)


class Fairness:
    """Measures what the runs of a worker cost, window by window."""

    def __init__(self, policy: FairnessPolicy | None = None) -> None:
        self.policy: Final = policy or FairnessPolicy()
        self.largest_share = 0.0
        """What the run with the most time used of the time of all, in the last window: 0 to 1."""
        self._began_ms: int | None = None
        self._spent_s: dict[RunKey, float] = {}
        self._lag_ms: int | None = None
        self._lag_before_ms: int | None = None
        self._calm = 0

    def spent(self, run: RunKey, seconds: float) -> None:
        """A record of the run took the rules so long."""
        self._spent_s[run] = self._spent_s.get(run, 0.0) + seconds

    def round(self, now_ms: int, lag_ms: int | None) -> bool:
        """A round has ended, whose oldest record was so old when it was read; None: there was none.
        Whether a window is over, for `close`."""
        if self._began_ms is None or now_ms < self._began_ms:
            self._began_ms = now_ms
        if lag_ms is not None:
            self._lag_ms = lag_ms if self._lag_ms is None else min(self._lag_ms, lag_ms)
        return now_ms - self._began_ms >= self.policy.window_ms

    def close(self, now_ms: int, *, runs: int, shed: Mapping[RunKey, Set[Tier]]) -> Decision:
        """End the window: what changes now. `runs` are alive and not postponed; `shed` is of the
        same."""
        lag_ms = self._lag_ms or 0
        self._calm = self._calm + 1 if 2 * lag_ms < self.policy.lag_ms else 0
        load = Load(
            took_ms=now_ms - (self._began_ms or 0),
            lag_ms=lag_ms,
            lag_before_ms=self._lag_before_ms,
            spent_s=self._spent_s,
            runs=runs,
            calm=self._calm,
        )
        self.largest_share = 0.0 if load.largest is None else load.largest[1]
        decision = decide(load, shed, self.policy)
        if decision.action == "judge":
            self._calm = 0
        self._began_ms, self._spent_s = now_ms, {}
        self._lag_before_ms, self._lag_ms = lag_ms, None
        return decision

    def release(self, partitions: Set[int]) -> None:
        """Forget the runs of partitions that another worker owns now."""
        self._spent_s = {run: s for run, s in self._spent_s.items() if run[0] not in partitions}
