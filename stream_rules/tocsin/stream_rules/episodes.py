"""Episodes: from a rule's outcomes to issues that fire once, go on, and are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.control import LookCloser
from tocsin.schemas.events import clip
from tocsin.schemas.identity import issue_id
from tocsin.schemas.issues import (
    Evidence,
    IssueFiring,
    IssueOngoing,
    IssueResolved,
    Severity,
    Subject,
)
from tocsin.stream_rules.causes import SAMPLED, Attribution, Known
from tocsin.stream_rules.facts import RunFacts
from tocsin.stream_rules.rule import Clear, Finding, Moment, Outcome, RuleMeta

MAX_OPEN: Final = 64
"""Open episodes of one rule instance at once; further ones are not opened."""

_GRAVITY: Final[tuple[Severity, ...]] = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class Told:
    """An issue's state to be published; `number` counts the states of its episode.

    `look` is what the run is asked for because of it. `because`: it is told once more only to name
    this issue as its cause; such a state is not counted.
    """

    issue: IssueFiring
    number: int
    look: LookCloser | None = None
    because: str | None = None

    @property
    def event_id(self) -> str:
        """The id of its event: the same whenever the same state is told again."""
        nth = self.number if self.because is None else f"because/{self.because}"
        return f"{self.issue.issue_id}/{self.issue.state}/{nth}"


@dataclass(slots=True)
class Episode:
    """One open issue of one rule instance. `cause` is the issue that it is a consequence of."""

    id: str
    subject: Subject
    reason: str
    severity: Severity
    stop_worthy: bool
    remedy: str
    first_step: int | None
    first_rank: int | None
    onset_ms: int
    evidence: Evidence
    branch: str = ""
    cause: str | None = None
    why: str = ""
    held: bool = False
    told: int = 0
    told_ms: int = 0
    clear_since: int | None = None

    def known(self, rule: str) -> Known:
        """What `Causes` remembers of it."""
        return Known(
            id=self.id,
            rule=rule,
            branch=self.branch,
            reason=self.reason,
            step=self.first_step,
            rank=self.first_rank,
            onset_ms=self.onset_ms,
            sampled=self.subject.kind in SAMPLED,
            root=self.cause or self.id,
            why=self.why,
            advice=self.severity == "info",
        )

    def rises(self, finding: Finding, meta: RuleMeta, *, fixed: bool) -> bool:
        """Whether a finding is graver than all before it, or the first that is worth a stop; the
        episode is so from then on. With a `fixed` severity, the configuration's, it stays.
        """
        severity = finding.severity or meta.severity
        stop_worthy = meta.stop_worthy if finding.stop_worthy is None else finding.stop_worthy
        graver = not fixed and _GRAVITY.index(severity) > _GRAVITY.index(self.severity)
        if not graver and (self.stop_worthy or not stop_worthy):
            return False
        if graver:
            self.severity = severity
        self.stop_worthy = stop_worthy
        self.remedy = finding.remedy or meta.remedy
        return True


@dataclass(slots=True)
class Episodes:
    """Those of one rule instance: the open ones by `about`, and how many there were."""

    open: dict[str, Episode] = field(default_factory=dict)
    found: int = 0

    def take(
        self,
        outcome: Outcome,
        at: Moment,
        *,
        name: str,
        meta: RuleMeta,
        severity: Severity | None,
        held: bool = False,
    ) -> Told | None:
        """What a new outcome makes known, if anything. `severity` is the configuration's; `held`
        says that no run is to be stopped for it yet.
        """
        episode = self.open.get(outcome.about)
        if isinstance(outcome, Clear):
            return self._clear(episode, outcome, at, name, meta) if episode else None
        if episode is not None:
            episode.clear_since = None
            if isinstance(outcome, Finding):
                episode.reason, episode.evidence = clip(outcome.reason), outcome.evidence
                before, released = episode.severity, episode.held and not held
                episode.held = held
                raised = episode.rises(outcome, meta, fixed=severity is not None)
                if raised or released:
                    update = {"raised_from": before if raised else None, "stop_released": released}
                    return _tell(IssueOngoing, episode, at, name, meta, update)
            if at.now_ms - episode.told_ms < meta.repeat_ms:
                return None
            return _tell(IssueOngoing, episode, at, name, meta)
        if not isinstance(outcome, Finding) or len(self.open) >= MAX_OPEN:
            return None
        episode = _opened(outcome, at, name, meta, severity)
        episode.held = held
        self.open[outcome.about] = episode
        self.found += 1
        return _tell(IssueFiring, episode, at, name, meta)

    def attribute(self, found: Attribution) -> Episode | None:
        """The open episode of that issue, with its cause from now on; None: there is none."""
        for episode in self.open.values():
            if episode.id == found.issue:
                episode.cause, episode.why = found.cause, found.why
                return episode
        return None

    def say_again(self, episode: Episode, at: Moment, *, name: str, meta: RuleMeta) -> Told:
        """An open episode once more, now with its cause."""
        return Told(_issue(IssueOngoing, episode, at, name, meta), 0, because=episode.cause)

    def _clear(
        self, episode: Episode, outcome: Clear, at: Moment, name: str, meta: RuleMeta
    ) -> Told | None:
        if outcome.step is not None and meta.resolve_after_steps > 0:
            if episode.clear_since is None:
                since = outcome.step if outcome.since is None else outcome.since
                episode.clear_since = since
            if outcome.step - episode.clear_since < meta.resolve_after_steps:
                return None
        del self.open[outcome.about]
        return _tell(IssueResolved, episode, at, name, meta)


def _opened(
    finding: Finding, at: Moment, name: str, meta: RuleMeta, severity: Severity | None
) -> Episode:
    subject = finding.subject
    key = (finding.about, finding.episode, finding.first_step, subject.collection, subject.name)
    return Episode(
        id=issue_id(
            at.run.run_id, at.run.incarnation, name, meta.version, "|".join(str(k) for k in key)
        ),
        subject=subject,
        reason=clip(finding.reason),
        severity=severity or finding.severity or meta.severity,
        stop_worthy=meta.stop_worthy if finding.stop_worthy is None else finding.stop_worthy,
        remedy=finding.remedy or meta.remedy,
        first_step=finding.first_step,
        first_rank=finding.first_rank,
        onset_ms=at.now_ms if finding.onset_ms is None else finding.onset_ms,
        evidence=finding.evidence,
        branch=finding.branch,
    )


def _tell(
    model: type[IssueFiring],
    episode: Episode,
    at: Moment,
    name: str,
    meta: RuleMeta,
    update: Mapping[str, object] | None = None,
) -> Told:
    issue = _issue(model, episode, at, name, meta)
    if update is not None:
        issue = issue.model_copy(update=update)
    told = Told(issue, episode.told)
    episode.told += 1
    episode.told_ms = at.now_ms
    return told


def _issue(
    model: type[IssueFiring], episode: Episode, at: Moment, name: str, meta: RuleMeta
) -> IssueFiring:
    run: RunFacts = at.run
    return model(
        run_id=run.run_id,
        incarnation=run.incarnation,
        rank=episode.first_rank or 0,
        world_size=run.world_size,
        issue_id=episode.id,
        rule=name,
        use=meta.name,
        rule_version=meta.version,
        branch=episode.branch,
        severity=episode.severity,
        stop_worthy=episode.stop_worthy,
        stop_held=episode.held,
        subject=episode.subject,
        reason=episode.reason,
        remedy=episode.remedy,
        first_step=episode.first_step,
        first_rank=episode.first_rank,
        step=run.last_step,
        onset_ms=episode.onset_ms,
        at_ms=at.now_ms,
        labels=dict(run.labels),
        evidence=episode.evidence.model_copy(update={"cause": clip(episode.why)}),
        consequence_of=episode.cause,
        last_good_checkpoint=run.checkpoint_before(episode.first_step),
    )
