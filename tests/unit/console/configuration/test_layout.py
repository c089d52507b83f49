"""`tocsin fmt`: comments and values stay, the result is stable, and always loads to the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from support.docs.config_examples import uncomment
from tocsin.console.__main__ import app
from tocsin.console.configuration.init import config_text, first_text
from tocsin.console.configuration.layout import formatted, rewrite
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.yaml_document import load
from tocsin.schemas.errors import ConfigurationError

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*/tocsin.yaml"))

UNTIDY = """\


# top
version:   1 # one
labels: { team: vision,env: }   \n\
receivers:
    a: {type: webhook, # why
        url: "https://x/y#z",   # other

        # full
        sign: {key: {secret: hook}}
    }


rules:
- nonfinite: [stop , a,
     # inside
     b]
# between
- name:   x
  match: {a: 'b'}
  # last of x
- loss_spike : off
notes: >
      folded

        text
"""
TIDY = """\
# top
version: 1   # one
labels: {team: vision, env: }
receivers:
  a: {type: webhook,   # why
    url: "https://x/y#z",       # other

    # full
    sign: {key: {secret: hook}}
    }

rules:
  - nonfinite: [stop, a,
      # inside
      b]
  # between
  - name: x
    match: {a: 'b'}
    # last of x
  - loss_spike: off
notes: >
  folded

    text
