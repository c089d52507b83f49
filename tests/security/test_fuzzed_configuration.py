"""Mutated configurations: each is valid, or has problems that say where, and none is a bug.

They are mutated from those that the documentation shows, byte by byte and line by line.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from support.records.mutation import bent
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VALUES = ("", "[]", "{}", "null", "true", "-1", "1e400", ".nan", "'x'", "[stop, stop]", "*a", "10s")


def originals() -> list[str]:
    """Configurations that are valid."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
    pages = [ROOT / "README.md", *docs]
    found = [match[1] for page in pages for match in BLOCK.finditer(page.read_text())]
    return [*found, (ROOT / "deploy" / "config" / "tocsin.yaml").read_text()]


def changed(text: str, other: str, dice: random.Random) -> str:
    """With lines moved, repeated, taken from another configuration, or with another value."""
    lines, others = text.splitlines(keepends=True), other.splitlines(keepends=True)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(lines)) if lines else 0
        match dice.randrange(5):
            case 0:
                lines[at:at] = [dice.choice(others)]
            case 1:
                del lines[at : at + dice.randint(1, 3)]
            case 2 if lines:
                lines.insert(dice.randrange(len(lines)), lines[at])
            case 3 if lines:
                lines[at] = dice.choice(("  ", "", "- ")) + lines[at].lstrip()
            case _ if lines:
                lines[at] = f"{lines[at].partition(':')[0]}: {dice.choice(VALUES)}\n"
    return "".join(lines)


def fuzz(count: int, seed: int) -> Counter[str]:
    """What became of so many configurations."""
    dice, good, registry = random.Random(seed), originals(), section_registry()
    found: Counter[str] = Counter()
    for _ in range(count):
        text = dice.choice(good)
        if dice.random() < 0.7:
            text = changed(text, dice.choice(good), dice)
        if dice.random() < 0.5:
            text = bent(text.encode(), dice).decode(errors="replace")
        try:
            config, problems = check_config(text, "tocsin.yaml", registry)
        except Exception as error:
            found[f"a bug: {type(error).__name__}: {error} in {text!r}"] += 1
            continue
        if (config is None) != bool(problems) or not all(problem.message for problem in problems):
            found[f"a bug: {problems} in {text!r}"] += 1
        found["refused" if config is None else "taken"] += 1
    return found


@pytest.mark.parametrize(
    "count",
    [
        200,
        pytest.param(int(os.environ.get("TOCSIN_FUZZ", "1000000")), marks=pytest.mark.torture),
    ],
)
@pytest.mark.timeout(86_400)
def test_mutated_configurations_are_valid_or_have_problems(count: int) -> None:
    found = fuzz(count, seed=20261126)
    assert [name for name in found if name.startswith("a bug")] == []
    assert found["refused"] + found["taken"] == count
    assert found["refused"] > count / 4
    assert found["taken"] > count / 50
