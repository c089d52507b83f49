"""`--help` of every command: its width, its words, and what it costs; `--version`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest
from typer.testing import CliRunner

from support.docs.command_lines import program
from support.docs.plain_english import found_in
from tocsin.console.__main__ import app


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))


ALL = list(_commands(program()))


@cache
def _help(path: tuple[str, ...]) -> str:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}, prog_name="tocsin")
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_all_commands_are_walked() -> None:
    assert {("run",), ("bus", "init"), ("catalog", "new"), ("convert", "sagemaker")} < set(ALL)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_fits_80_columns(path: tuple[str, ...]) -> None:
    lines = _help(path).splitlines()
    assert lines
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_plain_english(path: tuple[str, ...]) -> None:
    assert list(found_in(_help(path))) == []


@pytest.mark.parametrize("path", [path for path in ALL if len(path)], ids=" ".join)
def test_first_lines_fit_the_list_of_commands(path: tuple[str, ...]) -> None:
    # A sentence that does not fit is cut, with "..." at its end.
    line = next(line for line in _help(path[:-1]).splitlines() if line.startswith(f"  {path[-1]} "))
    assert not line.endswith("...")


def test_the_version_is_that_of_the_distribution() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"tocsin {version('tocsin')}\n")


def test_help_imports_no_part_that_only_a_command_needs() -> None:
    code = (
        "import sys; import tocsin.console.__main__; "
        "print(*(name for name in sys.modules if name.startswith("
        "('tocsin.stream_rules', 'tocsin.actions', 'tocsin.emitter', 'torch', 'numpy', 'rich', "
        "'pydantic', 'yaml', 'cryptography', 'sqlite3'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
