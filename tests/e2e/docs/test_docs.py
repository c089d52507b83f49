"""What the README and the docs show is run: commands, Python, configuration."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.docs import command_lines
from support.processes.site import Site
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config

ROOT = Path(__file__).parents[3]
SITE = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *SITE]
TOLD = {"how-to/capture.md", "how-to/frameworks.md", "how-to/store.md"}
"""Their Python is one story: `test_docs_capture.py` and `test_docs_store.py` run it."""
OPERATED = {"how-to/kafka.md", "how-to/systemd.md"}
"""Their commands other than `tocsin` are those of an operator: `test_deploy.py` reads them."""
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)


def blocks(language: str) -> Iterator[object]:
    """The fenced blocks of that language, each a test case named by its page."""
    for page in PAGES:
        for number, match in enumerate(_FENCE.finditer(page.read_text())):
            if match[1] == language and not (language == "python" and named(page) in TOLD):
                yield pytest.param(match[2], id=f"{page.name}-{number}")


def named(page: Path) -> str:
    """The page with its folder."""
    return f"{page.parent.name}/{page.name}"


def shown_commands() -> Iterator[object]:
    """Each `tocsin …` and `make …` line of the console blocks, and the former in scripts."""
    for page in PAGES:
        for match in _FENCE.finditer(page.read_text()):
            shown = match[2].replace(" && ", "\n") if match[1] == "console" else ""
            if match[1] == "sh":
                shown = "\n".join(re.findall(r"\btocsin (?:run|stop|rules|actions) .*", match[2]))
            for line in shown.splitlines():
                text = re.split("#| > ", line.removeprefix("$ "))[0].strip()
                operated = named(page) in OPERATED and not text.startswith("tocsin ")
                if text and not operated:
                    yield pytest.param(text, id=text[:60])


@pytest.mark.parametrize("line", list(shown_commands()))
def test_each_command_shown_is_one_that_there_is(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        targets = {word for word in words[1:] if "=" not in word}
        known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert targets <= known
        return
    assert words[0] == "tocsin", f"the docs show a command that no test runs: {line}"
    command_lines.parse(words[1:])


@pytest.mark.parametrize("text", list(blocks("yaml")))
def test_each_configuration_shown_is_valid(text: str) -> None:
    _, problems = check_config(text, "docs", section_registry())
    assert problems == []


@pytest.mark.parametrize("text", list(blocks("python")))
def test_each_python_example_runs(text: str, embedded_site: Site) -> None:
    example = embedded_site.folder / "example.py"
    example.write_text(text)
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=embedded_site.folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "deploy" / "README.md"],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_each_link_leads_to_a_file_and_a_heading_in_it(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


@cache
def anchors(page: Path) -> list[str]:
    """What GitHub calls the headings of a page, and so does the site."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
