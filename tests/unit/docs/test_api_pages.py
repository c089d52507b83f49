"""Pages for programs are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_pages import COMMAND, PAGES, write_pages

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), f"write it with: {COMMAND}"


def test_all_are_written(tmp_path: Path) -> None:
    write_pages(tmp_path / "new")
    assert {str(path.relative_to(tmp_path / "new")) for path in tmp_path.rglob("*.*")} == set(PAGES)
