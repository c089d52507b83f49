"""The template of a rule: its own test passes, and a configuration can name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tocsin.console.catalog.template import class_name, config_entry, write_template
from tocsin.console.configuration.check import check_file
from tocsin.schemas.errors import ConfigurationError


@pytest.mark.slow
def test_the_template_passes_its_own_test_and_is_clean(tmp_path: Path) -> None:
    files = write_template(tmp_path / "rules", "my_own_rule")

    assert [path.name for path in files] == ["my_own_rule.py", "test_my_own_rule.py"]
    folder = tmp_path / "rules"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "100"]
    formatted = [sys.executable, "-m", "ruff", "format", "--isolated", "--check"]
    for command in (lint, [*formatted, "--line-length", "100"]):
        done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_configuration_beside_it_names_it(tmp_path: Path) -> None:
    write_template(tmp_path / "rules", "my_own_rule")
    entry = config_entry(Path("rules/my_own_rule.py"), "my_own_rule")
    (tmp_path / "tocsin.yaml").write_text(f"version: 1\nrules:\n  {entry}\n")

    checked = check_file(Path("tocsin.yaml"), {}, tmp_path)

    assert not checked.problems
    assert checked.effective is not None
    assert "my_own_rule" in checked.effective.rules_on


@pytest.mark.parametrize("name", ["MyRule", "my-rule", "1st", "class", "nonfinite", "", "a__b"])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError):
        write_template(tmp_path, name)

    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("mine")

    with pytest.raises(ConfigurationError, match="already exists"):
        write_template(tmp_path, "mine")

    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "mine"


def test_the_class_has_the_name_in_capitals() -> None:
    assert class_name("loss_above_2") == "LossAbove2"
