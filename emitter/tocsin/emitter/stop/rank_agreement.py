"""All ranks of one training leave at the same step.

Rounds. Now and then the ranks take the maximum, over all of them, of two numbers: what a rank knows
(nothing, something went wrong, a stop was heard) and "so many exit points until the next round". A
round is started at one exit point, asynchronously, and its result is taken at the next exit point,
by all ranks at the same one, since they count exit points alike. Ranks that step together (DDP,
FSDP: each backward waits for all) have all started a round before any of them comes to the next
exit point, so its result is there and nobody waits; short steps give gloo's own threads one exit
point more. A round costs 60 to 200 microseconds on gloo (`benchmarks/agreement.py`); rounds are
`ROUND_S` apart, so that is less than 0.1 % of the time.

A rank sees itself that its loss is NaN, long before anybody has signed a command. From then on all
ranks hold a round at each exit point and take its result at the next one, for `ALERT_EXIT_POINTS`:
once a rank has heard, they leave two exit points later, however short the steps are.

Ranks that do not step together would wait for one another here. They may, for a small share of the
time; beyond it, or when a round fails, the agreement ends for good and each rank leaves at its own
exit point.

At exit. A gloo thread that lets go of a tensor needs the interpreter; after its end that aborts the
process (measured: SIGABRT at the exit of a healthy run). So there is one tensor for all rounds, and
`close`, called before the group is destroyed and when the training ends, takes the round under way
to its end; if it has none, its tensor is never freed, and later rounds have another.

The group that this runs on is made in `tocsin.emitter.stop.side_group`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

ROUND_S: Final = 0.2
"""Pause between rounds that the ranks aim at, seconds."""

PATIENCE_S: Final = 0.5
PATIENCE_SHARE: Final = 0.005
"""A rank waits in rounds for at most `PATIENCE_S` plus this share of the time, before any stop."""

CLOSE_S: Final = 1.0
"""How long the end of a training waits for the last round, seconds."""

STOP_PATIENCE_S: Final = 5.0
"""Once a stop was heard a rank waits this long for the others, seconds."""

ALERT_EXIT_POINTS: Final = 256
"""Exit points that have a round each after something went wrong."""

ALERT_SPACING: Final = 4 * ALERT_EXIT_POINTS
"""Exit points between the beginnings of two such times, at least: the rounds cost time."""

_NOTHING, _ALERT, _STOP = 0, 1, 2
_MAX_INTERVAL: Final = 32
_POLL_S: Final = 0.00005
_SETTLE: Final = 8
_SHORT_STEPS: Final = 4
"""With so many exit points between two rounds, or more, a round's result is taken two exit points
later."""


class Round(Protocol):
    """A maximum under way."""

    def done(self) -> bool:
        """Whether the result is there; never waits. Raises RuntimeError: the round has failed."""
        ...

    def result(self) -> tuple[int, int]:
        """The maxima; only once it is done. Raises RuntimeError."""
        ...

    def abandon(self) -> None:
        """It will never be done: keep what it works on for as long as the process lives."""
        ...


class Collective(Protocol):
    """Takes maxima over all ranks."""

    def start(self, known: int, interval: int) -> Round:
        """Begin a round; never waits. Raises RuntimeError: the group is gone."""
        ...


class Agreement:
    """One rank's side of it. Used by the training thread alone."""

    def __init__(
        self,
        collective: Collective,
        *,
        votes: Collective | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`votes` takes maxima beside a round that is under way."""
        self._collective: Collective | None = collective
        self._votes = votes
        self._clock = clock
        self._began = clock()
        self._waited_s = 0.0
        self._exit_points = 0
        self._next_round = 0
        self._exit_points_per_round = 1
        self._round: Round | None = None
        self._last_round_at: float | None = None
        self._exit_points_since = 0
        self._interval = 1
        self._alerted = False
        self._alert_began = -ALERT_SPACING
        self.broken: str | None = None
        self.unpaired = False
        """Whether a vote had no partner: whatever this rank began on the group now would be taken
        together with something else of the others."""
        self.closed = False

    def alert(self) -> None:
        """Something went wrong here that a stop may follow; never waits."""
        if self._exit_points - self._alert_began >= ALERT_SPACING:
            self._alerted = True

    def close(self) -> None:
        """Let go of the group, after the round under way; waits for that at most `CLOSE_S`."""
        if self.closed:
            return
        self.closed = True
        pending, self._round = self._round, None
        if pending is not None:
            try:
                until = self._clock() + CLOSE_S
                while not pending.done() and self._clock() < until:
                    time.sleep(_POLL_S)
                if not pending.done():
                    pending.abandon()
            except RuntimeError as error:
                logger.debug("the last round failed: %s", error)
        self._collective = self._votes = None

    def at_exit_point(self, stopping: bool) -> bool:
        """Count an exit point; True if all ranks leave here. `broken` is why there is no more.

        May wait for the other ranks, in all for up to `PATIENCE_S` and `PATIENCE_SHARE` of the time
        so far. `stopping`: this rank has received a stop; it may wait up to `STOP_PATIENCE_S` here,
        once.
        """
        exit_point, self._exit_points = self._exit_points, self._exit_points + 1
        collective = self._collective
        if collective is None:
            return False
        try:
            if self._round is not None:
                if exit_point < self._next_round + self._exit_points_per_round:
                    return False
                if not self._await(self._round, stopping):
                    self.broken = "the ranks do not step alike"
                    return False
                known, interval = self._round.result()
                self._round = None
                if known >= _STOP:
                    return True
                if known == _ALERT:
                    self._alerted, self._alert_began = False, exit_point
                if exit_point - self._alert_began < ALERT_EXIT_POINTS:
                    interval = 1
                self._next_round += max(1, interval)
                self._exit_points_per_round = 2 if interval >= _SHORT_STEPS else 1
            if exit_point >= self._next_round:
                self._measure()
                known = _STOP if stopping else _ALERT if self._alerted else _NOTHING
                self._round = collective.start(known, self._interval)
                self._next_round = exit_point
        except (RuntimeError, ValueError, TypeError) as error:
            self.broken = f"a round failed: {error}".splitlines()[0][:200]
        return False

    def most(self, value: int) -> int | None:
        """The highest of what all ranks pass, at an exit point at which all of them leave; None:
        there is no such number. Waits for the others for at most `STOP_PATIENCE_S`.
        """
        if self._round is not None:
            return None
        return self._maximum(self._collective, value)

    def vote(self, value: int) -> int | None:
        """The highest of what all ranks pass, at a place to which all of them come between the same
        exit points; None: there is no such number. Then this rank begins no more rounds either: a
        rank that comes late would take one of them for a vote. Waits as `most` does.
        """
        if self._votes is None:
            return None
        most = self._maximum(self._votes, value)
        if most is None:
            self._votes = self._collective = None
            self.broken, self.unpaired = "the ranks do not make the same updates", True
        return most

    def _maximum(self, collective: Collective | None, value: int) -> int | None:
        if collective is None:
            return None
        try:
            pending = collective.start(value, 0)
            until = self._clock() + STOP_PATIENCE_S
            while not pending.done():
                if self._clock() > until:
                    pending.abandon()
                    return None
                time.sleep(_POLL_S)
            most, interval = pending.result()
            # A round has an interval of at least 1: somebody else began one, and did not vote.
            return None if interval else most
        except (RuntimeError, ValueError, TypeError) as error:
            logger.debug("the ranks did not agree: %s", error)
            return None

    def _await(self, pending: Round, stopping: bool) -> bool:
        if pending.done():
            return True
        began = self._clock()
        allowed_s = STOP_PATIENCE_S
        if not stopping:
            allowed_s = PATIENCE_S + PATIENCE_SHARE * (began - self._began) - self._waited_s
        while True:
            time.sleep(_POLL_S)
            done = pending.done()
            waited_s = self._clock() - began
            if done or waited_s > allowed_s:
                if not stopping:
                    self._waited_s += waited_s
                return done

    def _measure(self) -> None:
        now, before = self._clock(), self._last_round_at
        passed = self._exit_points - self._exit_points_since
        if before is not None and passed >= self._interval and self._exit_points > _SETTLE:
            per_exit_point_s = max((now - before) / passed, 1e-6)
            self._interval = min(max(1, math.ceil(ROUND_S / per_exit_point_s)), _MAX_INTERVAL)
        self._last_round_at, self._exit_points_since = now, self._exit_points
