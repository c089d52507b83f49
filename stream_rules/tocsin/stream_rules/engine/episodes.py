"""Episodes: from a rule's outcomes to issues that fire, go on, and are resolved.

A condition that comes and goes is one issue, not a new one each time: what comes again soon keeps
its id, counts its times, and is resolved only after a longer pause than those that it came back
from. People are notified of it at most once in the rule's `repeat`, and of one rule and run only so
often at all; what is `muted` is on the bus anyway, and a stop does not depend on it. A
return that is critical is always news, also while its issue waits to be resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.issues import (
    SEVERITIES,
    Evidence,
    IssueFiring,
    IssueOngoing,
    IssueResolved,
    Origin,
    Severity,
    Subject,
)
from tocsin.schemas.records.stops.commands import DetailRequest
from tocsin.stream_rules.engine.causes import SAMPLED, Attribution, Known, cause_first
from tocsin.stream_rules.engine.recurrence import AGAIN_MS, MAX_HOLD_STEPS, Past
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcome
from tocsin.stream_rules.reading.restarts import MAX_FAULTS, Fault, fault_of
from tocsin.stream_rules.reading.run_facts import RunFacts
from tocsin.stream_rules.rule import RuleMeta

MAX_OPEN: Final = 64
"""Open episodes of one rule instance at once; further ones are not opened."""

MAX_PAST: Final = 64
"""Resolved issues of one rule instance that can come again; the oldest are forgotten."""

MAX_NOTICES: Final = 20
"""Notices of one severity that one rule instance sends of one run when issues fire."""


@dataclass(frozen=True, slots=True)
class Reported:
    """An issue's state to be published; `number` counts the states of its episode.

    `request` asks the run for more numbers because of it. `because`: it is published once more only
    to name this issue as its cause; such a state is not counted.
    """

    issue: IssueFiring
    number: int
    request: DetailRequest | None = None
    because: str | None = None

    @property
    def event_id(self) -> str:
        """The id of its event: the same whenever the same state is reported again."""
        nth = self.number if self.because is None else f"because/{self.because}"
        return f"{self.issue.issue_id}/{self.issue.state}/{nth}"


@dataclass(slots=True)
class Episode:
    """One open issue of one rule instance. `cause` is the issue that it is a consequence of.

    `muted`: nobody has been notified that it is open. `returned`: its condition has come back, and
    nobody has been notified of that. `last_notice`: the next state is the last of its severity that
    its rule notifies people of. `peak` and `origin` are of the times before this one.
    """

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
    """The condition that was found last; `opened_as` is the first."""
    opened_as: str = ""
    cause: str | None = None
    cause_rule: str = ""
    why: str = ""
    held: bool = False
    told: int = 0
    told_ms: int = 0
    clear_since: int | None = None
    times: int = 1
    opening: str = ""
    ending: str = ""
    pause: int = 0
    muted: bool = False
    noticed_ms: int = 0
    began_before: int | None = None
    returned: bool = False
    last_notice: bool = False
    peak: Severity | None = None
    origin: Origin | None = None
    checkpoint: Checkpoint | None = None

    @property
    def advice(self) -> str:
        """What to try: first of all about what it follows from."""
        if self.cause is None:
            return self.remedy
        return cause_first(self.remedy, self.cause, self.cause_rule)

    @property
    def gravest(self) -> Severity:
        """The highest severity that the issue has had."""
        return max(self.severity, self.peak or self.severity, key=SEVERITIES.index)

    def comes_from(self, past: Past, pause: int) -> None:
        """Make it one more time of an issue; `pause`: for how long its condition was gone."""
        self.id, self.told, self.times = past.id, past.told, past.times + 1
        self.pause, self.noticed_ms = max(past.pause, pause), past.noticed_ms
        self.peak, self.origin = past.peak, past.origin

    def known(self, rule: str) -> Known:
        """What `Causes` remembers of it."""
        return Known(
            id=self.id,
            rule=rule,
            branch=self.opened_as or self.branch,
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
        """Whether a finding is worse than all before it, or the first that is worth a stop; the
        episode is so from then on. With a `fixed` severity, the configuration's, it stays.
        """
        severity = finding.severity or meta.severity
        stop_worthy = meta.stop_worthy if finding.stop_worthy is None else finding.stop_worthy
        graver = not fixed and SEVERITIES.index(severity) > SEVERITIES.index(self.severity)
        if not graver and (self.stop_worthy or not stop_worthy):
            return False
        if graver:
            self.severity = severity
        self.stop_worthy = stop_worthy
        self.remedy = finding.remedy or meta.remedy
        return True


@dataclass(slots=True)
class Episodes:
    """The episodes of one rule instance: the open ones by `about`, and how many issues there were.

    `past` are resolved ones that may come again; `notices` counts those sent, by severity; `faults`
    are the first issues that were worth a stop, of this incarnation and of earlier ones.
    """

    open: dict[str, Episode] = field(default_factory=dict)
    found: int = 0
    past: dict[str, Past] = field(default_factory=dict)
    notices: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def apply(
        self,
        outcome: Outcome,
        at: Moment,
        *,
        name: str,
        meta: RuleMeta,
        severity: Severity | None,
        held: bool = False,
    ) -> Reported | None:
        """What a new outcome makes known, if anything. `severity` is the configuration's; `held`
        says that no run is to be stopped for it yet.
        """
        episode = self.open.get(outcome.about)
        if isinstance(outcome, Clear):
            return self._clear(episode, outcome, at, name, meta) if episode else None
        if episode is not None:
            if isinstance(outcome, Finding) and _is_back(episode, at, meta):
                return self._again(episode, outcome, at, name, meta, severity, held)
            episode.clear_since = None
            if isinstance(outcome, Finding):
                episode.opened_as = episode.opened_as or episode.branch
                episode.reason, episode.evidence = clip(outcome.reason), outcome.evidence
                episode.branch = outcome.branch
                before, released = episode.severity, episode.held and not held
                episode.held = held
                raised = episode.rises(outcome, meta, fixed=severity is not None)
                if raised or released:
                    update: dict[str, object] = {
                        "raised_from": before if raised else None,
                        "stop_released": released,
                    }
                    if raised and episode.severity == "critical":
                        update["muted"] = not self._notify(episode, at, meta)
                    return _report(IssueOngoing, episode, at, name, meta, update)
            if at.now_ms - episode.told_ms < meta.repeat_ms:
                return None
            if (episode.muted or episode.returned) and self._notify(episode, at, meta):
                return _report(IssueFiring, episode, at, name, meta)
            return _report(IssueOngoing, episode, at, name, meta)
        if not isinstance(outcome, Finding) or len(self.open) >= MAX_OPEN:
            return None
        episode = _opened(outcome, at, name, meta, severity)
        episode.held = held
        self._recall(episode, outcome, at)
        self.open[outcome.about] = episode
        episode.muted = not self._notify(episode, at, meta)
        return _report(IssueFiring, episode, at, name, meta)

    def note_fault(self, issue: IssueFiring) -> None:
        """Remember an issue if it is the first of its incarnation that is worth a stop."""
        fault = fault_of(issue)
        if fault and all(fault.incarnation != known.incarnation for known in self.faults):
            self.faults = [*self.faults, fault][-MAX_FAULTS:]

    def _recall(self, episode: Episode, finding: Finding, at: Moment) -> None:
        """Make a new episode one of the issue that its condition had before, if it is the same."""
        past = self.past.pop(finding.about, None)
        pause = None if past is None else past.comes_again(finding, at)
        if past is not None and past.in_ms == (finding.first_step is None):
            episode.began_before = past.began
        if past is None or pause is None:
            self.found += 1
        else:
            episode.comes_from(past, pause)

    def _again(
        self,
        before: Episode,
        finding: Finding,
        at: Moment,
        name: str,
        meta: RuleMeta,
        severity: Severity | None,
        held: bool,
    ) -> Reported | None:
        """The condition is back before its issue was resolved: one more time of the same issue.

        It is reported if it is critical and people may be notified, if it changes what a stop
        depends on, or once in the rule's `repeat`.
        """
        past = _past(before, at)
        episode = _opened(finding, at, name, meta, severity)
        same_clock = past.in_ms == (episode.first_step is None)
        episode.comes_from(past, _clock(before, at) - past.over if same_clock else 0)
        episode.began_before = past.began if same_clock else None
        episode.told_ms, episode.muted = before.told_ms, before.muted
        episode.cause, episode.cause_rule = before.cause, before.cause_rule
        episode.why, episode.held = before.why, held
        self.open[finding.about] = episode
        due = (
            at.now_ms - before.told_ms >= meta.repeat_ms
            or SEVERITIES.index(episode.severity) > SEVERITIES.index(before.gravest)
            or (episode.stop_worthy and not before.stop_worthy)
            or (before.held and not held)
        )
        episode.returned = True
        noticed = (due or episode.severity == "critical") and self._notify(episode, at, meta)
        if not noticed and not due:
            return None
        return _report(IssueFiring, episode, at, name, meta, {"muted": not noticed})

    def _notify(self, episode: Episode, at: Moment, meta: RuleMeta) -> bool:
        """Whether people may be notified that it fires; if so it is counted."""
        soon = at.now_ms - episode.noticed_ms < meta.repeat_ms
        if episode.times > 1 and soon and episode.severity != "critical":
            return False
        sent = self.notices.get(episode.severity, 0)
        if sent >= MAX_NOTICES:
            return False
        self.notices[episode.severity] = sent + 1
        episode.muted, episode.returned, episode.noticed_ms = False, False, at.now_ms
        episode.last_notice = sent + 1 == MAX_NOTICES
        return True

    def is_graver(self, finding: Finding, meta: RuleMeta) -> bool:
        """Whether a finding is more severe than the open episode of its `about`, or opens one."""
        episode = self.open.get(finding.about)
        if episode is None:
            return True
        severity = finding.severity or meta.severity
        stop_worthy = meta.stop_worthy if finding.stop_worthy is None else finding.stop_worthy
        graver = SEVERITIES.index(severity) > SEVERITIES.index(episode.severity)
        return graver or (stop_worthy and not episode.stop_worthy)

    def attribute(self, found: Attribution) -> Episode | None:
        """The open episode of that issue, with its cause from now on; None: there is none."""
        for episode in self.open.values():
            if episode.id == found.issue:
                episode.cause, episode.cause_rule = found.cause, found.rule
                episode.why = found.why
                return episode
        return None

    def repeat(self, episode: Episode, at: Moment, *, name: str, meta: RuleMeta) -> Reported:
        """An open episode once more, now with its cause."""
        return Reported(_issue(IssueOngoing, episode, at, name, meta), 0, because=episode.cause)

    def _clear(
        self, episode: Episode, outcome: Clear, at: Moment, name: str, meta: RuleMeta
    ) -> Reported | None:
        if episode.times > 1:
            if episode.clear_since is None:
                since = outcome.step if outcome.since is None else outcome.since
                episode.clear_since = _clock(episode, at) if since is None else since
                episode.ending = clip(outcome.reason)
            return self._settle(outcome.about, episode, at, name, meta)
        if outcome.step is not None and meta.resolve_after_steps > 0:
            if episode.clear_since is None:
                since = outcome.step if outcome.since is None else outcome.since
                episode.clear_since = since
            if outcome.step - episode.clear_since < meta.resolve_after_steps:
                return None
        episode.ending = clip(outcome.reason)
        return self._resolve(outcome.about, episode, at, name, meta)

    def settle(self, at: Moment, *, name: str, meta: RuleMeta) -> list[Reported]:
        """Resolve what has come again and then been gone for long enough.

        To be called after `take`: a rule need not repeat that its condition is gone.
        """
        waiting = [
            (about, episode)
            for about, episode in self.open.items()
            if episode.times > 1 and episode.clear_since is not None
        ]
        settled = (self._settle(*one, at, name, meta) for one in waiting)
        return [reported for reported in settled if reported is not None]

    def _settle(
        self, about: str, episode: Episode, at: Moment, name: str, meta: RuleMeta
    ) -> Reported | None:
        if episode.clear_since is None:
            return None
        if episode.first_step is None:
            hold = min(2 * episode.pause, AGAIN_MS)
        else:
            hold = max(meta.resolve_after_steps, min(2 * episode.pause, MAX_HOLD_STEPS))
        if _clock(episode, at) - episode.clear_since < hold:
            return None
        return self._resolve(about, episode, at, name, meta)

    def _resolve(
        self, about: str, episode: Episode, at: Moment, name: str, meta: RuleMeta
    ) -> Reported:
        del self.open[about]
        # What was found last is no longer so: its end is reported with its first severity.
        if episode.ending or episode.opening:
            episode.reason = episode.ending or episode.opening
        if not episode.ending:
            episode.branch = episode.opened_as or episode.branch
        reported = _report(IssueResolved, episode, at, name, meta)
        self.past[about] = _past(episode, at)
        while len(self.past) > MAX_PAST:
            del self.past[next(iter(self.past))]
        return reported


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
        opening=clip(finding.reason),
        severity=severity or finding.severity or meta.severity,
        stop_worthy=meta.stop_worthy if finding.stop_worthy is None else finding.stop_worthy,
        remedy=finding.remedy or meta.remedy,
        checkpoint=finding.checkpoint,
        first_step=finding.first_step,
        first_rank=finding.first_rank,
        onset_ms=at.now_ms if finding.onset_ms is None else finding.onset_ms,
        evidence=finding.evidence,
        branch=finding.branch,
    )


def _clock(episode: Episode, at: Moment) -> int:
    """Where the run is: in steps, or in append time for an episode that has none."""
    return at.now_ms if episode.first_step is None else at.run.last_step or 0


def _is_back(episode: Episode, at: Moment, meta: RuleMeta) -> bool:
    """Whether a condition that is found was gone for as long as resolves an issue at first."""
    if episode.times == 1 or episode.clear_since is None:
        return False
    gone = _clock(episode, at) - episode.clear_since
    return episode.first_step is None or gone >= meta.resolve_after_steps


def _past(episode: Episode, at: Moment) -> Past:
    end = _clock(episode, at)
    began = episode.onset_ms if episode.first_step is None else episode.first_step
    return Past(
        id=episode.id,
        branch=episode.opened_as or episode.branch,
        times=episode.times,
        told=episode.told,
        began=began,
        over=end if episode.clear_since is None else episode.clear_since,
        length=max(1, end - began),
        before=episode.began_before,
        in_ms=episode.first_step is None,
        pause=episode.pause,
        noticed_ms=episode.noticed_ms,
        peak=episode.gravest,
        origin=episode.origin
        or Origin(step=episode.first_step, rank=episode.first_rank, onset_ms=episode.onset_ms),
    )


def _report(
    model: type[IssueFiring],
    episode: Episode,
    at: Moment,
    name: str,
    meta: RuleMeta,
    update: Mapping[str, object] | None = None,
) -> Reported:
    issue = _issue(model, episode, at, name, meta)
    if update is not None:
        issue = issue.model_copy(update=update)
    episode.last_notice = False
    reported = Reported(issue, episode.told)
    episode.told += 1
    episode.told_ms = at.now_ms
    return reported


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
        rule_may_stop=meta.stop_worthy,
        stop_held=episode.held,
        subject=episode.subject,
        reason=_reason(episode),
        times=episode.times,
        muted=episode.muted,
        last_notice=episode.last_notice,
        peak_severity=None if episode.gravest == episode.severity else episode.gravest,
        origin=episode.origin,
        remedy=episode.advice,
        first_step=episode.first_step,
        first_rank=episode.first_rank,
        step=run.last_step,
        onset_ms=episode.onset_ms,
        at_ms=at.now_ms,
        labels=dict(run.labels),
        evidence=episode.evidence.model_copy(update={"cause": clip(episode.why)}),
        consequence_of=episode.cause,
        last_good_checkpoint=episode.checkpoint or run.checkpoint_before(episode.first_step),
    )


def _reason(episode: Episode) -> str:
    if episode.times == 1:
        return episode.reason
    return clip(f"{episode.reason.removesuffix('.')} (time {episode.times} in this run)")
