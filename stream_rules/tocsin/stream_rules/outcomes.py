"""What a rule is called with and what it answers: the moment of a call, and the outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

from tocsin.schemas.records.issues import Evidence, Fact, Severity, Subject

if TYPE_CHECKING:
    from tocsin.stream_rules.reading.run_facts import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The position of a call in the record stream. `now_ms` is the partition's clock: the highest
    append time so far."""

    now_ms: int
    run: RunFacts
    rank: int = 0
    boot: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The condition holds: a new episode, or news of the open one of the same `about`.

    Attributes:
        about: what has episodes of its own: "" for a rule with one condition for the run.
        branch: which of the rule's conditions, where it has several: one snake_case word.
        episode: what makes the episode's id beside first step and subject: for timer rules the boot
            and seq of the last record before.
        onset_ms: append time of the record that began it; None: of this one.
        severity, stop_worthy: other than the rule's own. Where a finding is graver than those
            before it, its episode is as grave from then on, and people are told if it turns
            critical.
        remedy: other than the rule's own.
    """

    subject: Subject
    reason: str
    first_step: int | None = None
    first_rank: int | None = None
    evidence: Evidence = field(default_factory=Evidence)
    about: str = ""
    branch: str = ""
    episode: str = ""
    onset_ms: int | None = None
    severity: Severity | None = None
    stop_worthy: bool | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Holds:
    """The condition of an open episode still holds at `step`. Nothing happens if none is open."""

    step: int | None = None
    about: str = ""


@dataclass(frozen=True, slots=True)
class Clear:
    """The condition does not hold at `step`, nor at any step since `since` (default: `step`).

    Nothing happens if no episode is open. `reason`: how it ended, where there is more to say than
    that the condition with which the issue began is gone."""

    step: int | None = None
    about: str = ""
    since: int | None = None
    reason: str = ""


Outcome = Finding | Holds | Clear
Outcomes = Iterable[Outcome]
"""What each method of a rule gives back: a list, a generator, or `()`."""


def fact(
    name: str,
    value: SupportsFloat | str,
    *,
    limit: SupportsFloat | None = None,
    unit: str | None = None,
) -> Fact:
    """One number or word of the evidence; any number of Python or numpy."""
    return Fact(
        name=name,
        value=value if isinstance(value, str) else float(value),
        limit=None if limit is None else float(limit),
        unit=unit,
    )
