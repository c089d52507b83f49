"""The way of an issue through the stages: what is sent to whom, and what holds the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from tocsin.actions.decision.consequences import Noticed, folded
from tocsin.actions.decision.inhibitions import WAIT_MS, OpenIssue, could_be_muted, inhibited
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.actions.decision.notice_times import NoticeTimes
from tocsin.actions.decision.planned import STOP, Held, Planned
from tocsin.actions.decision.routing import Routing
from tocsin.actions.decision.silences import Silence, silenced
from tocsin.actions.decision.stop_guards import Fleet, StopGuards
from tocsin.actions.decision.time_windows import TimeWindows
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.configuration.routing.silences import Muted
from tocsin.schemas.records.deliveries import LATE
from tocsin.schemas.records.issues import Issue, IssueOngoing

START_NOT_SENT: Final = "its start was not sent there"
NOT_RESOLVED: Final = "send_resolved is false: the end of an issue is not sent there"


class Known(Protocol):
    """What is known beside the issue and the configuration."""

    def silences(self) -> Iterable[Silence]:
        """The silences of `tocsin silence`."""
        ...

    def open_issues(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        """The open issues of one training; that in question may be among them."""
        ...

    def noticed(self, issue_id: str) -> Mapping[str, Noticed]:
        """The notices about an issue that each receiver has got, by name."""
        ...

    def stops_off(self) -> str:
        """Why all stops are switched off; empty if they are not."""
        ...

    def fleet(self, issue: Issue, now_ms: int) -> Fleet:
        """What limits of stops count, for the run of an issue."""
        ...


@dataclass(frozen=True, slots=True)
class Decisions:
    """The stages of one configuration, in their order: action list and routes, silences,
    inhibitions, time windows, causes; for stops silences, the switch, the mode, limits.

    Attributes:
        routing: who is asked for.
        receivers: the config file's, for their time windows.
        silences: the config file's.
        times: when notices are sent, and with which others.
        guards: what may keep a stop from being sent.
    """

    routing: Routing
    silences: Sequence[Silence] = ()
    inhibit: Sequence[InhibitEntry] = ()
    windows: TimeWindows = field(default_factory=lambda: TimeWindows({}))
    receivers: Mapping[str, ReceiverConfig] = field(default_factory=dict)
    times: NoticeTimes = field(default_factory=NoticeTimes)
    guards: StopGuards = field(default_factory=StopGuards)

    def decide(self, issue: Issue, known: Known, now_ms: int) -> list[Planned]:
        """What to do about a state of an issue, stops first, and what holds or forbids it.

        Receivers that were notified of the start of an issue are notified of its end, whatever
        holds other notices by then, and no others are. A receiver whose notice was held gets the
        next update of the issue, if nothing holds that.
        """
        noticed = known.noticed(issue.issue_id)
        if issue.state == "resolved":
            return list(self._ended(issue, noticed))
        planned = self.routing.plan(issue)
        if isinstance(issue, IssueOngoing) and not issue.muted:
            if issue.turned_critical:
                asked = {item.action for item in planned}
                planned += [item for item in _notified(noticed) if item.action not in asked]
            else:
                planned += self._late(issue, noticed, known, now_ms)
        checked = [self._checked(item, issue, known, now_ms) for item in planned]
        return [*checked, *self._question(checked)]

    def notified(self, issue: Issue, noticed: Mapping[str, Noticed]) -> list[Planned]:
        """Who is notified of the end of an issue: those who were notified of its start."""
        return [item for item in self._routed(issue, noticed) if self._sends_resolved(item)]

    def held(self, item: Planned, issue: Issue, known: Known, now_ms: int) -> Held | None:
        """What keeps a notice from being sent now; the first stage that does."""
        if (held := self._silenced(issue, "notify", known, now_ms)) is not None:
            return held
        if (held := self.inhibited(issue, known)) is not None:
            return held
        if (held := self.closed(item, now_ms)) is not None:
            return held
        if issue.consequence_of is None:
            return None
        return folded(issue, known.noticed(issue.consequence_of).get(item.action))

    def inhibited(self, issue: Issue, known: Known) -> Held | None:
        """Which open issue of its training explains an issue, after the section `inhibit`."""
        if not self.inhibit:
            return None
        others = known.open_issues(issue.run_id, issue.incarnation)
        mine = OpenIssue(issue.issue_id, issue_labels(issue))
        return inhibited(self.inhibit, mine, others, self.routing.place)

    def _question(self, planned: Sequence[Planned]) -> Iterator[Planned]:
        """The receiver that gets the question whether to stop, unless it gets the issue anyway."""
        for item in planned:
            via = None if item.asks is None or item.options is None else item.options.approve.via
            if via is not None and all(via != other.action for other in planned):
                yield Planned(via, self.routing.kind_of(via), item.decided_by)

    def _checked(self, item: Planned, issue: Issue, known: Known, now_ms: int) -> Planned:
        if item.forbidden is not None:
            return item
        if item.kind == STOP:
            if (held := self._silenced(issue, "stop", known, now_ms)) is not None:
                return replace(item, held=held)
            return self.guards.guarded(item, lambda: known.fleet(issue, now_ms), known.stops_off())
        if (held := self.held(item, issue, known, now_ms)) is not None:
            return replace(item, held=held)
        if could_be_muted(self.inhibit, issue_labels(issue)):
            return replace(item, wait_ms=WAIT_MS)
        return item

    def _silenced(self, issue: Issue, what: Muted, known: Known, now_ms: int) -> Held | None:
        silences = [*self.silences, *known.silences()]
        return silenced(silences, issue_labels(issue), what, now_ms)

    def closed(self, item: Planned, now_ms: int) -> Held | None:
        """Which time window keeps a notice from being sent now."""
        place = self.routing.place
        users = []
        if (route := item.route) is not None:
            users.append((route.active, route.mute, route.loc))
        if (receiver := self.receivers.get(item.action)) is not None:
            users.append((receiver.active, receiver.mute, ("receivers", item.action)))
        for active, mute, loc in users:
            if active or mute:
                held = self.windows.held(active, mute, now_ms, place(loc))
                if held is not None:
                    return held
        return None

    def _ended(self, issue: Issue, noticed: Mapping[str, Noticed]) -> Iterator[Planned]:
        if issue.muted:
            return
        notified = set()
        for item in self._routed(issue, noticed):
            notified.add(item.action)
            sends = self._sends_resolved(item)
            yield item if sends else replace(item, forbidden=NOT_RESOLVED)
        for item in self.routing.plan(issue):
            if item.action not in notified:
                yield replace(item, forbidden=START_NOT_SENT)

    def _routed(self, issue: Issue, noticed: Mapping[str, Noticed]) -> Iterator[Planned]:
        """Who was notified of an issue, each with the route that would notify them now."""
        routes = {item.action: item.route for item in self.routing.notices(issue)}
        for item in _notified(noticed):
            yield replace(item, route=routes.get(item.action))

    def _sends_resolved(self, item: Planned) -> bool:
        return self.routing.sends_resolved(item.action, item.route)

    def _late(
        self, issue: Issue, noticed: Mapping[str, Noticed], known: Known, now_ms: int
    ) -> Iterator[Planned]:
        for item in self.routing.notices(issue):
            seen = noticed.get(item.action)
            if seen is not None and seen.held and self.held(item, issue, known, now_ms) is None:
                yield replace(item, occasion=LATE)


def _notified(noticed: Mapping[str, Noticed]) -> Iterator[Planned]:
    """The receivers that were notified of an issue, as they were asked for then."""
    for action, seen in noticed.items():
        if seen.notified:
            yield Planned(action, seen.kind, seen.decided_by)
