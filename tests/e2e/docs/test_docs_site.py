"""The site of the documentation: it is built without a warning, and says what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tocsin.emitter
from tocsin.emitter import Run
from tocsin.stream_rules.catalogue import built_in

DOCS = Path(__file__).parents[3] / "docs"


# The theme of the site takes half of the time, for the same contents.
@pytest.fixture(scope="module", params=["basic", pytest.param("furo", marks=pytest.mark.torture)])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` builds it, with that theme. A page that no table
    of contents has is a warning, and that is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    theme = ["-D", f"html_theme={request.param}"]
    command = [sys.executable, "-m", "sphinx", *options, *theme, str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.torture  # the theme of CI shows no contents; a page that they lack fails its build
@pytest.mark.parametrize("site", ["furo"], indirect=True)
def test_each_page_is_reached_from_the_contents(site: Path) -> None:
    contents = (site / "index.html").read_text()
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert f'href="{name}.html"' in contents or name == "index" or name.startswith("rules/")


def test_each_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in sorted(DOCS.rglob("*.md")):
        html = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"([^\"]+)\"", html)
        assert [address for address in loaded if address.startswith(("http", "//"))] == []


def test_each_schema_is_listed_and_is_there_to_be_loaded(site: Path) -> None:
    html = (site / "reference" / "records.html").read_text()
    files = sorted((DOCS / "schemas").glob("*.json"))
    assert files
    for file in files:
        found = re.search(rf'href="([^"]+/{re.escape(file.name)})"', html)
        assert found is not None, f"docs/reference/records.md does not link {file.name}"
        assert (site / "reference" / found[1]).read_text() == file.read_text()


def test_the_page_of_the_python_api_has_every_public_name(site: Path) -> None:
    html = (site / "reference" / "python-api.html").read_text()
    methods = {f"Run.{name}" for name in vars(Run) if not name.startswith("_")}
    missing = [
        name
        for name in {*tocsin.emitter.__all__, *methods}
        if f'id="tocsin.emitter.{name}"' not in html
    ]
    assert missing == []


def test_the_glossary_is_sorted() -> None:
    text = (DOCS / "reference" / "glossary.md").read_text()
    terms = re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)
    assert len(terms) > 30
    assert terms == sorted(terms)


def test_the_architecture_names_files_that_there_are() -> None:
    text = (DOCS / "architecture.md").read_text()
    folders = [folder for folder in DOCS.parent.iterdir() if not folder.name.startswith(".")]
    there = {path.name for folder in folders for path in folder.rglob("*.py")}
    named = re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text)
    assert len(named) > 20
    assert [name for name in named if name not in there] == []


def test_a_page_knows_all_names_of_the_rules_of_sagemaker_debugger() -> None:
    text = (DOCS / "how-to" / "from-sagemaker.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \[`(\w+)`\]", text, re.MULTILINE)
    aliases = {rule.meta.alias: rule.meta.name for rule in built_in() if rule.meta.alias}
    assert dict(rows) == aliases
