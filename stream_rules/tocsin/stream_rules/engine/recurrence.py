"""Recurrence: when a condition that comes again is the issue that it was before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tocsin.schemas.records.issues import Origin, Severity
from tocsin.stream_rules.outcomes import Finding, Moment

AGAIN: Final = 10
"""A condition that comes again within so many times the time for which its issue was open is
the same issue."""

AGAIN_STEPS: Final = 2_000
"""Steps within which that may be at most, and within which a third episode is the same issue as the
second, however short they were."""

AGAIN_MS: Final = 3_600_000
"""The same in append time, for conditions without steps."""

MAX_HOLD_STEPS: Final = 1_000
"""Steps without its condition that resolve an issue in any case."""


@dataclass(slots=True)
class Past:
    """A resolved issue, as far as it matters when its condition comes again.

    `began`: where its last episode began; `over`: where its condition was gone; `length`: for how
    long the issue was open; `before`: where the episode before that began. All in steps, or in
    append time (`in_ms`) where it has none. `peak`: the highest severity that it had; `origin`:
    where its first episode began. Both are None in what an older release has kept.
    """

    id: str
    branch: str
    times: int
    told: int
    began: int
    over: int
    length: int
    before: int | None
    in_ms: bool
    pause: int
    noticed_ms: int
    peak: Severity | None = None
    origin: Origin | None = None

    def comes_again(self, finding: Finding, at: Moment) -> int | None:
        """After how many steps (or ms) the condition is back; None: this is another issue.

        It may come back as another branch of its rule.
        """
        if self.in_ms != (finding.first_step is None):
            return None
        now = _began(finding, at)
        most = AGAIN_MS if self.in_ms else AGAIN_STEPS
        pause = max(0, now - self.over)
        third = self.before is not None and now - self.before <= most
        soon = pause <= min(most, AGAIN * self.length)
        return pause if soon or third else None


def _began(finding: Finding, at: Moment) -> int:
    if finding.first_step is not None:
        return finding.first_step
    return at.now_ms if finding.onset_ms is None else finding.onset_ms