"""


def test_indentation_and_spaces_are_written_anew_and_lines_stay() -> None:
    assert formatted(UNTIDY, source="f") == TIDY
    assert formatted(UNTIDY.replace("\n", "\r\n"), source="f") == TIDY
    assert formatted(TIDY, source="f") == TIDY
    assert formatted("", source="f") == ""
    assert formatted("# all in comments", source="f") == "# all in comments\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_are_formatted(path: Path) -> None:
    assert formatted(path.read_text(), source=str(path)) == path.read_text()


@pytest.mark.parametrize(
    "text", [first_text(), uncomment(first_text()), config_text()], ids=["first", "all", "full"]
)
def test_what_init_writes_is_formatted(text: str) -> None:
    assert formatted(text, source="f") == text


@pytest.mark.parametrize(
    "text",
    [
        "a: |+\n   kept\n\n\n",
        "a: |\n   no break at the end",
        "a:\n- |2\n    two more\n- b",
        'a: "one \\\n      two\\ \n\n   three"',
        "%YAML 1.2\n---\na: 1\n...\n",
        "? a\n: 1\n? 'b'\n: - 2\n  - - 3\n",
        "a: {b: , c: [ ], d: [1 , ] }",
        "a: .nan\nb: 1\nc: 1.0\nd: true\ne: 'true'",
    ],
)
def test_the_corners_of_yaml_keep_their_values(text: str) -> None:
    new = formatted(text, source="f")

    assert value(new) == value(text)
    assert formatted(new, source="f") == new


def test_what_is_no_yaml_of_ours_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigProblems, match="f:2:4: anchors"):
        formatted("version: 1\na: &x 1\n", source="f")


def value(text: str) -> str:
    return json.dumps(load(text, source="f").data)


# -- generated files: any nesting, indentation, style and place of comments


class _Writer:
    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self.comments: list[str] = []
        self.lines: list[str] = []

    def pick(self, *choices: Any) -> Any:
        return self._draw(st.sampled_from(choices))

    def comment(self) -> str:
        self.comments.append(f"# c{len(self.comments)} {{: - end")
        return self.comments[-1]

    def beside(self, column: int) -> None:
        kind = self.pick("", "", "blank", "comment")
        indent = " " * self.pick(0, column, column + 1, column + 3)
        if kind:
            self.lines.append("" if kind == "blank" else indent + self.comment())

    def tail(self) -> str:
        return str(self.pick("", "", "  ", " \t", "comment")).replace(
            "comment", " " * self.pick(1, 5) + self.comment()
        )

    def scalar(self) -> str:
        word = self.pick("nonfinite", "12:30", "1e3", "no", "~", "sweep-*", "a b", ".nan", "0o17")
        return str(self.pick(word, f"'{word} it''s # no'", f'"{word}\\n\\u00e9 #"', ""))

    def flow(self, column: int, depth: int = 0) -> str:
        if depth > 2 or self.pick(True, False):
            return self.scalar()
        left, right = self.pick("[]", "{}")
        text = left
        for number in range(self.pick(0, 1, 3)):
            text += self._gap(column)
            inner = self.flow(column, depth + 1)
            key = f"k{number}{self.pick(': ', ':   ')}"
            text += (inner or "v") if left == "[" else f"{key}{inner}"
            text += self.pick(",", " ,")
        return f"{text}{self._gap(column)}{right}"

    def _gap(self, column: int) -> str:
        line_break = "\n" + " " * (column + self.pick(1, 4))
        return str(self.pick("", "  ", line_break, "comment")).replace(
            "comment", f" {self.comment()}{line_break}"
        )

    def long_scalar(self, before: str, column: int) -> None:
        kind = self.pick("|", ">-", "|+", "|2", "plain", "double")
        pad = " " * (column + (2 if kind == "|2" else self.pick(1, 3)))
        if kind == "plain":
            self.lines += [f"{before} one", f"{pad}two", "", f"{pad}three"]
        elif kind == "double":
            self.lines += [f'{before} "one \\', f"{pad}two\\ ", "", f'{pad}  three"']
        else:
            head = self.pick("", " # head")
            self.lines += [f"{before} {kind}{head}", f"{pad}one", "", f"{pad}  two # no", ""]

    def value(self, before: str, column: int, depth: int, *, bare: bool) -> None:
        kind = self.pick("scalar", "flow", "long", *(["map", "list"] if depth < 3 else []))
        if kind == "scalar":
            self.lines.append(f"{before} {self.scalar()}{self.tail()}")
        elif kind == "flow":
            self.lines.append(f"{before} {self.flow(column)}{self.tail()}")
        elif kind == "long":
            self.long_scalar(before, column)
        else:
            self.lines.append(before + self.tail())
            inner = column + self.pick(*([0] if bare and kind == "list" else []), 1, 2, 4)
            self.beside(inner)
            self.mapping(inner, depth + 1) if kind == "map" else self.items(inner, depth + 1)

    def mapping(self, column: int, depth: int = 0, first: str = "") -> None:
        for number in range(self.pick(1, 3)):
            key = self.pick(f"k{number}", f"'q{number}'") + self.pick("", " ")
            before = first if first and not number else " " * column
            self.value(f"{before}{key}:", column, depth, bare=True)
            self.beside(column)

    def items(self, column: int, depth: int) -> None:
        for _ in range(self.pick(1, 2)):
            dash = " " * column + "-"
            if depth < 3 and self.pick(True, False):
                inner = column + self.pick(2, 3)
                self.mapping(inner, depth + 1, first=dash.ljust(inner))
            else:
                self.value(dash, column, depth, bare=False)
            self.beside(column)


@st.composite
def files(draw: Any) -> tuple[str, list[str]]:
    """A text, and the comments in it."""
    writer = _Writer(draw)
    writer.beside(0)
    writer.mapping(writer.pick(0, 2))
    writer.beside(0)
    return "\n".join(writer.lines) + writer.pick("", "\n", "\n\n"), writer.comments


def test_a_comment_after_a_literal_text_does_not_become_a_line_of_it() -> None:
    text = "a:\n b: 1\n c:\n - |\n    one\n\n   # a comment\n"
    new = formatted(text, source="f")
    assert value(new) == value(text)
    assert new == "a:\n  b: 1\n  c:\n    - |\n      one\n\n    # a comment\n"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(files())
def test_any_file_keeps_its_comments_and_loads_to_the_same(file: tuple[str, list[str]]) -> None:
    text, comments = file
    before = load(text, source="f")
    if before.problems:
        return  # a comment where none can be made it another file

    new = formatted(text, source="f")

    assert value(new) == value(text)
    assert formatted(new, source="f") == new
    for comment in comments:
        if comment in text:
            assert new.count(comment) == text.count(comment)


# -- the command


def test_files_are_written_in_place_with_their_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tocsin.yaml"
    file.write_text("version:  1\n")
    file.chmod(0o640)
    (tmp_path / "link.yaml").symlink_to(file)

    checked = CliRunner().invoke(app, ["fmt", "--check"])
    untouched = file.read_text()
    done = CliRunner().invoke(app, ["fmt", "link.yaml"])
    again = CliRunner().invoke(app, ["fmt", "--check"])

    assert (checked.exit_code, checked.output) == (1, "not formatted: tocsin.yaml\n")
    assert untouched == "version:  1\n"
    assert (done.exit_code, done.output) == (0, "formatted: link.yaml\n")
    assert (again.exit_code, again.output) == (0, "")
    assert file.read_text() == "version: 1\n"
    assert file.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link.yaml").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "tocsin.yaml"]


def test_without_a_file_the_command_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    error = CliRunner().invoke(app, ["fmt"]).exception

    assert isinstance(error, ConfigurationError)
    assert str(error) == "no file: name one, or write one with `tocsin init`"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_keeps_its_owner_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "tocsin.yaml"
    path.write_text("version:  1\n")
    os.chown(path, 0, 65_534)
    path.chmod(0o640)
    rewrite(path, "version: 1\n")
    facts = path.stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (0, 65_534, 0o640)
    assert path.read_text() == "version: 1\n"
