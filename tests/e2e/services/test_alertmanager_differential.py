"""The same configuration and the same timeline through Debian's Alertmanager and through ours.

What both can be told is generated: routes with matches, windows and `also` (`continue`), groups,
inhibitions, silences, and receivers that want no resolves. Alertmanager runs in real time, with
intervals of a fraction of a second; ours in virtual time. After each step both have notified the
same receivers, in the same groups, of the same alerts in the same states, but for the differences
that docs/explanation/alertmanager.md explains.

An alert is sent with others of its step to a watchman, whose group waits four times as long as the
others: when it has come, what has not come of that step was held.

After the last step nothing happens for some intervals of `repeat_interval`, hours in ours and
seconds in Alertmanager: both remind the same receivers of the same alerts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.records.issues import incarnation
from support.servers.alertmanager import CONFIG_FILE, needs_alertmanager, running_alertmanager
from support.servers.fault_server import FaultServer, fault_server
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.simulation import Simulation
from tocsin.schemas.configuration.file import Config, SectionRegistry, check_config
from tocsin.schemas.configuration.routing.time_windows import DAYS
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.deliveries import REPEAT
from tocsin.schemas.records.issues import (
    IssueFiring,
    IssueOngoing,
    IssueResolved,
    Severity,
    Subject,
    issue_event,
)

TEAMS: Final = {"run-1": "vision", "run-2": "speech"}
RULES: Final[dict[str, Severity]] = {
    "nonfinite": "critical",
    "loss_spike": "warning",
    "idle": "info",
}
STEP_MS: Final = 60_000
REPEAT_MS: Final = 3_600_000
REPEATS: Final = 2
"""Of each alert that is waited for."""
WATCHMAN: Final = "watchman"
RECEIVERS: Final = ("a", "b", "c")

Notice = tuple[str, str, str, str]
"""Receiver, group, alert and state."""

Repeated = tuple[str, str, str]
"""Receiver, group and alert."""


@dataclass(frozen=True)
class Alert:
    """One alert, or issue; its name tells it from all others."""

    name: str
    run: str
    rule: str

    @property
    def labels(self) -> dict[str, str]:
        """What routes, inhibitions and silences match."""
        severity = RULES[self.rule]
        return {"run": self.run, "rule": self.rule, "severity": severity, "team": TEAMS[self.run]}


@dataclass(frozen=True)
class Route:
    """One route, with a receiver of its own."""

    receiver: str
    match: dict[str, str]
    also: bool
    group_by: tuple[str, ...]
    active: str
    mute: str
    send_resolved: bool


@dataclass(frozen=True)
class Step:
    """What happens at one time."""

    fires: tuple[Alert, ...]
    resolves: tuple[Alert, ...]


@dataclass(frozen=True)
class Story:
    """A configuration and a timeline. A silence begins before one step and ends before another."""

    routes: tuple[Route, ...]
    inhibits: bool
    silence: tuple[dict[str, str], int, int] | None
    steps: tuple[Step, ...]

    def silenced(self, alert: Alert, step: int) -> bool:
        """Whether the silence holds the alert at that step."""
        if self.silence is None:
            return False
        match, begins, ends = self.silence
        return begins <= step < ends and match.items() <= alert.labels.items()


MATCHES = st.sampled_from(
    [{}, {}, *({"team": one} for one in TEAMS.values()), *({"rule": one} for one in RULES)]
)
WINDOWS = st.sampled_from(["", "", "", "always", "never"])


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Some routes, and six steps in each of which a few alerts fire or end, each once."""
    routes = tuple(
        Route(
            receiver,
            draw(MATCHES),
            draw(st.booleans()),
            tuple(draw(st.sampled_from([["run"], ["rule"], ["run", "rule"], ["team"]]))),
            draw(WINDOWS),
            draw(WINDOWS),
            draw(st.booleans()),
        )
        for receiver in RECEIVERS[: draw(st.integers(2, 3))]
    )
    # `tocsin check` refuses a route that no issue reaches.
    for nth, one in enumerate(routes):
        if any(one.match.items() <= later.match.items() for later in routes[nth + 1 :]):
            routes = (*routes[:nth], replace(one, also=True), *routes[nth + 1 :])
    open_ones: list[Alert] = []
    steps = []
    for number in range(6):
        resolves = tuple(one for one in open_ones if draw(st.integers(0, 2)) == 0)
        fires = tuple(
            Alert(
                f"{number}-{nth}",
                draw(st.sampled_from(list(TEAMS))),
                draw(st.sampled_from(list(RULES))),
            )
            for nth in range(draw(st.integers(0 if number else 1, 3)))
        )
        open_ones = [one for one in open_ones if one not in resolves] + list(fires)
        steps.append(Step(fires, resolves))
    silence = None
    if draw(st.booleans()):
        begins = draw(st.integers(0, 3))
        match = draw(MATCHES.filter(bool))
        silence = (match, begins, begins + draw(st.integers(1, 3)))
    return Story(routes, draw(st.booleans()), silence, tuple(steps))


