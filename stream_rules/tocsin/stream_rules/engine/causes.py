"""Causes before consequences: which issues of a run are one story, and which of them began it.

One fault makes many symptoms. When an issue fires, the issues of the run that are known are looked
through for one that explains it; of several the one that began first, and of those that began in
the same step the one that stands first in `CAUSAL_ORDER`, which reads from the data over
activations and loss to gradients and weights. An issue A explains B if

- by the table, A's condition brings B's about;
- A is no advice, or B is one, too: people hear of B, and what A reports is true of many a healthy
  training;
- A did not begin after B: by step where both have one, else by append time. Where A is read off
  summaries that are made every so many steps, it may have begun up to `SAMPLED_STEPS` before the
  first summary that shows it;
- A was still there, or over for `AFTER_STEPS` at most, when B began; where the mechanism is a
  prompt one, B began within its `within` steps of A;
- on another rank than A, B began later than A, or A is of no rank: what one rank did reaches the
  others through the reduce only.

A consequence points at the root of its story, so that people get the first cause. A cause may
be found after its consequence, because it took longer to be sure of: the consequence is then
reported again, with its cause. All this is a function of the issues alone, in their order: replayed
records give the same marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.events import clip
from tocsin.schemas.records.issues import SHORT_ID, IssueFiring
from tocsin.stream_rules.engine.causal_order import CAUSAL_ORDER, Link, links

SAMPLED_STEPS: Final = 20
"""How long a condition that is read off summaries may have lasted before the first that shows it:
two intervals of the usual ten steps."""

AFTER_STEPS: Final = 50
"""Steps after its end for which an issue still explains others."""

AFTER_MS: Final = 600_000
"""The same in append time, for issues that have no step."""

WITHIN_MS: Final = 3_600_000
"""Append time from the beginning of a cause to that of its effect at most, where the mechanism has
a limit and one of them has no step."""

KNOWN: Final = 256
"""Issues of a run that are remembered; the oldest that are over are forgotten first."""

MAX_WHY: Final = 1000
"""Characters of the sentence for people: along a chain of causes it would grow without end."""

SAMPLED: Final = frozenset({"tensor", "layer"})
"""Kinds of subjects that are read off summaries."""


@dataclass(slots=True)
class Known:
    """An issue as far as it matters here. `root` is the issue that began its story, or its own;
    `advice`: it is an info."""

    id: str
    rule: str
    branch: str
    reason: str
    step: int | None
    rank: int | None
    onset_ms: int
    sampled: bool
    root: str
    why: str = ""
    over_step: int | None = None
    over_ms: int | None = None
    advice: bool = False


@dataclass(frozen=True, slots=True)
class Attribution:
    """An issue is the consequence of another: `cause` its id, `rule` its rule ("": it is not known
    any more), `why` a sentence for people."""

    issue: str
    cause: str
    rule: str
    why: str


@dataclass(slots=True)
class Causes:
    """The issues of one run and their causes."""

    known: list[Known] = field(default_factory=list)

    def fired(self, issue: IssueFiring) -> list[Attribution]:
        """Take in an issue that fires: its cause, if there is one, and what it is the cause of.

        The first of them is its own, if it has one; the others are of issues told before.
        """
        seen = self._find(issue.issue_id)
        if seen is not None and seen.over_ms is not None and issue.times > 1:
            # It has come again: what explains it, and what it explains, begins anew.
            self.known.remove(seen)
            seen = None
        if seen is not None:
            return [] if seen.root == seen.id else [self._attribution(seen)]
        new = Known(
            id=issue.issue_id,
            rule=issue.use,
            branch=issue.branch,
            reason=issue.reason,
            step=issue.first_step,
            rank=issue.first_rank,
            onset_ms=issue.onset_ms,
            sampled=issue.subject.kind in SAMPLED,
            root=issue.issue_id,
            advice=issue.severity == "info",
        )
        found: list[Attribution] = []
        cause = self._cause_of(new)
        if cause is not None:
            found.append(self._attribute(new, *cause))
        found += self._explained_by(new)
        self.known.append(new)
        self._drop_oldest()
        return found

    def restored(self, issues: Iterable[Known]) -> None:
        """Take in open issues of rules whose memory is newer than this."""
        for known in sorted(issues, key=lambda known: (known.onset_ms, known.id)):
            if self._find(known.id) is None:
                self.known.append(known)

    def resolved(self, issue: IssueFiring) -> None:
        """Take in that an issue is over."""
        known = self._find(issue.issue_id)
        if known is not None:
            known.over_step, known.over_ms = issue.step, issue.at_ms

    def _cause_of(self, effect: Known) -> tuple[Known, Link] | None:
        # What is a consequence of this one, of an earlier time of it, cannot be its cause.
        causes = (cause for cause in self.known if cause.root != effect.id)
        candidates = [(cause, link) for cause in causes for link in _explains(cause, effect)]
        return min(candidates, key=_first, default=None)

    def _explained_by(self, cause: Known) -> Iterator[Attribution]:
        """Roots of before that the new issue explains, and with them all their consequences."""
        for effect in self.known:
            if effect.root != effect.id or effect.id == cause.root:
                continue
            link = next(_explains(cause, effect), None)
            if link is None:
                continue
            yield self._attribute(effect, cause, link)
            for other in self.known:
                if other.root == effect.id:
                    other.root = effect.root
                    yield self._attribution(other)

    def _attribute(self, effect: Known, cause: Known, link: Link) -> Attribution:
        effect.root, effect.why = cause.root, _why(effect, cause, link)
        if cause.root != cause.id:
            effect.why += f"; of that, {cause.why}" if cause.why else ""
        effect.why = clip(effect.why, MAX_WHY)
        return self._attribution(effect)

    def _attribution(self, effect: Known) -> Attribution:
        root = self._find(effect.root)
        return Attribution(effect.id, effect.root, "" if root is None else root.rule, effect.why)

    def _find(self, issue_id: str) -> Known | None:
        return next((known for known in self.known if known.id == issue_id), None)

    def _drop_oldest(self) -> None:
        while len(self.known) > KNOWN:
            over = (i for i, known in enumerate(self.known) if known.over_ms is not None)
            del self.known[next(over, 0)]


def cause_first(remedy: str, cause: str, rule: str) -> str:
    """What to try about an issue that follows from another: that one comes first."""
    named = f"{rule} ({cause[:SHORT_ID]})" if rule else f"issue {cause[:SHORT_ID]}"
    return clip(f"Fix {named} first: this issue follows from it. {remedy}".strip())


def _explains(cause: Known, effect: Known) -> Iterator[Link]:
    """The mechanisms by which one issue explains another, where and when they began."""
    if cause.advice and not effect.advice:
        return
    for link in links(cause.rule, cause.branch, effect.rule, effect.branch):
        if _came_before(cause, effect, link.limit(effect.rule, effect.branch)):
            yield link


def _came_before(cause: Known, effect: Known, within: int | None) -> bool:
    if cause.step is None or effect.step is None:
        early = cause.onset_ms <= effect.onset_ms
        if within is not None and effect.onset_ms > cause.onset_ms + WITHIN_MS:
            return False
        return early and (cause.over_ms is None or effect.onset_ms <= cause.over_ms + AFTER_MS)
    began = cause.step - (SAMPLED_STEPS if cause.sampled else 0)
    if began > effect.step:
        return False
    elsewhere = None not in (cause.rank, effect.rank) and cause.rank != effect.rank
    if elsewhere and began >= effect.step:
        return False
    if within is not None and effect.step > cause.step + within:
        return False
    return cause.over_step is None or effect.step <= cause.over_step + AFTER_STEPS


def _first(candidate: tuple[Known, Link]) -> tuple[int, int, int]:
    """The earlier one; of one step the one that stands first in the table."""
    cause, link = candidate
    return (cause.onset_ms if cause.step is None else cause.step, _ROW[link.cause], cause.onset_ms)


def _why(effect: Known, cause: Known, link: Link) -> str:
    step = "" if cause.step is None else f" at step {cause.step}"
    return f"{cause.rule} ({cause.id[:SHORT_ID]}) began{step}: {cause.reason}; and {link.how}"


_ROW: Final = {link.cause: row for row, link in enumerate(CAUSAL_ORDER)}
