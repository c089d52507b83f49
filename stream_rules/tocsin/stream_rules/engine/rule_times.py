"""How long each rule takes, and when one call has taken too long. The clocks are the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

CALL_LIMIT_S: Final = 10.0
"""CPU time of one call into a rule of ours, after which it is quarantined for the run. A worker
that is busy for so long reads nothing, for none of its runs."""


class RuleTooSlow(Exception):
    """One call of a rule has used more CPU time than `CALL_LIMIT_S`."""


@dataclass(slots=True)
class RuleTimes:
    """Seconds by rule instance, rows read by kind, and summaries left out by tier, over all runs.

    Only what a call has used of the processor counts against the limit: a worker that the machine
    leaves waiting is not slow. `wall_s` is asked twice a call, `cpu_s`, which costs more, once a
    round: what was used before the call is at most the time that passed.
    """

    wall_s: Callable[[], float]
    cpu_s: Callable[[], float]
    limit_s: float = CALL_LIMIT_S
    seconds: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    shed: dict[int, int] = field(default_factory=dict)
    _round_cpu_s: float = 0.0
    _round_wall_s: float = 0.0

    def round(self) -> None:
        """A round begins: records, or a time, are about to be worked on."""
        self._round_cpu_s, self._round_wall_s = self.cpu_s(), self.wall_s()

    def start(self) -> float:
        """A call begins: what to give to `end`."""
        return self.wall_s()

    def end(self, rule: str, began_s: float) -> None:
        """The call has ended. Raises RuleTooSlow."""
        took_s = self.wall_s() - began_s
        self.seconds[rule] = self.seconds.get(rule, 0.0) + took_s
        if took_s > self.limit_s:
            used_s = self.cpu_s() - self._round_cpu_s - (began_s - self._round_wall_s)
            if used_s > self.limit_s:
                raise RuleTooSlow(
                    f"one call took {used_s:.1f} s of CPU time, more than {self.limit_s:g} s"
                )

    def read(self, kind: str, rows: int) -> None:
        """So many rows of a record were read."""
        self.rows[kind] = self.rows.get(kind, 0) + rows

    def left_out(self, tier: int) -> None:
        """A summary of this tier was not judged."""
        self.shed[tier] = self.shed.get(tier, 0) + 1

    def drain(self) -> tuple[dict[str, float], dict[str, int], dict[int, int]]:
        """Seconds by rule, rows by kind, summaries left out by tier, since this was asked last."""
        taken = self.seconds, self.rows, self.shed
        self.seconds, self.rows, self.shed = {}, {}, {}
        return taken