# -- ours


def our_config(story: Story, start: datetime) -> Config:
    """The configuration, in our words."""
    routes = [
        {
            "match": route.match,
            "notify": [route.receiver],
            "also": route.also,
            "group_by": list(route.group_by),
            "group_wait": "1s",
            "repeat_interval": "1h",
            **({"active": route.active} if route.active else {}),
            **({"mute": route.mute} if route.mute else {}),
        }
        for route in story.routes
    ]
    text: dict[str, Any] = {
        "version": 1,
        "receivers": {
            route.receiver: {
                "type": "email",
                "to": [f"{route.receiver}@example.com"],
                "send_resolved": route.send_resolved,
            }
            for route in story.routes
        },
        "time_windows": {
            "always": {"weekly": ["mon-sun"]},
            "never": {"weekly": [never(start)]},
        },
        "routes": [{key: value for key, value in one.items() if value != {}} for one in routes],
    }
    if story.inhibits:
        text["inhibit"] = [
            {"when": {"rule": "nonfinite"}, "mute": {"rule": "loss_spike"}, "equal": ["run"]}
        ]
    if story.silence is not None:
        match, begins, ends = story.silence

        def before(step: int) -> str:
            at = start + timedelta(milliseconds=STEP_MS * step - 1)
            return at.isoformat(timespec="milliseconds")

        text["silences"] = [
            {"match": match, "from": before(begins), "until": before(ends), "by": "a", "why": "b"}
        ]
    config, problems = check_config(
        json.dumps(text), "tocsin.yaml", SectionRegistry(ReceiverKinds())
    )
    assert config is not None, problems
    return config


def never(start: datetime) -> str:
    """A day of the week that is neither today nor one beside it, in any time zone."""
    return DAYS[(start.weekday() + 3) % 7]


