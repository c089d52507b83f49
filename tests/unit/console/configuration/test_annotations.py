"""`tocsin check` for machines: annotations of GitHub, and SARIF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tocsin.console.__main__ import app
from tocsin.console.configuration.annotations import as_github
from tocsin.console.configuration.check import Checked
from tocsin.schemas.configuration.problems import PlacedProblem

TEXT = """version: 1
receivers:
  hook: {type: webhook, url: "https://example.com/planted-SECRET", haeders: {}}
  unused: {type: webhook, url: "https://example.com/x"}
rules:
  - nonfinit: [stop]
"""


def checked(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    (folder / "tocsin.yaml").write_text(TEXT, encoding="utf-8")
    shown = CliRunner().invoke(app, ["check", "--format", form, "tocsin.yaml"])
    assert shown.exit_code == 2
    assert "SECRET" not in shown.stdout
    return shown.stdout


def test_github_shows_each_problem_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = checked("github", tmp_path, monkeypatch).splitlines()
    assert lines == [
        "::error file=tocsin.yaml,line=3,col=68,title=tocsin unknown_key::"
        "unknown key 'haeders'; try: headers",
        "::error file=tocsin.yaml,line=6,col=5,title=tocsin unknown_rule::"
        "unknown rule 'nonfinit'; try: nonfinite",
    ]


def test_a_line_break_begins_no_other_workflow_command() -> None:
    problem = PlacedProblem("a,b:c.yaml", 1, 2, "x", "100 %\n::error::planted\r", None)
    text = as_github([Checked(source="a", texts={}, problems=[], warnings=[problem])])
    assert text == (
        "::warning file=a%2Cb%3Ac.yaml,line=1,col=2,title=tocsin x::100 %25%0A::error::planted%0D"
    )


def test_sarif_has_each_problem_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = json.loads(checked("sarif", tmp_path, monkeypatch))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert run["tool"]["driver"]["name"] == "tocsin"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [
        "unknown_key",
        "unknown_rule",
    ]
    assert [
        (
            one["ruleId"],
            one["level"],
            one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
            one["locations"][0]["physicalLocation"]["region"],
        )
        for one in run["results"]
    ] == [
        ("unknown_key", "error", "tocsin.yaml", {"startLine": 3, "startColumn": 68}),
        ("unknown_rule", "error", "tocsin.yaml", {"startLine": 6, "startColumn": 5}),
    ]


def test_json_has_two_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = checked("json", tmp_path, monkeypatch)
    assert CliRunner().invoke(app, ["check", "--json", "tocsin.yaml"]).stdout == text
    assert CliRunner().invoke(app, ["check", "--json", "--config", "tocsin.yaml"]).stdout == text


def test_a_good_file_has_warnings_and_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = TEXT.replace("haeders", "headers").replace("nonfinit:", "nonfinite:")
    (tmp_path / "tocsin.yaml").write_text(good, encoding="utf-8")
    shown = CliRunner().invoke(app, ["check", "--format", "github"])
    assert shown.exit_code == 0
    assert [line.partition(" ")[0] for line in shown.stdout.splitlines()] == ["::warning"] * 2
