"""Which rule has ended the process of the custom rules, and why. Pure."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tocsin.stream_rules.custom.call_limits import MEBIBYTE, Limits
from tocsin.stream_rules.custom.current_call import Mark
from tocsin.stream_rules.custom.protocol import DisabledRule


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a child came to its end.

    Attributes:
        kind: `wall`, `cpu`: one call took too long; `memory`: it reported that itself; `behind`:
            too much waited for it; `load`: loading took too long; `exit`: it ended, nobody knows
            why.
        mark: the call that was under way, if one was.
        culprit: run and rule that have used most of what there was too little of, where that is
            known. Without a rule: all of the run.
        detail: by how much, in words.
        returncode: as `subprocess` has it.
    """

    kind: str
    mark: Mark | None = None
    culprit: tuple[str, str | None] | None = None
    detail: str = ""
    returncode: int | None = None


@dataclass(slots=True)
class ExitCauses:
    """Names the rules that ended the process; `rules` are all of the configuration.

    Attributes:
        unexplained: ends, one soon after the other, for which no rule answers.
        fruitless: those among them of children that had saved nothing.
    """

    limits: Limits
    rules: Sequence[str]
    unexplained: int = 0
    fruitless: int = 0
    _ended: Counter[str] = field(default_factory=Counter)
    _seen_once: tuple[str, str, int] | None = None

    def rules_to_disable(self, ended: ProcessExit) -> Sequence[DisabledRule]:
        """The rules that must not be called again."""
        if ended.culprit is not None and ended.culprit[1] is None:
            why = self._why(ended)
            run_id = ended.culprit[0]
            return [DisabledRule(rule=r, run_id=run_id, why=why, no_room=True) for r in self.rules]
        found = self._culprit(ended)
        if found is None:
            self.unexplained += 1
            self.fruitless += 1
            return ()
        run_id, rule, offset = found
        self.unexplained = self.fruitless = 0
        self._ended[rule] += 1
        why = self._why(ended)
        disabled = [DisabledRule(rule=rule, run_id=run_id, offset=offset, why=why)]
        if self._ended[rule] >= self.limits.runs:
            why = f"it has ended the process of the custom rules {self.limits.runs} times: {why}"
            disabled.append(DisabledRule(rule=rule, run_id=None, why=why))
        return disabled

    def was_killed(self, ended: ProcessExit) -> bool:
        """Whether an end in the first loading is not the rules': somebody else has brought it."""
        self.unexplained += 1
        self.fruitless += 1
        killed = ended.kind == "exit" and ended.returncode == -signal.SIGKILL
        return killed and self.fruitless < self.limits.starts

    def why_none_runs(self) -> str:
        """Why no rule is loaded any more; empty: they are."""
        if self.fruitless < self.limits.starts:
            return ""
        return f"the process of the custom rules has ended {self.fruitless} times, unexplained"

    def _culprit(self, ended: ProcessExit) -> tuple[str, str, int] | None:
        mark = ended.mark
        if ended.culprit is not None and ended.culprit[1] is not None:
            # From the next call on: who is slow, or leaks, does so in all of them.
            return ended.culprit[0], ended.culprit[1], -1
        if mark is None or not mark.run_id:
            return None
        call = (mark.run_id, mark.rule, mark.offset)
        killed = ended.kind == "exit" and ended.returncode == -signal.SIGKILL
        if killed and call != self._seen_once:
            # Somebody may have killed it while this rule happened to be called. Not twice, though.
            self._seen_once = call
            return None
        return call

    def _why(self, ended: ProcessExit) -> str:
        limits = self.limits
        if ended.kind == "wall":
            return f"one call did not return within {limits.call_s:g} s"
        if ended.kind == "cpu":
            return f"one call took more than {limits.call_cpu_s:g} s of CPU time"
        if ended.kind == "memory":
            size = limits.memory_bytes // MEBIBYTE
            return f"the memory of the custom rules has grown by {size:,} MiB, mostly in its calls"
        if ended.kind == "behind":
            return f"too slow: {ended.detail}"
        return f"it ended the process of the custom rules ({ending(ended.returncode)})"


def ending(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is not None and returncode < 0:
        try:
            return signal.Signals(-returncode).name
        except ValueError:
            return f"signal {-returncode}"
    return f"exit code {returncode}"