class Ours:
    """The action service in virtual time."""

    def __init__(self, story: Story, start: datetime) -> None:
        self._start_ms = round(start.timestamp() * 1000)
        self._simulation = Simulation(our_config(story, start), path=None, now_ms=self._start_ms)
        self._names: dict[str, str] = {}
        self._open: list[Alert] = []

    async def step(self, number: int, step: Step) -> list[Notice]:
        """What is sent in one step."""
        begun = len(self._simulation.sent)
        await self._simulation.until(self._start_ms + number * STEP_MS)
        self._open = [one for one in self._open if one not in step.resolves]
        issues = [
            *(self._issue(IssueResolved, one) for one in step.resolves),
            *(self._issue(IssueOngoing, one) for one in self._open),
            *(self._issue(IssueFiring, one) for one in step.fires),
        ]
        self._open += step.fires
        now_ms = self._simulation.now_ms
        await self._simulation.apply(
            *(
                issue_event(one, event_id=f"{one.issue_id}/{one.state}/{number}", time_ms=now_ms)
                for one in issues
            )
        )
        await self._simulation.until(now_ms + STEP_MS // 2)
        return [
            (
                sent.delivery.action,
                sent.delivery.group,
                self._names[sent.delivery.issue_id],
                "resolved" if sent.delivery.issue_state == "resolved" else "firing",
            )
            for sent in self._simulation.sent[begun:]
        ]

    async def rest(self) -> set[Repeated]:
        """What is repeated while nothing happens; each at least as often as is waited for."""
        begun = len(self._simulation.sent)
        await self._simulation.until(self._simulation.now_ms + (REPEATS + 1) * REPEAT_MS)
        found = Counter(
            (sent.delivery.action, sent.delivery.group, self._names[sent.delivery.issue_id])
            for sent in self._simulation.sent[begun:]
        )
        assert {sent.delivery.occasion for sent in self._simulation.sent[begun:]} <= {REPEAT}
        assert all(REPEATS <= count <= REPEATS + 1 for count in found.values()), found
        return set(found)

    def _issue(self, kind: type[IssueFiring], alert: Alert) -> IssueFiring:
        training = incarnation(alert.run)
        identity = issue_id(alert.run, training, alert.rule, 1, alert.name)
        self._names[identity] = alert.name
        return kind(
            run_id=alert.run,
            incarnation=training,
            issue_id=identity,
            rule=alert.rule,
            use=alert.rule,
            rule_version=1,
            severity=RULES[alert.rule],
            stop_worthy=False,
            subject=Subject(kind="loss", name="loss"),
            reason="of the test",
            labels={"team": TEAMS[alert.run]},
            onset_ms=self._start_ms,
            at_ms=self._simulation.now_ms,
        )


# -- Alertmanager


def their_config(story: Story, hook: str, start: datetime, *, repeat: str = "4h") -> str:
    """The same configuration, in Alertmanager's words."""

    def route(one: Route) -> dict[str, Any]:
        return {
            "receiver": one.receiver,
            "matchers": [f'{key}="{value}"' for key, value in one.match.items()],
            "continue": one.also,
            "group_by": list(one.group_by),
            **({"active_time_intervals": [one.active]} if one.active else {}),
            **({"mute_time_intervals": [one.mute]} if one.mute else {}),
        }

    def receiver(name: str, send_resolved: bool) -> dict[str, Any]:
        return {"name": name, "webhook_configs": [{"url": hook, "send_resolved": send_resolved}]}

    full = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
    closed = next(day for day in full if day.startswith(never(start)))
    watchman = {
        "receiver": WATCHMAN,
        "matchers": [f'rule="{WATCHMAN}"'],
        "group_by": ["name"],
        "group_wait": "400ms",
    }
    config = {
        "route": {
            "receiver": "nobody",
            "group_wait": "100ms",
            "group_interval": "100ms",
            "repeat_interval": repeat,
            "routes": [watchman, *map(route, story.routes)],
        },
        "receivers": [
            {"name": "nobody"},
            receiver(WATCHMAN, False),
            *(receiver(one.receiver, one.send_resolved) for one in story.routes),
        ],
        "time_intervals": [
            {"name": "always", "time_intervals": [{"weekdays": ["sunday:saturday"]}]},
            {"name": "never", "time_intervals": [{"weekdays": [closed]}]},
        ],
    }
    if story.inhibits:
        config["inhibit_rules"] = [
            {
                "source_matchers": ['rule="nonfinite"'],
                "target_matchers": ['rule="loss_spike"'],
                "equal": ["run"],
            }
        ]
    return json.dumps(config)


@dataclass
class Theirs:
    """An Alertmanager and where it posts to."""

    url: str
    hooks: FaultServer
    story: Story
    session: aiohttp.ClientSession
    _silence: str = ""
    _open: list[Alert] = field(default_factory=list)
    _began: dict[str, datetime] = field(default_factory=dict)
    _read: int = 0
    _known: dict[tuple[str, str, str], str] = field(default_factory=dict)

    async def step(self, number: int, step: Step, expected: Sequence[Notice]) -> list[Notice]:
        """What is news in one step: what is expected, and what else comes before the watchman."""
        await self._silence_begins(number)
        self._open = [one for one in self._open if one not in step.resolves] + list(step.fires)
        alerts = [
            # A cause last: what it mutes must not fire for a moment when both end.
            *(
                self._alert(one, over=True)
                for one in sorted(step.resolves, key=lambda one: one.rule == "nonfinite")
            ),
            *(self._alert(one) for one in self._open),
            self._alert(Alert(f"{WATCHMAN}-{number}", "", WATCHMAN)),
        ]
        await self._ask("POST", "/alerts", alerts)
        if self.story.silence is not None and number == self.story.silence[2]:
            # After the alerts, for the same reason.
            await self._ask("DELETE", f"/silence/{self._silence}")
        found: list[Notice] = []
        seen = False
        async with asyncio.timeout(60):
            while not seen or not set(expected) <= set(found):
                self.hooks.arrived.clear()
                for receiver, group, name, state in self._news():
                    seen = seen or name == f"{WATCHMAN}-{number}"
                    if receiver != WATCHMAN:
                        found.append((receiver, group, name, state))
                if not seen or not set(expected) <= set(found):
                    await self.hooks.arrived.wait()
        return found

    async def rest(self, config: Path, repeating: str, expected: set[Repeated]) -> set[Repeated]:
        """What is repeated from now on: what is expected, and what else comes meanwhile."""
        await asyncio.to_thread(config.write_text, repeating)
        await self._ask("POST", "/-/reload", api="")
        begun, found, watched = len(self.hooks.seen), Counter[Repeated](), Counter[str]()
        async with asyncio.timeout(120):
            while True:
                self.hooks.arrived.clear()
                for request in self.hooks.seen[begun:]:
                    begun += 1
                    body = json.loads(request.body)
                    group = self._group(body)
                    names = [
                        alert["labels"]["name"]
                        for alert in body["alerts"]
                        if alert["status"] == "firing"
                    ]
                    if body["receiver"] == WATCHMAN:
                        watched.update(names)
                    else:
                        found.update((body["receiver"], group, name) for name in names)
                often = all(found[one] >= REPEATS for one in expected)
                # All watchmen's groups wait as long as the others, and one interval more.
                if often and watched and min(watched.values()) > REPEATS:
                    # When it has just read its configuration again, it has not heard of all
                    # causes yet, and sends once what they mute.
                    return {one for one, count in found.items() if count >= REPEATS}
                await self.hooks.arrived.wait()

    def _group(self, body: dict[str, Any]) -> str:
        return ", ".join(f"{key}={body['groupLabels'].get(key, '')}" for key in self._keys(body))

    def _news(self) -> Iterator[Notice]:
        """What posts have said that no earlier one has."""
        for request in self.hooks.seen[self._read :]:
            self._read += 1
            body = json.loads(request.body)
            group = self._group(body)
            for alert in body["alerts"]:
                place = (body["receiver"], group, alert["labels"]["name"])
                if alert["status"] == "resolved" and place not in self._known:
                    # It tells the end of what it has not told the start of, if the alert was held
                    # from its start and its group has other news.
                    continue
                if self._known.get(place) != alert["status"]:
                    self._known[place] = alert["status"]
                    yield (*place, alert["status"])

    def _keys(self, body: dict[str, Any]) -> Sequence[str]:
        found = [one.group_by for one in self.story.routes if one.receiver == body["receiver"]]
        return found[0] if found else ("name",)

    def _alert(self, alert: Alert, *, over: bool = False) -> dict[str, Any]:
        now = datetime.now(UTC)
        labels = {"rule": WATCHMAN} if alert.rule == WATCHMAN else alert.labels
        return {
            "labels": {"alertname": "issue", "name": alert.name, **labels},
            # One that began earlier than its group waits is sent at once.
            "startsAt": self._began.setdefault(alert.name, now).isoformat(),
            "endsAt": (now if over else now + timedelta(hours=1)).isoformat(),
        }

    async def _silence_begins(self, number: int) -> None:
        if self.story.silence is None:
            return
        match, begins, _ = self.story.silence
        if number == begins:
            now = datetime.now(UTC)
            made = await self._ask(
                "POST",
                "/silences",
                {
                    "matchers": [
                        {"name": key, "value": value, "isRegex": False, "isEqual": True}
                        for key, value in match.items()
                    ],
                    "startsAt": now.isoformat(),
                    "endsAt": (now + timedelta(hours=1)).isoformat(),
                    "createdBy": "a",
                    "comment": "b",
                },
            )
            self._silence = made["silenceID"]

    async def _ask(self, method: str, path: str, body: Any = None, api: str = "/api/v2") -> Any:
        async with self.session.request(method, f"{self.url}{api}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
            return json.loads(text) if text else None


# -- both


def held_ends(
    story: Story, number: int, before: Sequence[Alert], open_ones: Sequence[Alert]
) -> set[str]:
    """The alerts that end in a step while something holds them, or just when that is over.

    Alertmanager sends no such end, unless what holds it is over before the group's next interval;
    we send it to who was told of the start.
    """
    sources = {one.run for one in (*before, *open_ones) if one.rule == "nonfinite"}
    return {
        one.name
        for one in (*story.steps, Step((), ()))[number].resolves
        if story.silenced(one, number)
        or story.silenced(one, number - 1)
        or (story.inhibits and one.rule == "loss_spike" and one.run in sources)
    }


def without(ends: set[str], notices: Sequence[Notice]) -> list[Notice]:
    """The others, sorted."""
    return sorted(one for one in notices if not (one[3] == "resolved" and one[2] in ends))


async def both_tell_the_same(story: Story) -> None:
    """Run a story through both."""
    start = datetime.now(UTC).replace(microsecond=0)
    ours, open_ones, ends = Ours(story, start), list[Alert](), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        async with fault_server() as hooks, aiohttp.ClientSession() as session:
            config = their_config(story, hooks.url("/status/200"), start)
            async with running_alertmanager(config, Path(folder)) as url:
                theirs = Theirs(url, hooks, story, session)
                # The last, in which nothing happens but the end of a silence.
                for number, step in enumerate((*story.steps, Step((), ()))):
                    before = open_ones
                    open_ones = [one for one in open_ones if one not in step.resolves]
                    open_ones += step.fires
                    ends |= held_ends(story, number, before, open_ones)
                    wanted = without(ends, await ours.step(number, step))
                    found = without(ends, await theirs.step(number, step, wanted))
                    assert found == wanted, f"step {number} of {story}"
                repeated = await ours.rest()
                repeating = their_config(story, hooks.url("/status/200"), start, repeat="1s")
                file = Path(folder) / CONFIG_FILE
                assert await theirs.rest(file, repeating, repeated) == repeated, f"rest of {story}"


@needs_alertmanager
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(stories())
def test_alertmanager_tells_the_same_people_the_same(story: Story) -> None:
    asyncio.run(both_tell_the_same(story))


@pytest.mark.torture
@pytest.mark.timeout(3_600)
@needs_alertmanager
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(stories())
def test_alertmanager_tells_the_same_in_many_stories(story: Story) -> None:
    asyncio.run(both_tell_the_same(story))
