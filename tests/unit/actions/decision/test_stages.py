"""Each stage of the decisions by itself: values in, a decision with its reason out."""

from __future__ import annotations

from datetime import datetime

import pytest

from support.records.issues import NOW_MS, issue
from tocsin.actions.decision.consequences import Noticed, folded
from tocsin.actions.decision.inhibitions import OpenIssue, inhibited
from tocsin.actions.decision.issue_labels import issue_labels
from tocsin.actions.decision.routes import routed
from tocsin.actions.decision.silences import configured, silenced
from tocsin.actions.decision.time_windows import TimeWindows
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.configuration.file import Config, SectionRegistry, check_config
from tocsin.schemas.configuration.problems import Loc
from tocsin.schemas.configuration.routing.matches import covers
from tocsin.schemas.configuration.routing.time_windows import TimeWindow
from tocsin.schemas.records.issues import Severity

RECEIVERS = """
receivers:
  chat: {type: webhook, url: "https://hooks.example.com/chat"}
  pager: {type: webhook, url: "https://hooks.example.com/pager"}
  log: {type: webhook, url: "https://hooks.example.com/log"}
"""


def place(loc: Loc) -> str:
    return ".".join(map(str, loc))


def config_of(text: str) -> Config:
    registry = SectionRegistry(ReceiverKinds())
    config, problems = check_config(f"version: 1\n{RECEIVERS}{text}", "tocsin.yaml", registry)
    assert config is not None, problems
    return config


ROUTES = """
routes:
  - {name: all, match: {severity: critical}, notify: [log], also: true}
  - name: vision
    match: {team: [vision, "cv-*"], env: prod}
    notify: {critical: [pager, chat], info: [], default: [chat]}
  - {match: {rule: loss_spike}, notify: []}
  - {name: rest, notify: {default: [log]}}
"""


@pytest.mark.parametrize(
    ("labels", "severity", "expected"),
    [
        ({"team": "vision", "env": "prod"}, "critical", ["log", "pager", "chat"]),
        ({"team": "cv-3", "env": "prod"}, "warning", ["chat"]),
        ({"team": "cv-3", "env": "prod"}, "info", []),
        ({"team": "vision"}, "warning", ["log"]),
        ({"rule": "loss_spike"}, "warning", []),
        ({}, "critical", ["log"]),
    ],
)
def test_the_first_route_that_matches_decides(
    labels: dict[str, str], severity: Severity, expected: list[str]
) -> None:
    routes = config_of(ROUTES).routes
    found = routed(routes, {**labels, "severity": severity}, severity, place)
    assert [one.receiver for one in found] == expected


def test_a_route_names_the_line_of_the_receiver() -> None:
    routes = config_of(ROUTES).routes
    labels = {"severity": "critical", "team": "vision", "env": "prod"}
    found = routed(routes, labels, "critical", place)
    assert [one.decided_by for one in found] == [
        "routes.0.notify.0",
        "routes.1.notify.critical.0",
        "routes.1.notify.critical.1",
    ]


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ({}, {"a": ("x",)}, True),
        ({"a": ("x", "y-*")}, {"a": ("y-1", "x"), "b": ("z",)}, True),
        ({"a": ("y-*",)}, {"a": ("y-*",)}, True),
        ({"a": ("y-?",)}, {"a": ("y-*",)}, False),
        ({"a": ("*",)}, {"a": ("y-*",)}, True),
        ({"a": ("*",)}, {}, False),
        ({"run": ("*",)}, {}, True),
        ({"a": ("x",)}, {"a": ("x", "y")}, False),
    ],
)
def test_what_a_match_covers(
    wide: dict[str, tuple[str, ...]], narrow: dict[str, tuple[str, ...]], expected: bool
) -> None:
    assert covers(wide, narrow) is expected


