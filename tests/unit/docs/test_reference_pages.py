"""Pages of `docs/reference/` that are made: they are current, and name what the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from reference_pages import CODES, COMMAND, PAGES, SET_BY_TOCSIN, SET_BY_YOU, write_pages
from tocsin.console.__main__ import app
from tocsin.runtime.metrics import METRICS
from tocsin.schemas import exit_codes

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
SOURCES = {path: path.read_text() for path in sorted(ROOT.glob("*/tocsin/**/*.py"))}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), f"write it with: {COMMAND}"


def test_all_are_written(tmp_path: Path) -> None:
    write_pages(tmp_path)
    written = {path.name: path.read_text() for path in (tmp_path / "reference").iterdir()}
    assert written == {name: page() for name, page in PAGES.items()}


def test_each_variable_of_the_code_is_on_the_page_and_the_reverse() -> None:
    """But for those in examples of secrets, `{env: NAME}`, and of commands: users choose them."""
    named, secrets = set(), set()
    templates = [path.read_text() for path in ROOT.glob("*/tocsin/**/templates/*.yaml")]
    for text in (*SOURCES.values(), *templates):
        named |= set(re.findall(r"\bTOCSIN_[A-Z_]+", text))
        secrets |= set(re.findall(r"\b(?:env: |environment: \{)(TOCSIN_[A-Z_]+)", text))
    assert secrets
    assert named - secrets == {*SET_BY_YOU, *SET_BY_TOCSIN}


def test_each_exit_code_of_the_code_is_on_the_page_and_the_reverse() -> None:
    defined = {value for name, value in vars(exit_codes).items() if name.isupper()}
    on_page = {
        int(str(code).removesuffix(" + n")) for _, code, _ in CODES if code != "the job's own"
    }
    assert on_page - {0} == defined


def exits() -> Iterator[tuple[str, int]]:
    """Each number that is written where a process exits, with its file and line."""
    for path, text in SOURCES.items():
        for call in ast.walk(ast.parse(text)) if "Exit" in text else ():
            if not isinstance(call, ast.Call):
                continue
            if getattr(call.func, "attr", getattr(call.func, "id", "")) in ("Exit", "SystemExit"):
                for each in ast.walk(call):
                    if isinstance(each, ast.Constant) and type(each.value) is int:
                        yield f"{path.relative_to(ROOT)}:{call.lineno}", each.value


def test_no_command_exits_with_a_number_of_its_own() -> None:
    found = [(place, number) for place, number in exits() if number != 0]
    assert found == []


def test_each_metric_is_on_the_page() -> None:
    page = (REFERENCE / "metrics.md").read_text()
    assert all(f"| `{name}` | {metric.kind} |" in page for name, metric in METRICS.items())


def options(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from options(child, f"{path} {name}")
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield f"{path} {parameter.opts[0]}", parameter


def test_each_option_with_a_value_names_it() -> None:
    """Help and page would show it as a flag."""
    unnamed = [
        name
        for name, option in options(get_command(app), "tocsin")
        if not option.is_flag and not option.metavar
    ]
    assert unnamed == []
