"""Which configurations let ranks leave before an update, and why others do not."""

from __future__ import annotations

import pytest

from tocsin.emitter.stop.early_stop import EarlyStop, early_stop
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
        ("version: 1\n", EarlyStop()),
        (ON, EarlyStop("protect_last_good")),
        (ON + "rules: [{nonfinite: [stop]}]", EarlyStop("protect_last_good")),
        (ON + "rules: [{nonfinite: [{stop: {checkpoint: save}}]}]", EarlyStop("save")),
        (ON + "rules: [{ExplodingTensor: [{stop: {checkpoint: skip}}]}]", EarlyStop("skip")),
        (
            ON + "defaults: {mode: shadow}\nrules: [{nonfinite: [{stop: {mode: enforce}}]}]",
            EarlyStop("protect_last_good"),
        ),
        # An instance of its own beside the default one, which stops.
        (
            ON + "rules: [{name: mine, use: nonfinite, actions: []}]",
            EarlyStop("protect_last_good"),
        ),
        (
            ON + "rules: [{name: nonfinite, use: nonfinite, match: {team: vision}}]",
            EarlyStop("protect_last_good"),
        ),
    ],
)
def test_where_the_rule_stops_the_run_at_once(text: str, expected: EarlyStop) -> None:
    assert early_stop(parsed(text), {"team": "vision"}) == expected


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
    found = early_stop(parsed(f"{ON}{text}"), {"team": "vision"})
    assert found.checkpoint is None
    assert found.why_not == f"the rule nonfinite does not stop this run at once: {why}"
