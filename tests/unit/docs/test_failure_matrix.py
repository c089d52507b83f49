"""Each failure in the table of the page on reliability has a test, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^\| (?!failure \||---)(.+?) \| .+ \| ?(.*?) ?\|$", re.MULTILINE)


def test_each_failure_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    section = page.split("## What a failure of the workers does")[1].split("### Chaos")[0]
    rows = _ROW.findall(section)
    # All lines of the table but its heading: a row that names no test is one, too.
    assert len(rows) == sum(line.startswith("|") for line in section.splitlines()) - 2
    assert len(rows) >= 20
    for failure, cell in rows:
        named = re.findall(r"`(tests/\S+)::(\w+)`", cell)
        assert named, failure
        for file, function in named:
            assert f"def {function}(" in (ROOT / file).read_text(), f"{failure}: {file}::{function}"
