"""`tocsin catalog list` and `show`: what the catalogue says, for people and for programs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tocsin.console.__main__ import app
from tocsin.console.catalog.table import UnknownFamily, find, list_json, show, show_json
from tocsin.stream_rules.catalogue import UnknownRule, built_in

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


def test_each_can_be_shown() -> None:
    for rule in RULES:
        meta, out = rule.meta, io.StringIO()
        console = Console(file=out, width=10_000)
        for block in show(find(built_in(), meta.alias or meta.name)):
            console.print(block, highlight=False)
        assert out.getvalue().startswith(f"{meta.name}  {meta.meaning}")
        for key in meta.params.model_fields:
            assert f"\n {key} " in out.getvalue()
        facts = json.loads(show_json(rule))["rule"]
        assert (facts["name"], facts["version"]) == (meta.name, meta.version)
        assert [one["name"] for one in facts["parameters"]] == list(meta.params.model_fields)


def test_the_command_shows_one() -> None:
    done = catalog("show", "VanishingGradient")
    assert done.exit_code == 0
    assert done.output.startswith("vanishing_gradient  ")
    assert (
        json.loads(catalog("show", "nonfinite", "--json").output)["rule"]["severity"] == "critical"
    )


@pytest.mark.parametrize("name", ["VanishingGradient", "vanishinggradient", "vanishing-gradient"])
def test_a_rule_is_found_by_what_people_call_it(name: str) -> None:
    assert find(built_in(), name).meta.name == "vanishing_gradient"


def test_an_unknown_rule_is_answered_with_what_was_meant() -> None:
    with pytest.raises(UnknownRule, match="did you mean nonfinite"):
        find(built_in(), "nonfinit")
    with pytest.raises(UnknownRule, match="tocsin catalog list"):
        find(built_in(), "zzz")


def test_a_rule_of_ones_own_is_begun_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = catalog("new", "my_own_rule", "--folder", "rules")
    assert done.exit_code == 0
    assert "wrote rules/my_own_rule.py\nwrote rules/test_my_own_rule.py\n" in done.output
    assert "{name: my_own_rule, use: my_own_rule.py:MyOwnRule}" in done.output
    shown = catalog("show", "rules/my_own_rule.py:MyOwnRule")
    assert shown.exit_code == 0
    assert shown.output.startswith("my_own_rule  ")
    assert "\n limit " in shown.output
