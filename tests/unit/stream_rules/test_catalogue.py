"""The catalogue, its rules' descriptions, and the configuration's way to instances."""

from __future__ import annotations

import ast
import inspect
import re
import sys

import pytest

from tocsin.schemas.configuration.docstrings import field_docstrings
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import (
    FAMILIES,
    DuplicateRule,
    RuleCatalogue,
    UnknownRule,
    built_in,
)
from tocsin.stream_rules.engine.configured_rules import rule_problems, rule_specs
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.numerical.nonfinite import Nonfinite
from tocsin.stream_rules.rules.progress.loss_diverged import LossDivergedParams

RULES = list(built_in())


def registry() -> SectionRegistry:
    sections = SectionRegistry()
    sections.register("rules", rule_problems())
    return sections


def problems(rules: str) -> list[tuple[int, int, str]]:
    _, found = check_config(f"version: 1\nrules:\n{rules}", "tocsin.yaml", registry())
    return [(problem.line, problem.column, problem.message) for problem in found]


def test_every_rule_stands_in_its_family() -> None:
    for family, rules in FAMILIES.items():
        for rule in rules:
            assert rule.meta.family == family
            assert rule.__module__.endswith(f".rules.{family}.{rule.meta.name}")


def test_presets_are_parameters_of_their_rule() -> None:
    for rule in RULES:
        for values in rule.meta.presets.values():
            rule.meta.params.model_validate(dict(values))


def test_an_alias_is_the_same_rule() -> None:
    assert built_in().get("ExplodingTensor") is Nonfinite
    assert "ExplodingTensor" in built_in().aliases()


def test_a_name_is_taken_once() -> None:
    catalogue = built_in()
    with pytest.raises(DuplicateRule, match="nonfinite"):
        catalogue.add(Nonfinite)


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(UnknownRule, match="nonfinit"):
        RuleCatalogue().get("nonfinit")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.meta.name)
def test_every_rule_is_described(rule: type[AnyRule]) -> None:
    meta = rule.meta
    assert meta.name.islower()
    assert meta.version >= 1
    assert meta.meaning.endswith(".")
    assert meta.remedy.endswith(".")
    assert meta.does_not_see.endswith(".")
    assert bool(meta.stops_because) == meta.stop_worthy
    assert rule.__doc__
    for name, parameter in meta.params.model_fields.items():
        assert field_docstrings(meta.params).get(name), f"{meta.name}.{name} has no meaning"
        assert not parameter.is_required()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.meta.name)
def test_only_critical_rules_that_are_meant_to_stop_a_run(rule: type[AnyRule]) -> None:
    meant = ("nonfinite", "loss_diverged", "restart_loop")
    assert rule.meta.stop_worthy == (rule.meta.name in meant)


def test_listed_rules_come_first_then_the_defaults() -> None:
    specs = rule_specs(
        [
            RuleEntry(name="loss_diverged", use="loss_diverged", params={"factor": 3}),
            RuleEntry(name="mine", use="nonfinite", severity="warning"),
            RuleEntry(name="telemetry_lost", use="telemetry_lost", off=True),
        ]
    )
    names = [spec.name for spec in specs]
    assert names[:2] == ["loss_diverged", "mine"]
    assert "nonfinite" in names
    assert "telemetry_lost" not in names
    assert specs[0].params == LossDivergedParams(factor=3)
    assert [spec.listed for spec in specs[:3]] == [True, True, False]


def test_none_means_the_listed_ones_only() -> None:
    entry = RuleEntry(name="ExplodingTensor", use="ExplodingTensor")
    assert [spec.name for spec in rule_specs([entry], defaults="none")] == ["nonfinite"]


def test_mistakes_are_found_at_their_place() -> None:
    assert problems(
        "  - nonfinit: [stop]\n"
        "  - name: loss_diverged\n"
        "    params: {factor: 0.5, for_step: 50}\n"
        "  - name: stalled_training\n"
        "    params: {threshold: 30}\n"
    ) == [
        (3, 5, "unknown rule 'nonfinit'"),
        (5, 22, "expected a value greater than 1"),
        (5, 27, "unknown key 'for_step'"),
        (7, 25, "expected a duration with its unit, like 250ms, 30s, 10m, 4h or 2d"),
    ]


def test_a_good_configuration_has_none() -> None:
    assert (
        problems(
            "  - nonfinite: [stop]\n"
            "  - {name: quick-stall, use: stalled_training, params: {threshold: 5s}}\n"
            "  - {name: exploding_gradient, params: {factor: 10}}\n"
        )
        == []
    )


def test_wrong_parameters_make_no_instance() -> None:
    entry = RuleEntry(name="loss_diverged", use="loss_diverged", params={"factor": "high"})
    with pytest.raises(ConfigurationError):
        rule_specs([entry])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.meta.name)
def test_every_branch_is_described(rule: type[AnyRule]) -> None:
    source = ast.parse(inspect.getsource(sys.modules[rule.__module__]))
    keywords = [node for node in ast.walk(source) if isinstance(node, ast.keyword)]
    given = [node.value for node in keywords if node.arg == "branch"]
    words = {one.value for one in given if isinstance(one, ast.Constant)}
    assert bool(given) <= bool(rule.meta.branches)
    assert words <= set(rule.meta.branches)
    for name, meaning in rule.meta.branches.items():
        assert re.fullmatch("[a-z][a-z0-9_]*", name)
        assert meaning


def test_the_rules_that_a_match_names_are_known() -> None:
    rules = """
  - {name: mine, use: nonfinite}
routes: [{match: {rule: [mine, nonfinte]}, notify: []}]
inhibit: [{when: {rule: ExplodingTensor}, mute: {rule: "vanishing_*"}}]
silences: [{match: {rule: loss_spike}, until: 2030-01-01T00:00:00Z}]
"""
    assert problems(rules) == [
        (5, 32, "unknown rule 'nonfinte'"),
        (6, 25, "unknown rule 'ExplodingTensor'"),
    ]
