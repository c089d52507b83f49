"""All stages over random configurations and timelines, against a slow model that only looks back.

The model keeps every event and every outcome, and answers each question by going through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.records.issues import NOW_MS, incarnation
from tocsin.actions.decision.consequences import Noticed
from tocsin.actions.decision.decide import START_NOT_SENT, Decisions, Known
from tocsin.actions.decision.inhibitions import OpenIssue
from tocsin.actions.decision.open_issues import OpenIssues
from tocsin.actions.decision.planned import Planned
from tocsin.actions.decision.routing import Routing
from tocsin.actions.decision.silences import Silence
from tocsin.actions.decision.stop_guards import Fleet
from tocsin.actions.decision.time_windows import TimeWindows
from tocsin.actions.delivery.records import new_delivery
from tocsin.actions.ledger.notice_history import NoticeHistory
from tocsin.schemas.configuration.routing.inhibitions import InhibitEntry
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.configuration.routing.time_windows import TimeWindow
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.issues import (
    Issue,
    IssueFiring,
    IssueOngoing,
    IssueResolved,
    Severity,
    Subject,
)

HOUR_MS = 3_600_000
MIDNIGHT_MS = NOW_MS - NOW_MS % (24 * HOUR_MS)
RUNS = {"a-1": {"team": "a"}, "b-1": {"team": "b", "env": "prod"}}
RULES = ("one", "two", "three")
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
RECEIVERS = ("chat", "mail", "pager")
WINDOWS = {"early": (0, 8), "day": (8, 18), "late": (18, 6)}

Match = Mapping[str, tuple[str, ...]]
MATCHES: tuple[Match, ...] = (
    {"rule": ("one",)},
    {"rule": ("t*",)},
    {"rule": ("*",), "team": ("a",)},
    {"severity": ("critical",)},
    {"severity": ("warning",)},
    {"run": ("a-*",)},
    {"env": ("prod",)},
)
matches = st.sampled_from(MATCHES)
names = st.lists(st.sampled_from(RECEIVERS), min_size=1, max_size=2, unique=True)
hours = st.integers(0, 72)


@dataclass(frozen=True)
class Setup:
    """A configuration, as plain as possible."""

    routes: list[tuple[Match, dict[str, list[str]], bool, list[str], list[str]]]
    inhibit: list[tuple[Match, Match]]
    silences: list[tuple[Match, int, int]]


@dataclass(frozen=True)
class Event:
    """A state of the issue of a rule in a run, hours after the start."""

    hour: int
    run: str
    rule: str
    state: str
    severity: Severity
    cause: str | None

    @property
    def issue_id(self) -> str:
        return f"{self.run}.{self.rule}"

    @property
    def labels(self) -> dict[str, str]:
        of_run = RUNS[self.run]
        return {**of_run, "run": self.run, "rule": self.rule, "severity": self.severity}


windows = st.sampled_from([[], [], [], *([name] for name in WINDOWS)])
routes = st.tuples(
    st.one_of(st.just({}), matches),
    st.one_of(
        st.fixed_dictionaries({"default": names}),
        st.fixed_dictionaries({"critical": names, "warning": names}),
    ),
    st.booleans(),
    windows,
    windows,
)
setups = st.builds(
    Setup,
    routes=st.lists(routes, min_size=1, max_size=3),
    inhibit=st.lists(st.tuples(matches, matches), max_size=1),
    silences=st.lists(st.tuples(matches, hours, hours), max_size=1),
)
timelines = st.lists(
    st.builds(
        Event,
        hour=hours,
        run=st.sampled_from(sorted(RUNS)),
        rule=st.sampled_from(RULES),
        state=st.sampled_from(["firing", "firing", "ongoing", "critical", "resolved"]),
        severity=st.sampled_from(["warning", "critical", "info"]),
        cause=st.sampled_from([None, *RULES]),
    ),
    min_size=20,
    max_size=30,
).map(lambda events: sorted(events, key=lambda event: event.hour))


# -- the model ---------------------------------------------------------------------------------


def fits(match: Match, labels: Mapping[str, str]) -> bool:
    for key, (pattern,) in match.items():
        value = labels.get(key)
        if value is None:
            return False
        start = pattern.removesuffix("*")
        if value != pattern and not (pattern.endswith("*") and value.startswith(start)):
            return False
    return True


HOLDS = ("silence", "inhibition", "time_window", "cause")


@dataclass
class Model:
    """Everything that has happened, and what came of it by receiver."""

    setup: Setup
    past: list[tuple[Event, dict[str, str]]] = field(default_factory=list)

    def take(self, event: Event) -> dict[str, str]:
        done = self.decide(event)
        self.past.append((event, done))
        return done

    def decide(self, event: Event) -> dict[str, str]:
        asked = self.asked(event)
        told = [name for name in RECEIVERS if self.told(event.issue_id, name)]
        if event.state == "resolved":
            return dict.fromkeys(asked, "not told") | dict.fromkeys(told, "sent")
        if event.state == "ongoing":
            late = {}
            for name, windows in asked.items():
                waits = name not in told and self.was_held(event.issue_id, name)
                if waits and self.held(event, name, windows) is None:
                    late[name] = "sent"
            return late
        both = {name: asked.get(name, ([], [])) for name in [*asked, *told]}
        if event.state == "firing":
            both = asked
        return {name: self.held(event, name, both[name]) or "sent" for name in both}

    def asked(self, event: Event) -> dict[str, tuple[list[str], list[str]]]:
        found: dict[str, tuple[list[str], list[str]]] = {}
        for match, notify, also, active, mute in self.setup.routes:
            if not fits(match, event.labels):
                continue
            for name in notify.get(event.severity, notify.get("default", [])):
                found.setdefault(name, (active, mute))
            if not also:
                break
        return found

    def held(self, event: Event, name: str, windows: tuple[list[str], list[str]]) -> str | None:
        for match, start, end in self.setup.silences:
            if start <= event.hour < end and fits(match, event.labels):
                return "silence"
        if self.explained(event):
            return "inhibition"
        active, mute = windows
        if any(is_open(window, event.hour) for window in mute):
            return "time_window"
        if active and not any(is_open(window, event.hour) for window in active):
            return "time_window"
        if event.cause is not None and self.caused(event, f"{event.run}.{event.cause}", name):
            return "cause"
        return None

    def explained(self, event: Event) -> bool:
        for when, mute in self.setup.inhibit:
            for other in self.open_ones(event.run):
                if other.issue_id == event.issue_id or not fits(mute, event.labels):
                    continue
                two_sided = fits(when, event.labels) and fits(mute, other.labels)
                if fits(when, other.labels) and not two_sided:
                    return True
        return False

    def open_ones(self, run: str) -> list[Event]:
        newest = {event.issue_id: event for event, _ in self.past if event.run == run}
        return [event for event in newest.values() if event.state != "resolved"]

    def told(self, issue_id: str, name: str) -> bool:
        sent = self.newest_time(issue_id, name, ("sent",))
        return 0 < sent >= self.newest_time(issue_id, name, HOLDS)

    def was_held(self, issue_id: str, name: str) -> bool:
        held = self.newest_time(issue_id, name, HOLDS)
        return held > self.newest_time(issue_id, name, ("sent",))

    def newest_time(self, issue_id: str, name: str, what: Sequence[str]) -> int:
        """The last time that the condition came and this was done about it; 0: never."""
        times = newest = 0
        for event, done in self.past:
            if event.issue_id == issue_id and event.state != "resolved":
                times += event.state == "firing"
                newest = times if done.get(name) in what else newest
        return newest

    def caused(self, event: Event, cause: str, name: str) -> bool:
        told: Severity | None = None
        for earlier, done in self.past:
            if earlier.issue_id == cause and name in done:
                if earlier.state == "resolved":
                    told = None
                elif done[name] == "sent":
                    told = earlier.severity
        return told is not None and SEVERITIES.index(event.severity) <= SEVERITIES.index(told)


def is_open(window: str, hour: int) -> bool:
    start, end = WINDOWS[window]
    now = hour % 24
    return start <= now < end if start < end else now >= start or now < end


# -- the stages --------------------------------------------------------------------------------


class Here(Known):
    def __init__(self, inhibit: list[InhibitEntry]) -> None:
        self.issues = OpenIssues(inhibit)
        self.history = NoticeHistory()
        self.written: set[str] = set()

    def silences(self) -> Iterable[Silence]:
        return ()

    def open_issues(self, run_id: str, incarnation: str) -> Iterable[OpenIssue]:
        return self.issues.in_training(run_id, incarnation)

    def noticed(self, issue_id: str) -> Mapping[str, Noticed]:
        return self.history.by_receiver(issue_id)

    def stops_off(self) -> str:
        return ""

    def fleet(self, issue: Issue, now_ms: int) -> Fleet:
        return Fleet()


def stages(setup: Setup) -> tuple[Decisions, Here]:
    routes: list[RouteEntry] = []
    for match, notify, also, active, mute in setup.routes:
        given: dict[str, Any] = {"notify": notify, "also": also}
        route = RouteEntry(match=match, active=tuple(active), mute=tuple(mute), **given)
        route.placed(("routes", len(routes)), {})
        routes.append(route)
    inhibit = [InhibitEntry(when=when, mute=mute) for when, mute in setup.inhibit]
    silences = [
        Silence(
            match=match,
            from_ms=MIDNIGHT_MS + HOUR_MS * start,
            until_ms=MIDNIGHT_MS + HOUR_MS * end,
            mutes=frozenset({"notify"}),
            by="",
            why="",
            decided_by="",
        )
        for match, start, end in setup.silences
    ]
    hours_of = {
        name: TimeWindow(weekly=(f"{start:02}:00-{end:02}:00",))
        for name, (start, end) in WINDOWS.items()
    }
    made = Decisions(Routing({}, routes=routes), silences, inhibit, TimeWindows(hours_of))
    return made, Here(inhibit)


def issue_of(event: Event, times: int) -> Issue:
    kinds: dict[str, type[IssueFiring]] = {"firing": IssueFiring, "resolved": IssueResolved}
    more: dict[str, Any] = {"raised_from": "warning"} if event.state == "critical" else {}
    return kinds.get(event.state, IssueOngoing)(
        run_id=event.run,
        incarnation=incarnation(event.run),
        issue_id=event.issue_id,
        rule=event.rule,
        use=event.rule,
        rule_version=1,
        severity=event.severity,
        subject=Subject(kind="loss", name="loss"),
        reason="found",
        labels=RUNS[event.run],
        times=times,
        consequence_of=None if event.cause is None else f"{event.run}.{event.cause}",
        **more,
    )


def decide(made: Decisions, here: Here, found: Issue, now_ms: int) -> dict[str, str]:
    here.issues.note(found)
    done = {}
    for planned in made.decide(found, here, now_ms):
        identity = delivery_id(
            found.issue_id, planned.action, planned.occasion or found.state, found.times
        )
        delivery = new_delivery(identity, found, planned, b"{}", now_ms=now_ms, give_up_ms=now_ms)
        state = "delivered" if planned.why_not is None else "suppressed"
        here.history.apply(delivery.model_copy(update={"state": state}))
        done[planned.action] = outcome(planned)
    return done


def outcome(planned: Planned) -> str:
    if planned.held is not None:
        return planned.held.by
    return "not told" if planned.forbidden == START_NOT_SENT else planned.forbidden or "sent"


def possible(timeline: list[Event]) -> Iterator[tuple[Event, int]]:
    """The states that rules publish of an issue, each with how many times its condition had come.

    It fires when it is not open, turns critical at most once, and is not its own cause.
    """
    times: Counter[str] = Counter()
    shown: dict[str, set[str]] = {}
    for event in timeline:
        seen = shown.setdefault(event.issue_id, set())
        if event.state == "firing":
            if seen:
                continue
            times[event.issue_id] += 1
        elif not seen or (event.state == "critical" and "critical" in seen):
            continue
        severity = "critical" if event.state == "critical" else event.severity
        cause = None if event.cause == event.rule else event.cause
        seen.add(event.state)
        if event.state == "resolved":
            seen.clear()
        yield replace(event, severity=severity, cause=cause), times[event.issue_id]


@settings(max_examples=100, deadline=None)
@given(setups, timelines)
def test_the_stages_decide_as_the_model_does(setup: Setup, timeline: list[Event]) -> None:
    made, here = stages(setup)
    model = Model(setup)
    for number, (event, times) in enumerate(possible(timeline)):
        now_ms = MIDNIGHT_MS + HOUR_MS * event.hour + number
        assert decide(made, here, issue_of(event, times), now_ms) == model.take(event), event
