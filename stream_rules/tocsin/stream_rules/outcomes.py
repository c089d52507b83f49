"""The argument and the results of a rule's methods: the moment of a call, and the outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Final, SupportsFloat

from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.issues import Evidence, Fact, Series, Severity, Subject

if TYPE_CHECKING:
    from tocsin.schemas.records.frames import StepFrame
    from tocsin.stream_rules.reading.run_facts import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The position of a call in the record stream.

    Attributes:
        now_ms: the partition's clock: the highest append time so far, Unix milliseconds.
        run: facts about the run, such as its labels.
        rank: the rank that sent the record.
        boot, seq: the process that sent it, and the record's number.
    """

    now_ms: int
    run: RunFacts
    rank: int = 0
    boot: str = ""
    seq: int = 0

    def step_of(self, frame: StepFrame) -> int:
        """The last step of a frame of training that has some, on the run's count: what the user has
        logged may be at a step of another one."""
        return min(int(frame.steps[-1]), self.run.last_step or 0)


_NO_EVIDENCE: Final = Evidence()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The condition is true: opens an episode, or updates the open one with the same `about`.

    Attributes:
        subject: where it is: a loss, a tensor, a node.
        reason: one sentence for the reader.
        first_step: step at which it started.
        first_rank: rank on which it started.
        facts: the numbers and words behind it.
        series: the deciding series.
        followed: how many further tensors or ranks are affected; `also` are the first of their
            names.
        explanation: how the cause was decided.
        evidence: all of these, for a rule that has them together.
        about: subjects with separate episodes; "" for a rule with one condition for each run.
        branch: which of the rule's conditions, if it has several: one snake_case word.
        episode: part of the episode's id, in addition to first step and subject: for timer rules
            the boot and seq of the last record before.
        onset_ms: append time of the record that started it; None: of this one.
        severity, stop_worthy: override the rule's own. A higher severity raises that of the
            episode, and receivers are notified when it becomes critical.
        remedy: overrides the rule's own.
        checkpoint: the one to go back to, instead of the newest good one before the first step.
    """

    subject: Subject
    reason: str
    first_step: int | None = None
    first_rank: int | None = None
    about: str = ""
    branch: str = ""
    episode: str = ""
    onset_ms: int | None = None
    severity: Severity | None = None
    stop_worthy: bool | None = None
    remedy: str | None = None
    checkpoint: Checkpoint | None = None
    evidence: Evidence = _NO_EVIDENCE
    facts: InitVar[Sequence[Fact]] = ()
    series: InitVar[Series | None] = None
    followed: InitVar[int] = 0
    also: InitVar[Sequence[str]] = ()
    explanation: InitVar[str] = ""

    def __post_init__(
        self,
        facts: Sequence[Fact],
        series: Series | None,
        followed: int,
        also: Sequence[str],
        explanation: str,
    ) -> None:
        if self.evidence is not _NO_EVIDENCE:
            return
        evidence = Evidence(
            facts=tuple(facts),
            series=series,
            followed=followed,
            also=tuple(also),
            explanation=explanation,
        )
        object.__setattr__(self, "evidence", evidence)


@dataclass(frozen=True, slots=True)
class Holds:
    """The condition of an open episode is still true at `step`. Ignored if none is open."""

    step: int | None = None
    about: str = ""


@dataclass(frozen=True, slots=True)
class Clear:
    """The condition is false at `step`, and at all steps since `since` (default: `step`).

    Ignored if no episode is open.

    Attributes:
        reason: how it ended, if there is more to report than that the condition is gone.
    """

    step: int | None = None
    about: str = ""
    since: int | None = None
    reason: str = ""


Outcome = Finding | Holds | Clear
Outcomes = Iterable[Outcome]
"""The result of each method of a rule: a list, a generator, or `()`."""


def fact(
    name: str,
    value: SupportsFloat | str,
    *,
    limit: SupportsFloat | None = None,
    unit: str | None = None,
) -> Fact:
    """A number (of Python or NumPy) or a word of the evidence."""
    return Fact(
        name=name,
        value=value if isinstance(value, str) else float(value),
        limit=None if limit is None else float(limit),
        unit=unit,
    )