def test_labels_of_an_issue_are_its_own_before_those_of_its_run() -> None:
    found = issue().model_copy(update={"labels": {"team": "vision", "rule": "mine"}})
    assert issue_labels(found) == {
        "team": "vision",
        "run": "run-1",
        "rule": "nonfinite",
        "severity": "critical",
    }


SILENCES = """
silences:
  - {match: {run: "sweep-*"}, until: 2026-12-01T00:00:00Z, by: ana, why: known rates}
  - {match: {run: sweep-1}, until: 2026-12-02T00:00:00Z, mutes: [stop]}
  - {match: {run: sweep-1}, from: 2026-11-30T00:00:00Z, until: 2026-12-03T00:00:00Z}
"""


def ms(text: str) -> int:
    return round(1000 * datetime.fromisoformat(text).timestamp())


def test_a_silence_has_a_start_an_end_and_what_it_mutes() -> None:
    silences = configured(config_of(SILENCES).silences, place)
    labels = {"run": "sweep-1"}

    now = silenced(silences, labels, "notify", ms("2026-11-24T00:00:00Z"))
    assert now is not None
    assert now.until_ms == ms("2026-12-01T00:00:00Z")
    assert now.reason == ("silenced by ana until 2026-12-01 00:00:00 UTC (silences.0): known rates")
    later = silenced(silences, labels, "notify", ms("2026-11-30T00:00:00Z"))
    assert later is not None
    assert later.until_ms == ms("2026-12-03T00:00:00Z"), "the one that ends last"
    stop = silenced(silences, labels, "stop", ms("2026-11-30T00:00:00Z"))
    assert stop is not None
    assert "silences.1" in stop.reason
    assert silenced(silences, labels, "notify", ms("2026-12-03T00:00:00Z")) is None
    assert silenced(silences, {"run": "run-1"}, "notify", ms("2026-11-24T00:00:00Z")) is None


INHIBIT = """
inhibit:
  - {name: nan, when: {rule: nonfinite}, mute: {rule: [loss_*, nonfinite]}}
  - {when: {severity: critical}, mute: {severity: warning}, equal: [run, rule]}
"""


def opened(number: int, rule: str, severity: str = "warning") -> OpenIssue:
    return OpenIssue(f"issue-{number}", {"run": "r", "rule": rule, "severity": severity})


def test_an_open_issue_mutes_what_it_explains() -> None:
    entries = config_of(INHIBIT).inhibit
    spike = opened(1, "loss_spike")

    held = inhibited(entries, spike, [spike, opened(2, "nonfinite")], place)
    assert held is not None
    assert held.reason == "explained by the open issue issue-2 of nonfinite (nan, inhibit.0)"
    assert inhibited(entries, spike, [spike, opened(2, "disk_full")], place) is None
    other = OpenIssue("issue-2", {"run": "another", "rule": "nonfinite", "severity": "critical"})
    assert inhibited(entries, spike, [other], place) is None


def test_an_issue_on_both_sides_is_not_muted_by_one_that_is_too() -> None:
    entries = config_of(INHIBIT).inhibit
    one, two = opened(1, "nonfinite"), opened(2, "nonfinite")
    assert inhibited(entries, one, [one], place) is None
    assert inhibited(entries, one, [one, two], place) is None
    critical = opened(3, "nonfinite", "critical")
    held = inhibited(entries, one, [critical], place)
    assert held is not None
    assert held.reason.endswith("(inhibit.1)")


def test_what_must_be_equal_is() -> None:
    entries = config_of(INHIBIT).inhibit
    warning, critical = opened(1, "disk_full"), opened(2, "loss_diverged", "critical")
    assert inhibited(entries, warning, [critical], place) is None
    assert inhibited(entries, warning, [opened(2, "disk_full", "critical")], place) is not None


def windows(*weekly: str, zone: str = "Europe/Berlin") -> TimeWindows:
    return TimeWindows({"w": TimeWindow(weekly=weekly, time_zone=zone)})


