"""`docs/rules.md` is what the catalogue says."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tocsin.console.rule_docs import COMMAND, FAMILIES, rules_page, write_page
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.rule import AnyRule, Family

PAGE = Path(__file__).parents[3] / "docs" / "rules.md"
RULES = list(built_in())


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == rules_page(), f"write it with: {COMMAND}"


def test_it_is_written(tmp_path: Path) -> None:
    write_page(tmp_path)
    assert (tmp_path / "rules.md").read_text() == rules_page()


def test_every_family_has_a_title() -> None:
    assert tuple(FAMILIES) == get_args(Family)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.meta.name)
def test_each_rule_has_its_section(rule: type[AnyRule]) -> None:
    meta = rule.meta
    _, _, after = rules_page().partition(f"\n### {meta.name}\n")
    section = after.split("\n## ")[0].split("\n### ")[0]
    assert section.strip().startswith(meta.meaning)
    assert meta.remedy.split("|")[0] in section
    assert f"| severity | {meta.severity}; stops the run:" in section
    assert meta.alias is None or f"`{meta.alias}`" in section
    for one in meta.inputs:
        assert f"`{one.pattern}`" in section
    for key in meta.params.model_fields:
        assert f"\n| `{key}` |" in section
