"""What is remembered of a run across its restarts: how each incarnation failed, what it saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.checkpoints import VERIFIED_STEPS, Checkpoint
from tocsin.schemas.records.issues import IssueFiring

FAILED: Final = "failed"
"""The `rule` of a fault that no rule saw: the job ended with an error."""

MAX_FAULTS: Final = 64
"""Faults that are remembered of a run."""

_CLOSE_STEPS: Final = 2
_CLOSE_SHARE: Final = 0.01
_CHECKPOINTS: Final = 16


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended an incarnation: its first issue that is worth a stop, or its failure.

    Attributes:
        step: counted from the start of the incarnation, so it is the offset after the load.
        at_ms: when it was known, append time.
        how: the exit code of a failure, as text.
    """

    rule: str
    branch: str
    step: int
    incarnation: str
    at_ms: int
    how: str = ""

    def same(self, other: Fault) -> bool:
        """Whether both are one fault that came twice: the same condition at the same offset."""
        close = max(_CLOSE_STEPS, round(_CLOSE_SHARE * max(self.step, other.step)))
        mine, others = (self.rule, self.branch, self.how), (other.rule, other.branch, other.how)
        return mine == others and abs(self.step - other.step) <= close


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of an earlier incarnation, which ended after `last_step`."""

    checkpoint: Checkpoint
    incarnation: str
    last_step: int | None


@dataclass(slots=True)
class Restarts:
    """The faults of a run: `fault` of this incarnation, `past` of those before, oldest first.

    `compared`: whether it was compared with those. `saved`: checkpoints of the incarnations before,
    in the order in which they were written.
    """

    fault: Fault | None = None
    compared: bool = False
    past: list[Fault] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)

    def note(self, fault: Fault) -> None:
        """Remember the fault of this incarnation; the first one counts."""
        self.fault = self.fault or fault

    def restored(self, faults: Iterable[Fault], incarnation: str) -> None:
        """Take in what rules remember, whose state may have been saved later than this: what
        follows from a fault of this incarnation is on the bus already."""
        known = {fault.incarnation for fault in self.past}
        for fault in sorted(faults, key=lambda fault: fault.at_ms):
            if fault.incarnation == incarnation:
                self.compared |= self.fault is None
                self.note(fault)
            elif fault.incarnation not in known:
                known.add(fault.incarnation)
                self.past.append(fault)
        self.past = sorted(self.past, key=lambda fault: fault.at_ms)[-MAX_FAULTS:]

    def like_it(self) -> list[Fault]:
        """The faults of earlier incarnations that are the same as that of this one."""
        if self.fault is None:
            return []
        return [past for past in self.past if past.same(self.fault)]

    def after(
        self, checkpoints: Sequence[Checkpoint], incarnation: str, last_step: int | None
    ) -> Restarts:
        """What the next incarnation remembers of this one and of those before."""
        saved = {one.checkpoint.path: one for one in self.saved}
        for checkpoint in checkpoints:
            # Written anew, it is no more what it was.
            saved.pop(checkpoint.path, None)
            saved[checkpoint.path] = Saved(checkpoint, incarnation, last_step)
        past = [*self.past, *([] if self.fault is None else [self.fault])]
        return Restarts(past=past[-MAX_FAULTS:], saved=list(saved.values())[-_CHECKPOINTS:])

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest good one of earlier incarnations: a restart is likely to start with it."""
        good = self._good()
        return good[-1] if good else None

    def older_checkpoint(self) -> Checkpoint | None:
        """The one to go back to: the newest verified one that is older than `newest_checkpoint`.
        None: none is known."""
        return next((one for one in reversed(self._good()[:-1]) if one.verified), None)

    def _good(self) -> list[Checkpoint]:
        """Those that were finite and written before the fault of their incarnation."""
        faults = {fault.incarnation: fault.step for fault in self.past}
        good: list[Checkpoint] = []
        for one in self.saved:
            fault = faults.get(one.incarnation)
            last = one.last_step if fault is None else fault - 1
            healthy = None if last is None else last - one.checkpoint.step
            if not one.checkpoint.sound or (healthy is not None and healthy < 0):
                continue
            verified = healthy is not None and healthy >= VERIFIED_STEPS
            good.append(one.checkpoint.model_copy(update={"verified": verified}))
        return good


def fault_of(issue: IssueFiring) -> Fault | None:
    """The fault behind an issue; None if it is not worth a stop, or has no step."""
    fatal = issue.severity == "critical" and issue.stop_worthy and issue.state != "resolved"
    if not fatal or issue.first_step is None:
        return None
    return Fault(issue.use, issue.branch, issue.first_step, issue.incarnation, issue.at_ms)