@pytest.mark.parametrize(
    ("weekly", "moment", "expected"),
    [
        # 2026-11-23 is a Monday.
        ("mon-fri 08:00-18:00", "2026-11-23T08:00+01:00", True),
        ("mon-fri 08:00-18:00", "2026-11-23T07:59+01:00", False),
        ("mon-fri 08:00-18:00", "2026-11-23T18:00+01:00", False),
        ("mon-fri 08:00-18:00", "2026-11-28T12:00+01:00", False),
        ("sat,sun", "2026-11-28T00:00+01:00", True),
        ("sat,sun", "2026-11-29T23:59+01:00", True),
        ("sat,sun", "2026-11-30T00:00+01:00", False),
        ("22:00-06:00", "2026-11-23T23:00+01:00", True),
        ("22:00-06:00", "2026-11-23T05:59+01:00", True),
        ("22:00-06:00", "2026-11-23T06:00+01:00", False),
        ("fri 22:00-06:00", "2026-11-28T05:00+01:00", True),
        ("fri 22:00-06:00", "2026-11-27T05:00+01:00", False),
        ("sun 22:00-06:00", "2026-11-23T05:00+01:00", True),
        ("fri-mon 10:00-24:00", "2026-11-29T23:59+01:00", True),
        ("fri-mon 10:00-24:00", "2026-11-24T12:00+01:00", False),
        ("mon,wed-fri 09:00-10:00", "2026-11-26T09:30+01:00", True),
        # In summer the same hours are another time.
        ("mon-fri 08:00-18:00", "2026-07-06T06:00+00:00", True),
        ("mon-fri 08:00-18:00", "2026-01-05T06:00+00:00", False),
    ],
)
def test_a_window_is_open_in_its_hours(weekly: str, moment: str, expected: bool) -> None:
    assert windows(weekly).open("w", ms(moment)) is expected


def test_a_window_says_when_it_holds_no_more() -> None:
    days = windows("mon-fri 08:00-18:00")
    friday = ms("2026-11-27T18:00+01:00")
    held = days.held(["w"], [], friday, "tocsin.yaml:3:5")
    assert held is not None
    assert held.until_ms == ms("2026-11-30T08:00+01:00")
    assert held.reason == (
        "outside the time window w until 2026-11-30 07:00:00 UTC (tocsin.yaml:3:5)"
    )
    assert days.held(["w"], [], ms("2026-11-27T12:00+01:00"), "x") is None
    muted = days.held([], ["w"], ms("2026-11-27T12:00+01:00"), "x")
    assert muted is not None
    assert (muted.by, muted.until_ms) == ("time_window", friday)
    # Clocks are set back in the night to Sunday: an hour more.
    sunday = windows("sun").held(["w"], [], ms("2026-10-24T23:00+02:00"), "x")
    assert sunday is not None
    assert sunday.until_ms == ms("2026-10-25T00:00+02:00")


def test_windows_that_leave_no_time_hold_for_good() -> None:
    never = TimeWindows({"w": TimeWindow(weekly=("mon-sun",))}).held(["w"], ["w"], NOW_MS, "x")
    assert never is not None
    assert never.until_ms is None


def noticed(severity: Severity | None, *, still_open: bool = True) -> Noticed:
    return Noticed("webhook", "x", severity=severity, notified=True, open=still_open)


def test_a_consequence_is_part_of_the_message_about_its_cause() -> None:
    effect = issue(severity="warning").model_copy(update={"consequence_of": "11111111-2222"})
    held = folded(effect, noticed("warning"))
    assert held is not None
    assert held.by == "cause"
    assert "11111111" in held.reason
    assert folded(effect, noticed("info")) is None, "graver than its cause"
    assert folded(effect, noticed("critical", still_open=False)) is None, "that is over"
    assert folded(effect, noticed(None)) is None, "told by an older release"
    assert folded(effect, None) is None
    assert folded(issue(severity="warning"), noticed("critical")) is None
