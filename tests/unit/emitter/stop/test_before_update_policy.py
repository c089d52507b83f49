"""Which configurations let ranks leave before an update, and why others do not."""

from __future__ import annotations

import pytest

from tocsin.emitter.stop.before_update_policy import BeforeUpdatePolicy, before_update_policy
from tocsin.schemas.configuration.file import Config, check_config

ON = "version: 1\nstop: {before_update: true}\n"


def parsed(text: str) -> Config:
    config, problems = check_config(text, "tocsin.yaml")
    assert not problems
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1\n", BeforeUpdatePolicy()),
        (ON, BeforeUpdatePolicy("protect_last_good")),
        (ON + "rules: [{nonfinite: [stop]}]", BeforeUpdatePolicy("protect_last_good")),
        (ON + "rules: [{nonfinite: [{stop: {checkpoint: save}}]}]", BeforeUpdatePolicy("save")),
        (
            ON + "rules: [{ExplodingTensor: [{stop: {checkpoint: skip}}]}]",
            BeforeUpdatePolicy("skip"),
        ),
        (
            ON + "defaults: {mode: shadow}\nrules: [{nonfinite: [{stop: {mode: enforce}}]}]",
            BeforeUpdatePolicy("protect_last_good"),
        ),
        # An instance of its own beside the default one, which stops.
        (
            ON + "rules: [{name: mine, use: nonfinite, actions: []}]",
            BeforeUpdatePolicy("protect_last_good"),
        ),
        (
            ON + "rules: [{name: nonfinite, use: nonfinite, match: {team: vision}}]",
            BeforeUpdatePolicy("protect_last_good"),
        ),
    ],
)
def test_where_the_rule_stops_the_run_at_once(text: str, expected: BeforeUpdatePolicy) -> None:
    assert before_update_policy(parsed(text), {"team": "vision"}) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("defaults: {mode: shadow}", "its mode is shadow"),
        ("defaults: {mode: ask}", "its mode is ask"),
        ("rules: [{nonfinite: [{stop: {mode: ask}}]}]", "its mode is ask"),
        ("rules: [{nonfinite: []}]", "its actions have no stop"),
        ("rules: [{nonfinite: off}]", "it is off"),
        ("defaults: {rules: none}", "it is off"),
        (
            "rules: [{name: nonfinite, use: nonfinite, match: {team: language}}]",
            "its match does not fit the labels of this run",
        ),
        (
            "rules: [{name: nonfinite, use: nonfinite, params: {for_steps: 3}}]",
            "its parameters for_steps or only_nan make it wait",
        ),
        (
            "rules: [{name: nonfinite, use: nonfinite, severity: warning}]",
            "its severity is warning",
        ),
    ],
)
def test_where_it_does_not(text: str, why: str) -> None:
    found = before_update_policy(parsed(f"{ON}{text}"), {"team": "vision"})
    assert found.checkpoint is None
    assert found.why_not == f"the rule nonfinite does not stop this run at once: {why}"
