"""What the configuration asks for about an issue: rules' action lists, routes, `--notify`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.actions.decision.planned import STOP, Place, Planned
from tocsin.actions.decision.routes import routed
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry, StopOptions
from tocsin.schemas.records.issues import SEVERITIES, Issue, IssueOngoing

ACTION_FAILED: Final = "action_failed"
"""The rule of issues that report a receiver; their subject is its name."""

_NOTIFIED: Final = ("warning", "critical")


@dataclass(frozen=True, slots=True)
class Routing:
    """The configuration's decisions.

    Attributes:
        rules: the config file's entries by instance name.
        notify: names of the receivers that `--notify` made.
        notify_of: which ones count for this issue's run alone, with their kinds.
        kinds: of the receivers, those of `--notify` included.
        send_resolved: whether the receivers that ask for it are notified when an issue resolves.
        resolved_by_default: whether the others are, where their route does not decide.
        stops_off: why no stop is sent (`--no-stop`); None if stops are on.
        place: where a part of the config file is.
        routes: decide where a rule has no action list, or `by_route` in it.
    """

    rules: Mapping[str, RuleEntry]
    notify: Sequence[str] = ()
    stops_off: str | None = None
    place: Place = lambda loc: ".".join(map(str, loc))
    kinds: Mapping[str, str] = field(default_factory=dict)
    send_resolved: Mapping[str, bool] = field(default_factory=dict)
    resolved_by_default: bool = True
    notify_of: Callable[[Issue], Sequence[tuple[str, str]]] = lambda issue: ()
    routes: Sequence[RouteEntry] = ()

    def plan(self, issue: Issue) -> list[Planned]:
        """What to do, stop first; each action once.

        A notice goes out when an issue fires, when it turns critical and when it is resolved,
        unless this state is muted; a stop when it fires or gets worse, or as soon as it is not
        held back any more. A rule's action list decides alone; without one the routes notify, and a
        critical, stop-worthy issue stops its run.
        """
        if isinstance(issue, IssueOngoing) and not issue.turned_critical:
            changed = issue.stop_released or issue.raised_from is not None
            return [p for p in self._planned_by_rule(issue) if changed and p.kind == STOP]
        planned = self._all(issue)
        if issue.muted:
            planned = [item for item in planned if item.kind == STOP]
        return [
            item
            for item in planned
            if issue.state != "resolved" or self.sends_resolved(item.action, item.route)
        ]

    def sends_resolved(self, receiver: str, route: RouteEntry | None) -> bool:
        """Whether a receiver is notified of the end of an issue: its route decides, then the
        receiver's own setting, then the default.

        `route`: the one by which such an issue is notified; None: no route asks for it.
        """
        of_route = None if route is None else route.send_resolved
        if of_route is not None:
            return of_route
        return self.send_resolved.get(receiver, self.resolved_by_default)

    def notices(self, issue: Issue) -> list[Planned]:
        """Whom an issue of this severity notifies, in whatever state it is."""
        return [item for item in self._all(issue) if item.kind != STOP]

    def _all(self, issue: Issue) -> list[Planned]:
        planned: dict[str, Planned] = {}
        named = [*self._planned_by_rule(issue), *self._planned_by_notify(issue)]
        for item in [*named, *self._another(issue, named)]:
            planned.setdefault(item.action, item)
        return sorted(planned.values(), key=lambda item: item.kind != STOP)

    def _planned_by_rule(self, issue: Issue) -> list[Planned]:
        actions = self._actions(issue)
        if actions is not None:
            return [item for action in actions for item in self._entry(action, issue)]
        planned = self._planned_by_routes(issue)
        if issue.severity == "critical" and issue.stop_worthy and _may_stop(issue):
            where = "default: stop for critical issues that are stop-worthy"
            planned.append(self._stop(where, None))
        return planned

    def _entry(self, action: ActionEntry, issue: Issue) -> list[Planned]:
        where = self.place(action.loc)
        if action.kind == STOP:
            options = action.options or StopOptions()
            stops = _may_stop(issue) and _worth_it(issue, options)
            return [self._stop(where, options)] if stops else []
        if action.receiver is None:
            return self._planned_by_routes(issue)
        return [Planned(action.receiver, self.kind_of(action.receiver), where)]

    def _planned_by_routes(self, issue: Issue) -> list[Planned]:
        found = routed(self.routes, issue_labels(issue), issue.severity, self.place)
        return [
            Planned(one.receiver, self.kind_of(one.receiver), one.decided_by, route=one.route)
            for one in found
        ]

    def _actions(self, issue: Issue) -> Sequence[ActionEntry] | None:
        """The action list of an issue's rule; None: it has none."""
        entry = self.rules.get(issue.rule)
        return None if entry is None else entry.actions

    def _another(self, issue: Issue, named: Iterable[Planned]) -> list[Planned]:
        """Who reports that a receiver fails, if nobody else is named: the first other receiver."""
        failing = issue.subject.name
        if issue.use != ACTION_FAILED or self._actions(issue) is not None:
            return []
        if any(item.action != failing for item in named):
            return []
        why = "default: a receiver that fails is reported by another one"
        others = [name for name in self.kinds if name != failing]
        return [Planned(name, self.kind_of(name), why) for name in others[:1]]

    def kind_of(self, receiver: str) -> str:
        """The kind of a receiver, by its name."""
        return self.kinds.get(receiver, "webhook")

    def _stop(self, decided_by: str, options: StopOptions | None) -> Planned:
        return Planned(STOP, STOP, decided_by, options or StopOptions(), self.stops_off)

    def _planned_by_notify(self, issue: Issue) -> list[Planned]:
        if issue.severity not in _NOTIFIED:
            return []
        named = [*((name, self.kind_of(name)) for name in self.notify), *self.notify_of(issue)]
        return [Planned(name, kind, "--notify: issues from warning up") for name, kind in named]


def _worth_it(issue: Issue, options: StopOptions) -> bool:
    """Whether a stop that a rule's action list names acts on this issue."""
    if options.at is not None:
        return SEVERITIES.index(issue.severity) >= SEVERITIES.index(options.at)
    return issue.stop_worthy or issue.rule_may_stop is False


def _may_stop(issue: Issue) -> bool:
    """Whether a stop of its run is not too late, nor too early."""
    return issue.state != "resolved" and not issue.stop_held
