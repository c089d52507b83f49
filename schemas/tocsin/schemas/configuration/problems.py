"""What is wrong with a configuration file, and how it is shown.

A `Problem` is at a place inside the data ("rules, 3, actions, 0"); a `PlacedProblem` at a line
and column of a source. `ConfigProblems` is the error that carries all of them at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tocsin.schemas.errors import ConfigurationError

Loc = tuple[str | int, ...]
"""The way from the top of the document to a value: keys and list indices."""

_SHOWN: Final = 50
_LINE_WIDTH: Final = 120
_LONGEST_WORD: Final = 100
"""Characters of a word that is compared with names; the time grows with their product."""
_KEY: Final = re.compile(r"[\w.-]+:(?= |$)")
_KEY_BEFORE: Final = re.compile(r"[\s-]*(?:[\w.-]+:\s+)?")
# Wherever an address or one of these stands, a token may stand; a bus has none in its URL.
_TELLING: Final = re.compile(r"(?<!kafka)://|\b(?:secrets?|receivers|sasl|password)\b")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a place in the document.

    Attributes:
        loc: the way to the value, from the top of the document.
        message: what is wrong and what was expected; never a secret's value.
        code: a stable snake_case word for programs.
        hint: what to try, or None.
        at: whether to point at the value or at its key.
        hide_value: of the source line only keys are shown, because a secret may be there.
        earlier: where the same stands, of which this is the second; its place ends the message.
    """

    loc: Loc
    message: str
    code: str = "invalid_value"
    hint: str | None = None
    at: Literal["key", "value"] = "value"
    hide_value: bool = False
    earlier: Loc | None = None

    def placed(self, source: str, line: int, column: int) -> PlacedProblem:
        """The same at a line and column of a source."""
        return PlacedProblem(
            source, line, column, self.code, self.message, self.hint, self.hide_value
        )


@dataclass(frozen=True, slots=True)
class PlacedProblem:
    """Something wrong at a line and column (1-based, in characters) of a source."""

    source: str
    line: int
    column: int
    code: str
    message: str
    hint: str | None = None
    hide_value: bool = False

    @property
    def place(self) -> tuple[str, int, int]:
        """Source, line and column."""
        return self.source, self.line, self.column

    def render(self, lines: Sequence[str] = ()) -> str:
        """`file:line:col: message`, then the source line with a caret and the hint, if known."""
        out = [f"{self.source}:{self.line}:{self.column}: {_printable(self.message)}"]
        line = lines[self.line - 1] if self.line <= len(lines) else None
        if line is not None and (self.hide_value or _TELLING.search(line)):
            line = _without_value(line, self.column)
        if line is not None:
            excerpt, caret = _excerpt(line, self.column)
            out.append(f"{self.line:>6} | {excerpt}")
            out.append(f"       | {' ' * caret}^")
        if self.hint:
            out.append(f"         try: {_printable(self.hint)}")
        return "\n".join(out)


class ConfigProblems(ConfigurationError):
    """The configuration has problems; each is shown with its place.

    Args:
        texts: the texts by the names of their sources, or the only one; lines of them are shown.

    Attributes:
        problems: all of them, in the order of their places.
    """

    def __init__(
        self, problems: Iterable[PlacedProblem], texts: str | Mapping[str, str] = ""
    ) -> None:
        self.problems = tuple(problems)
        if isinstance(texts, str):
            texts = {problem.source: texts for problem in self.problems}
        lines = {source: split_lines(text) for source, text in texts.items()}
        shown = [one.render(lines.get(one.source, ())) for one in self.problems[:_SHOWN]]
        left = len(self.problems) - len(shown)
        if left:
            shown.append(f"and {left:,} more problem{'s' if left > 1 else ''}")
        super().__init__("\n".join(shown))


def did_you_mean(word: str, known: Iterable[str], *, list_up_to: int = 12) -> str | None:
    """A hint: the name that `word` most resembles, else all names if they are so few, else None."""
    names = sorted(set(known))
    near = (
        []
        if len(word) > _LONGEST_WORD
        else difflib.get_close_matches(
            word.lower(), [name.lower() for name in names], n=1, cutoff=0.6
        )
    )
    if near:
        return next(name for name in names if name.lower() == near[0])
    return "one of " + ", ".join(names) if 0 < len(names) <= list_up_to else None


def quoted(word: str) -> str:
    """A word of the file, for a message; not if it may be a token."""
    return "(an address)" if "://" in word else repr(word[:60])


def split_lines(text: str) -> list[str]:
    """The lines of a source as YAML counts them (`str.splitlines` splits at form feeds, too)."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _without_value(line: str, column: int) -> str | None:
    """The line as far as it surely holds no secret: keys only. None: not even that is sure."""
    before, after = line[: column - 1], line[column - 1 :]
    if not _KEY_BEFORE.fullmatch(before):
        return None
    key = _KEY.match(after)
    return before + (f"{key[0]} …" if key else "…")


def _excerpt(line: str, column: int) -> tuple[str, int]:
    """The part of the line around the column, and where in it the caret goes."""
    caret = min(column - 1, len(line))
    start = max(0, caret - _LINE_WIDTH // 2) if len(line) > _LINE_WIDTH else 0
    return _printable(line[start : start + _LINE_WIDTH]), caret - start


def _printable(text: str) -> str:
    """Without tabs and control characters: a configuration must not drive the terminal."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
