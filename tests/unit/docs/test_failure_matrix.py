"""Each failure in the table of the page on reliability has a test, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^\| (?!failure|---)([^|]+) \| [^|]+ \| (`tests/[^|]+) \|$", re.MULTILINE)


def test_each_failure_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    rows = _ROW.findall(page.split("## What a failure of the workers does")[1])
    assert len(rows) >= 20
    for failure, cell in rows:
        named = re.findall(r"`(tests/\S+)::(\w+)`", cell)
        assert named, failure
        for file, function in named:
            assert f"def {function}(" in (ROOT / file).read_text(), f"{failure}: {file}::{function}"
