"""`docs/rules/` is what the catalogue says, and its pictures are of the examples beside them."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import get_args

import pytest

from rule_examples import (
    FOLDER,
    Example,
    picture,
    read_example,
    write_example,
)
from rule_pages import COMMAND, index_page, pages, rule_page, write_pages
from series_svg import HEIGHT, WIDTH, series_svg
from tocsin.console.catalog.rule_text import FAMILIES
from tocsin.schemas.records.issues import Evidence, Fact, Series, Subject
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.rule import AnyRule, Family

DOCS = Path(__file__).parents[3] / "docs"
RULES = list(built_in())
SVG = "{http://www.w3.org/2000/svg}"


def test_every_page_and_picture_is_current() -> None:
    folder = DOCS / "rules"
    expected = pages(folder, built_in())
    written = {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in [*folder.rglob("*.md"), *folder.rglob("*.svg")]
    }
    different = sorted(
        name for name in {*expected, *written} if expected.get(name) != written.get(name)
    )
    assert not different, f"write them with: {COMMAND}"


def test_every_example_is_of_a_rule_that_there_is() -> None:
    names = {path.stem for path in (DOCS / "rules" / FOLDER).glob("*.json")}
    assert names <= set(built_in().names())


def test_pages_are_written_and_those_of_other_rules_go(tmp_path: Path) -> None:
    gone = tmp_path / "rules" / "a_rule_that_was.md"
    gone.parent.mkdir()
    gone.write_text("# gone\n")
    write_pages(tmp_path)
    assert not gone.exists()
    assert (tmp_path / "rules" / "index.md").read_text() == index_page(built_in())
    assert (tmp_path / "rules" / "nonfinite.md").exists()


def test_every_family_has_a_title() -> None:
    assert tuple(FAMILIES) == get_args(Family)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.meta.name)
def test_each_rule_has_its_page(rule: type[AnyRule]) -> None:
    meta = rule.meta
    page = rule_page(rule)
    assert page.startswith(f"# {meta.name}\n\n{meta.meaning}")
    for text in (meta.remedy, meta.does_not_see):
        assert text in page
    assert f"| severity | {meta.severity} |" in page
    assert meta.alias is None or f"`{meta.alias}`" in page
    for one in meta.inputs:
        assert f"`{one.pattern}`".replace("|", "\\|") in page
    for key in meta.params.model_fields:
        assert f"\n| `{key}` |" in page
    for preset, values in meta.presets.items():
        section = page.partition(f"## Preset `{preset}`")[2]
        assert all(f"| `{key}` |" in section for key in values)
    row = f"| [`{meta.name}`]({meta.name}.md)"
    assert index_page(built_in()).count(row) == 1 + meta.stop_worthy


def test_what_stops_a_run_has_its_reason_in_the_table() -> None:
    _, _, table = index_page(built_in()).partition("## Which rules may stop a run")
    for rule in RULES:
        if rule.meta.stop_worthy:
            assert rule.meta.stops_because, rule.meta.name
            assert rule.meta.stops_because[1:] in table


def test_the_readme_names_every_rule_once() -> None:
    _, _, after = (DOCS.parent / "README.md").read_text().partition("## What it finds")
    _, _, table = after.partition("| what goes wrong |")
    named = re.findall(r"`(\w+)`", table.partition("\n\n")[0])
    assert sorted(named) == sorted(built_in().names())


SERIES = Series(
    name="loss",
    steps=tuple(range(10, 20)),
    values=(2.0, 2.1, 1.9, 2.0, math.nan, 9.0, 9.5, math.inf, 9.1, 9.2),
    limit=4.0,
)
EXAMPLE = Example(
    rule="loss_spike",
    run="a made series",
    severity="warning",
    subject=Subject(kind="loss", name="loss"),
    reason="the loss has <jumped> & stays",
    first_step=15,
    evidence=Evidence(facts=(Fact(name="loss", value=9.0, limit=4.0),), series=SERIES),
)


def test_an_example_is_kept_and_shown(tmp_path: Path) -> None:
    write_example(tmp_path, EXAMPLE)
    kept = read_example(tmp_path, "loss_spike")
    assert kept is not None
    assert kept.model_dump_json() == EXAMPLE.model_dump_json()
    page = rule_page(built_in().get("loss_spike"), kept)
    assert "![loss](examples/loss_spike.svg)" in page
    assert "| loss | 9 | 4 |" in page


def test_a_picture_shows_line_limit_beginning_and_gaps() -> None:
    svg = picture(EXAMPLE)
    assert svg is not None
    root = ET.fromstring(svg)
    kinds = [element.get("class") for element in root]
    assert kinds.count("line") == 3  # in pieces: before, between and after what is no number
    assert kinds.count("bad") == 2
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"limit 4", "began at step 15", "NaN or infinite", "loss", "step"} <= set(words)
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == "loss_spike: the loss has <jumped> & stays"


@pytest.mark.parametrize(
    "series",
    [
        Series(name="one", steps=(5,), values=(1.0,)),
        Series(name="equal", steps=(1, 2), values=(3.0, 3.0), limit=3.0),
        Series(name="zero", steps=(1, 2), values=(0.0, 0.0)),
        Series(name="negative", steps=(1, 2, 3), values=(-5.0, -4.0, -900.0), limit=-1e6),
        Series(name="wide", steps=(1, 2, 3), values=(1e-9, 1.0, 1e12), limit=1e-7),
        Series(name="nothing", steps=(1, 2), values=(math.nan, math.inf)),
        Series(name="seconds", steps=(0, 10**6), values=(1e11, 5e10), x="s", unit="bytes"),
    ],
    ids=lambda series: series.name,
)
def test_any_series_can_be_drawn_inside_its_frame(series: Series) -> None:
    root = ET.fromstring(series_svg(series, first_step=2, title="t"))
    for element in root.iter():
        for key, value in element.attrib.items():
            if key in ("x", "x1", "x2", "cx"):
                assert 0 <= float(value) <= WIDTH
            if key in ("y", "y1", "y2", "cy"):
                assert 0 <= float(value) <= HEIGHT
            if key == "points":
                assert all(0 <= float(n) <= WIDTH for n in re.split("[ ,]", value))
