"""The sections `targets` and `policy`: which backends there are, and whose jobs they may end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from tocsin.schemas.configuration.file import Config, SectionRegistry, check_config
from tocsin.schemas.configuration.targets import TargetConfig, UnreadTarget
from tocsin.schemas.errors import ConfigurationError

TARGETS = "version: 1\ntargets:\n  farm-a: {type: farm, gate: 3}\n"


class Farm(TargetConfig):
    """A scheduler of a test's own."""

    gate: int
    """Which gate."""


class Farms:
    """The kinds of a test."""

    def names(self) -> Sequence[str]:
        return ["farm", "broken"]

    def model(self, kind: str) -> type[TargetConfig] | None:
        if kind == "broken":
            raise ConfigurationError("the stop target kind 'broken' cannot be loaded")
        return Farm if kind == "farm" else None


def check(text: str) -> tuple[Config | None, list[tuple[int, int, str, str | None]]]:
    config, problems = check_config(text, "f", SectionRegistry(targets=Farms()))
    return config, [(one.line, one.column, one.code, one.hint) for one in problems]


def test_targets_are_read_by_the_model_of_their_kind() -> None:
    config, problems = check(TARGETS + "policy: [{match: {team: vision}, may_stop_on: farm-a}]")
    assert problems == []
    assert config is not None
    assert config.targets == {"farm-a": Farm(type="farm", gate=3)}
    assert config.targets["farm-a"].grace == timedelta(seconds=30)
    (entry,) = config.policy
    assert (entry.match, entry.may_stop_on) == ({"team": ("vision",)}, ("farm-a",))
    assert list(entry.named()) == [("farm-a", ("policy", 0, "may_stop_on"))]


def test_a_training_reads_of_targets_what_all_kinds_have() -> None:
    config, problems = check_config(TARGETS, "f")
    assert problems == []
    assert config is not None
    assert config.targets == {"farm-a": UnreadTarget(type="farm")}


def test_without_the_section_nobody_may_end_a_job() -> None:
    assert (Config().targets, Config().policy) == ({}, ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("targets: {a: {type: frm, gate: 1}}", (2, 21, "invalid_value", "farm")),
        ("targets: {a: {gate: 1}}", (2, 14, "missing_key", "one of farm, broken")),
        ("targets: {a: {type: farm, gat: 1}}", (2, 27, "unknown_key", "gate")),
        ("targets: {a: {type: broken}}", (2, 21, "target_not_loaded", None)),
        ("targets: {a: 3}", (2, 14, "invalid_value", None)),
        ("targets: {A!: {type: farm, gate: 1}}", (2, 11, "name", None)),
        ("policy: [{match: {}, may_stop_on: []}]", (2, 35, "empty_policy", None)),
        ("policy: [{may_stop_on: [a]}]", (2, 10, "missing_key", "match: {team: vision}")),
        ("policy: {match: {}}", (2, 9, "invalid_value", None)),
        ("policy: [{match: {}, may_stop: [a]}]", (2, 22, "unknown_key", "may_stop_on")),
    ],
)
def test_mistakes_have_their_places(text: str, found: tuple[int, int, str, str | None]) -> None:
    _, problems = check(f"version: 1\n{text}\n")
    line, column, code, hint = problems[0]
    assert (line, column, code) == found[:3]
    if found[3] is not None:
        assert hint == found[3]


def test_a_target_that_is_not_there_is_named_with_the_nearest() -> None:
    text = TARGETS + "policy:\n  - {match: {}, may_stop_on: [farm-a, farm-b]}\n"
    assert check(text)[1] == [(5, 39, "unknown_target", "farm-a")]
    text = TARGETS + "policy:\n  - {match: {}, may_stop_on: pond}\n"
    assert check(text)[1][0][:3] == (5, 30, "unknown_target")


def test_secrets_of_targets_are_named_in_the_section_of_secrets() -> None:
    text = "version: 1\ntargets: {a: {type: farm, gate: {secret: nobody}}}\n"
    assert (2, 42, "unknown_secret", "name it in the section 'secrets'") in check(text)[1]
