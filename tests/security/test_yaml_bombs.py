"""A configuration file that is made to cost minutes is refused at once, with a place.

What bounds the time is what the parser is given: so these tests count its events, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoints, entry_points

import pytest

from tocsin.schemas.configuration.file import MAX_SECTION_PROBLEMS, check_config
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.yaml_document import (
    MAX_BYTES,
    MAX_DIRECTIVES,
    MAX_LINE,
    MAX_NODES,
    MAX_PROBLEMS,
    load,
)
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.configured_rules import rule_problems


def many(row: Callable[[int], str], before: str = "", after: str = "") -> str:
    """Rows up to the largest file that is read."""
    rows, size = [before], len(before) + len(after)
    for number in range(MAX_BYTES):
        text = row(number)
        size += len(text)
        if size > MAX_BYTES:
            break
        rows.append(text)
    return "".join(rows) + after


BOMBS: dict[str, tuple[Callable[[], str], str, int]] = {
    "tag directives": (lambda: many(lambda i: f"%TAG !{i}! x\n", after="--- a\n"), "directives", 9),
    "unknown directives": (lambda: many(lambda i: "%a\n"), "directives", 9),
    "aliases in a line": (lambda: many(lambda i: "*a,", "b: [", "]"), "line_too_long", 1),
    "keys in a line": (lambda: many(lambda i: f"k{i},", "{", "}"), "line_too_long", 1),
    "braces": (lambda: "{" * MAX_BYTES, "line_too_long", 1),
    "quotes": (lambda: '""' * (MAX_BYTES // 2), "line_too_long", 1),
}


@pytest.mark.parametrize("name", BOMBS)
def test_the_parser_never_sees_it(name: str, parser_events: list[int]) -> None:
    make, code, line = BOMBS[name]
    config, problems = check_config(make(), "tocsin.yaml")

    assert config is None
    assert [(p.code, p.line, p.column) for p in problems] == [(code, line, 1)]
    assert problems[0].hint
    assert parser_events == [0]


SLOW: dict[str, Callable[[], str]] = {
    "aliases": lambda: many(lambda i: f"- *a{i}\n"),
    "anchors": lambda: many(lambda i: f"- &a{i} x\n"),
    "flow keys": lambda: many(lambda i: f"k{i}: 1,\n", "{", "}"),
    "braces": lambda: "{\n" * (MAX_BYTES // 2),
    "complex keys": lambda: many(lambda i: f"? k{i}\n"),
    "rules": lambda: many(lambda i: "- r: [stop]\n", "version: 1\nrules:\n"),
}


@pytest.mark.parametrize("name", SLOW)
def test_reading_ends_at_a_bound(name: str, parser_events: list[int]) -> None:
    document = load(SLOW[name](), source="tocsin.yaml")

    assert not document.complete
    assert 1 <= len(document.problems) <= MAX_PROBLEMS + 1
    assert parser_events[0] <= 2 * MAX_NODES


def test_a_line_as_long_as_the_bound_and_as_many_directives_are_read() -> None:
    text = "# " + "x" * (MAX_LINE - 2) + "\na: 1\n"
    assert load(text, source="f").problems == ()
    few = "%YAML 1.2\n" + "%a\n" * (MAX_DIRECTIVES - 1) + "--- a\n"
    assert "directives" not in [problem.code for problem in load(few, source="f").problems]


def test_of_a_line_that_is_too_long_no_secret_is_shown() -> None:
    text = "receivers: {r: {token: SECRET" + "x" * MAX_LINE + "}}\n"
    _, problems = check_config(text, "tocsin.yaml")
    assert "SECRET" not in str(ConfigProblems(problems, text))


def test_what_is_wrong_with_each_of_thousands_of_rules_is_listed_in_part() -> None:
    text = "version: 1\nrules:\n" + "".join(f"- loss_spik: [r{i}]\n" for i in range(5_000))
    _, problems = check_config(text, "tocsin.yaml")

    assert len(problems) == MAX_PROBLEMS + 1
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)
    assert problems[-1].code == "too_many_problems"
    assert len(str(ConfigProblems(problems, text))) < 50_000


def test_installed_packages_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def counted(group: str) -> EntryPoints:
        looked.append(group)
        return entry_points(group=group)

    monkeypatch.setattr("tocsin.stream_rules.engine.configured_rules.entry_points", counted)
    text = "version: 1\nrules:\n" + "".join(f"- r{i}: []\n" for i in range(MAX_SECTION_PROBLEMS))
    config, _ = check_config(text, "tocsin.yaml")
    assert config is not None
    problems = list(rule_problems(built_in())(config))

    assert len(problems) == MAX_SECTION_PROBLEMS
    assert len(looked) <= 2
