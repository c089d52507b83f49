"""What is to be done about an issue, and which line decides it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.configuration.problems import Loc
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry, StopOptions
from tocsin.schemas.records.issues import SEVERITIES, Issue, IssueOngoing

STOP: Final = "stop"

_NOTIFIED: Final = ("warning", "critical")


@dataclass(frozen=True, slots=True)
class Planned:
    """One thing to do. `action` is the receiver's name, or `stop`."""

    action: str
    kind: str
    decided_by: str
    options: StopOptions | None = None
    forbidden: str | None = None
    """Why it is not done after all; it is recorded as suppressed."""
    occasion: str = ""
    """As the ledger's entry has it."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The configuration's decisions.

    Attributes:
        rules: the config file's entries by instance name.
        notify: names of the receivers that `--notify` made.
        notify_of: which ones count for this issue's run alone, with their kinds.
        kinds: of the receivers, those of `--notify` included.
        firing_only: receivers that get no notice when an issue resolves.
        stops_off: why no stop is sent (`--no-stop`); None if stops are on.
        place: where a part of the config file is.
    """

    rules: Mapping[str, RuleEntry]
    notify: Sequence[str] = ()
    stops_off: str | None = None
    place: Callable[[Loc], str] = lambda loc: ".".join(map(str, loc))
    kinds: Mapping[str, str] = field(default_factory=dict)
    firing_only: Collection[str] = ()
    notify_of: Callable[[Issue], Sequence[tuple[str, str]]] = lambda issue: ()

    def plan(self, issue: Issue) -> list[Planned]:
        """What to do, stop first; each action once.

        A notice goes out when an issue fires, when it turns critical and when it is resolved,
        unless this state is muted; a stop when it fires or gets graver, or as soon as it is not
        held back any more. A rule's action list decides alone; without one a critical, stop-worthy
        issue stops its run.
        """
        if isinstance(issue, IssueOngoing) and not issue.turned_critical:
            changed = issue.stop_released or issue.raised_from is not None
            return [p for p in self._of_rule(issue) if changed and p.kind == STOP]
        planned: dict[str, Planned] = {}
        for item in [*self._of_rule(issue), *self._of_notify(issue)]:
            if issue.muted and item.kind != STOP:
                continue
            planned.setdefault(item.action, item)
        return sorted(planned.values(), key=lambda item: item.kind != STOP)

    def _of_rule(self, issue: Issue) -> list[Planned]:
        entry = self.rules.get(issue.rule)
        if entry is None or entry.actions is None:
            if issue.severity == "critical" and issue.stop_worthy and _may_stop(issue):
                return [self._stop("default: stop for critical issues that are stop-worthy", None)]
            return []
        return [
            item
            for action in entry.actions
            if (item := self._entry(action, issue, self.place(action.loc))) is not None
        ]

    def _entry(self, action: ActionEntry, issue: Issue, where: str) -> Planned | None:
        if action.kind == STOP:
            options = action.options or StopOptions()
            stops = _may_stop(issue) and _worth_it(issue, options)
            return self._stop(where, options) if stops else None
        if action.receiver is None:
            return None
        if issue.state == "resolved" and action.receiver in self.firing_only:
            return None
        return Planned(action.receiver, self._kind(action.receiver), where)

    def _kind(self, receiver: str) -> str:
        return self.kinds.get(receiver, "webhook")

    def _stop(self, decided_by: str, options: StopOptions | None) -> Planned:
        return Planned(STOP, STOP, decided_by, options or StopOptions(), self.stops_off)

    def _of_notify(self, issue: Issue) -> list[Planned]:
        if issue.severity not in _NOTIFIED:
            return []
        named = [*((name, self._kind(name)) for name in self.notify), *self.notify_of(issue)]
        return [Planned(name, kind, "--notify: issues from warning up") for name, kind in named]


def _worth_it(issue: Issue, options: StopOptions) -> bool:
    """Whether a stop that a rule's action list names acts on this issue."""
    if options.at is not None:
        return SEVERITIES.index(issue.severity) >= SEVERITIES.index(options.at)
    return issue.stop_worthy or issue.rule_may_stop is False


def _may_stop(issue: Issue) -> bool:
    """Whether a stop of its run is not too late, nor too early."""
    return issue.state != "resolved" and not issue.stop_held
