"""`docs/reference/configuration.md` and `docs/schemas/config.json` are what the models say."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

from config_page import COMMAND, config_page, write_docs
from problem_codes import PROBLEM_CODES, WARNING_CODES
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.targets.registry import TargetKinds
from tocsin.console.configuration.editor_schema import as_text, editor_schema
from tocsin.console.configuration.field_texts import field_texts, in_yaml
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.configuration.values import Duration, SecretRef
from tocsin.schemas.configuration.yaml_document import load
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.rule import Params

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@cache
def schema() -> Any:
    return editor_schema(built_in(), ReceiverKinds().models(), TargetKinds().models())


def test_the_page_is_current() -> None:
    written = (DOCS / "reference" / "configuration.md").read_text()

    assert written == config_page(), f"write it with: {COMMAND}"


def test_the_schema_is_current() -> None:
    text = (DOCS / "schemas" / "config.json").read_text()

    assert text == as_text(schema()), f"write it with: {COMMAND}"


def test_both_are_written(tmp_path: Path) -> None:
    write_docs(tmp_path)

    assert (tmp_path / "reference" / "configuration.md").read_text() == config_page()
    assert json.loads((tmp_path / "schemas" / "config.json").read_text()) == schema()


def test_every_rule_and_parameter_is_on_the_page() -> None:
    page = config_page()

    for rule in built_in():
        _, _, after = page.partition(f"### `{rule.meta.name}`\n")
        section = after.split("\n## ")[0].split("\n### ")[0]
        assert rule.meta.meaning in section
        for key in rule.meta.params.model_fields:
            assert f"| `{key}` |" in section


def codes_in_the_source(calls: Mapping[str, int]) -> set[str]:
    """The texts that are passed as `code` to these calls, by position or by name."""
    found: set[str] = set()
    for path in ROOT.glob("*/tocsin/**/*.py"):
        source = path.read_text()
        if not any(name in source for name in calls):
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in calls:
                place = calls[name]
                given = node.args[place : place + 1]
                given += [word.value for word in node.keywords if word.arg == "code"]
                found |= {
                    item.value
                    for item in given
                    if isinstance(item, ast.Constant) and isinstance(item.value, str)
                }
    return found


@pytest.mark.slow
def test_every_code_has_a_meaning() -> None:
    problems = codes_in_the_source({"Problem": 2, "PlacedProblem": 3, "_note": 1, "_fatal": 1})

    assert problems | {Problem((), "").code} == set(PROBLEM_CODES)
    assert codes_in_the_source({"warning": 1}) == set(WARNING_CODES)
    assert list(PROBLEM_CODES) == sorted(PROBLEM_CODES)


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in config_page().splitlines() if line.startswith("| `")]

    assert rows
    assert not [row for row in rows if row.rstrip(" |").endswith("| -")]


def valid(text: str) -> bool:
    validator = jsonschema.Draft202012Validator(schema())
    return bool(validator.is_valid(load(text, source="").data))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize(
    "rules",
    [
        "[{nonfinite: [stop]}]",
        "[{nonfinite: off}]",
        "[{name: nonfinite, params: {for_steps: 2}}]",
        "[{name: mine, use: nonfinite, params: {only_nan: true}, severity: info}]",
        "[{use: stalled_training, params: {threshold: 30m}}]",
        "[{ExplodingTensor: [stop]}]",
        "[{use: ExplodingTensor, severity: info}]",
        "[{name: ExplodingTensor, params: {}}]",
        "[{name: mine, use: ExplodingTensor}]",
        "",
    ],
)
def test_an_editor_takes(rules: str) -> None:
    assert valid(f"version: 1\nrules: {rules}")


@pytest.mark.parametrize(
    "rules",
    [
        "[{nonfinit: [stop]}]",
        "[{use: nonfinit}]",
        "[{name: nonfinite, params: {for_step: 2}}]",
        "[{name: nonfinite, params: {for_steps: 0}}]",
        "[{name: mine, use: nonfinite, params: {factor: 2.0}}]",
        "[{use: stalled_training, params: {threshold: 30}}]",
        "[{use: ExplodingTensor, params: {for_step: 2}}]",
        "[{name: Mine, use: ExplodingTensor}]",
        "[{name: Mine}]",
        "{}",
    ],
)
def test_an_editor_refuses(rules: str) -> None:
    assert not valid(f"version: 1\nrules: {rules}")


@pytest.mark.parametrize("alias", built_in().aliases())
def test_an_editor_knows_what_the_loader_knows_a_rule_by(alias: str) -> None:
    for rules in (f"[{{{alias}: [stop]}}]", f"[{{use: {alias}}}]", f"[{{name: {alias}}}]"):
        text = f"version: 1\nrules: {rules}\n"
        assert check_config(text, "f", section_registry())[1] == []
        assert valid(text)


def test_defaults_are_in_the_form_of_the_file() -> None:
    assert schema()["$defs"]["StopOptions"]["properties"]["grace"]["default"] == "30s"
    assert schema()["$defs"]["RetryConfig"]["properties"]["give_up_after"]["default"] == "24h"


class Part(Params):
    """A part."""

    width: int = 3
    """How wide."""


class Sample(Params):
    """Parameters of a sample.

    More of it.
    """

    wait: Duration = timedelta(minutes=5)
    """How long. Unit: a duration; at most a day."""
    steps: int = Field(default=1_000, ge=1, le=5_000)
    """How many. Unit: steps."""
    limit: float | None = Field(default=None, gt=0.0)
    """Where it ends. Absent: nowhere."""
    part: Part = Part()
    """A part of it."""
    either: tuple[int | str, ...] = ()
    """Some."""


def test_a_field_is_told_in_words() -> None:
    told = {field.key: field for field in field_texts(Sample)}

    wait = told["wait"]
    assert (wait.kind, wait.default, wait.meaning) == (
        "duration",
        "5m",
        "How long. At most a day.",
    )
    assert told["steps"].kind == "whole number, ≥ 1, ≤ 5,000"
    assert (told["steps"].unit, told["steps"].default) == ("steps", "1000")
    assert (told["limit"].kind, told["limit"].default) == ("number, > 0.0", "")
    assert told["part"].parts == (Part,)
    assert told["either"].kind == "list (whole number or text)"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e-7,
        float("inf"),
        float("-inf"),
        "plain",
        "30s",
        "0.5%",
        "no",
        "true",
        "12",
        "null",
        "a: b",
        "#x",
        "[x]",
        "",
        'quo"te',
        ["a", {"b": [1, 2.5]}],
    ],
)
def test_a_value_in_yaml_is_read_back(value: object) -> None:
    assert load(f"{{key: {in_yaml(value)}}}", source="").data == {"key": value}


def test_what_is_no_plain_value_is_written_as_the_file_has_it() -> None:
    class Model(BaseModel):
        name: str = "x"

    assert in_yaml(timedelta(hours=24)) == "24h"
    assert in_yaml(SecretRef("hook")) == "{secret: hook}"
    assert in_yaml(PurePosixPath("a/b")) == "a/b"
    assert in_yaml(Model()) == "{name: x}"
    with pytest.raises(TypeError, match="object"):
        in_yaml(object())
