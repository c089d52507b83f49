"""What a configuration says of grouping and repeats."""

from __future__ import annotations

import pytest

from support.records.issues import issue
from tocsin.actions.decision.notice_times import NoticeTimes, group_of
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.records.deliveries import Repeats

TEXT = """version: 1
defaults: {group_by: [run, team], group_wait: 2s, repeat_interval: 4h}
receivers:
  mail: {type: email, to: [a@example.com], urgent: {every: 60s, for: 1h}}
routes:
  - {match: {team: vision}, notify: [mail], group_by: [rule], repeat_interval: 1h}
  - {notify: [mail], group_wait: 0s}
"""


def checked(text: str) -> tuple[Config | None, list[str]]:
    config, problems = check_config(text, "tocsin.yaml", section_registry())
    return config, [f"{one.line}: {one.message}" for one in problems]


def test_a_route_says_what_differs_from_the_defaults() -> None:
    config, problems = checked(TEXT)
    assert config is not None, problems
    times = NoticeTimes.from_config(config.defaults, config.receivers)
    vision, rest = (times.for_route(route) for route in config.routes)

    assert (vision.wait_ms, vision.repeat_ms) == (2_000, 3_600_000)
    assert vision.group(issue()) == "rule=nonfinite"
    assert (rest.wait_ms, rest.repeat_ms) == (0, 4 * 3_600_000)
    labelled = issue().model_copy(update={"labels": {"team": "vision"}})
    assert times.group(labelled) == "run=run-1, team=vision"
    assert times.for_route(None) is times


def test_only_issues_as_grave_as_the_receiver_says_are_urgent() -> None:
    config, problems = checked(TEXT)
    assert config is not None, problems
    times = NoticeTimes.from_config(config.defaults, config.receivers)
    daily = 4 * 3_600_000
    assert times.repeats("mail", issue(severity="warning"), 5, 0) == Repeats(every_ms=daily)
    assert times.repeats("mail", issue(), 5, 9) == Repeats(
        every_ms=daily, urgent_every_ms=60_000, urgent_until_ms=3_600_005, wait_ms=9
    )
    assert NoticeTimes().repeats("mail", issue(), 5, 0) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("defaults: {group_wait: 1h}", "2: expected at most 10m"),
        ("defaults: {repeat_interval: 1s}", "2: expected at least 10s"),
        (
            "defaults: {group_wait: 1m, repeat_interval: 30s}",
            "2: notices repeat every 30s, but a message waits 1m (group_wait)",
        ),
        (
            "receivers: {a: {type: email, to: [a@b.example], urgent: {every: 1s}}}",
            "2: expected 'every' of at least 10s",
        ),
        (
            "receivers: {a: {type: email, to: [a@b.example], urgent: {every: 60s, fore: 1h}}}",
            "2: unknown key 'fore'",
        ),
    ],
)
def test_what_cannot_work_is_refused(line: str, problem: str) -> None:
    _, problems = checked(f"version: 1\n{line}\n")
    assert problem in problems


def test_the_name_of_a_group_is_bounded_and_stays_its_own() -> None:
    long, other = ({"run": "x" * 500 + end} for end in "ab")
    assert len(group_of(long, ["run"])) == 400
    assert group_of(long, ["run"]) != group_of(other, ["run"])
    assert group_of({}, []) == "all"
