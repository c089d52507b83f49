"""`tocsin catalog list` and `show`: what the catalogue says, for people and for programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from tocsin.console.__main__ import app
from tocsin.console.catalog_table import UnknownFamily, find, list_json
from tocsin.stream_rules.catalogue import UnknownRule, built_in
from tocsin.stream_rules.rule import AnyRule

RULES = list(built_in())


def catalog(*words: str) -> Result:
    return CliRunner().invoke(app, ["catalog", *words])


def test_every_rule_is_listed_with_its_alias() -> None:
    done = catalog("list")
    assert done.exit_code == 0
    lines = [line.split() for line in done.output.splitlines()]
    for rule in RULES:
        (line,) = [words for words in lines if words[:1] == [rule.meta.name]]
        assert rule.meta.severity in line
        assert rule.meta.alias is None or rule.meta.alias in line
        assert ("(off)" in line) is not rule.meta.by_default


def test_a_family_alone() -> None:
    listed = json.loads(catalog("list", "--family", "system", "--json").output)["rules"]
    names = [rule["name"] for rule in listed]
    assert names == [rule.meta.name for rule in RULES if rule.meta.family == "system"]


def test_an_unknown_family_is_answered_with_those_there_are() -> None:
    with pytest.raises(UnknownFamily, match="numerical, progress"):
        list_json(built_in(), "numeric")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.meta.name)
def test_each_can_be_shown(rule: type[AnyRule]) -> None:
    meta = rule.meta
    done = catalog("show", meta.alias or meta.name)
    assert done.exit_code == 0
    assert done.output.startswith(f"{meta.name}  {meta.meaning}")
    for key in meta.params.model_fields:
        assert f"\n {key} " in done.output
    facts = json.loads(catalog("show", meta.name, "--json").output)["rule"]
    assert (facts["name"], facts["version"], facts["remedy"]) == (
        meta.name,
        meta.version,
        meta.remedy,
    )
    assert [one["name"] for one in facts["parameters"]] == list(meta.params.model_fields)


@pytest.mark.parametrize("name", ["VanishingGradient", "vanishinggradient", "vanishing-gradient"])
def test_a_rule_is_found_by_what_people_call_it(name: str) -> None:
    assert find(built_in(), name).meta.name == "vanishing_gradient"


def test_an_unknown_rule_is_answered_with_what_was_meant() -> None:
    with pytest.raises(UnknownRule, match="did you mean nonfinite"):
        find(built_in(), "nonfinit")
    with pytest.raises(UnknownRule, match="tocsin catalog list"):
        find(built_in(), "zzz")
