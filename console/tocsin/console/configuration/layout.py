"""The layout of a configuration file: indentation and spaces, and nothing else.

Lines stay lines, so that comments, blank lines and what the user put side by side survive. Only
what is between the tokens of YAML is written anew: two columns for each level, one space after
`:`, `-` and `,`, none inside brackets, two at least before a comment, whose column is kept
otherwise. Round-trip parsers (ruamel.yaml) drop the comments inside of `{…}` and `[…]`, and fold
these into one line.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.yaml_document import Document, load
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.whole_file import whole_file

_INDENT: Final = 2
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENERS: Final = (yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken)
_CLOSERS: Final = (yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


class LayoutFailed(ConfigurationError):
    """The text cannot be laid out without changing it: a bug, after which nothing is written."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A list or mapping in block style.

    Attributes:
        old: its column.
        new: the column that it gets.
        bare: a list in the column of the key that it belongs to.
    """

    old: int
    new: int
    sequence: bool
    bare: bool = False


@dataclass(frozen=True, slots=True)
class _Atom:
    """A token that has text, and where it is.

    Attributes:
        blocks: those that it is in, outermost first.
        depth: how many brackets are open before it.
        heads: whether its column is that of its block: `-`, a key, `?`, or `:` below that.
    """

    token: yaml.Token
    start: int
    end: int
    column: int
    blocks: tuple[_Block, ...]
    depth: int
    heads: bool

    @property
    def base(self) -> int:
        """The new column of the block that it is in."""
        return self.blocks[-1].new if self.blocks else 0


def formatted(text: str, *, source: str) -> str:
    """The same file in the layout of tocsin: same values, same comments.

    Raises:
        ConfigProblems: it is not a YAML that tocsin reads.
        LayoutFailed: a bug of this module.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    before = _readable(text, source)
    new, comments = _laid_out(text)
    after = _readable(new, source)
    again, comments_after = _laid_out(new)
    # NaN, and 1 beside 1.0 and true: compared as they are written.
    same = json.dumps(before.data) == json.dumps(after.data)
    if not same or comments != comments_after or again != new:
        raise LayoutFailed(f"{source}: cannot be formatted without changing it; it was not changed")
    return new


def rewrite(path: Path, text: str) -> None:
    """Put the text in the place of a file, all of it or none; a link stays one.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        facts = path.stat()
        with whole_file(path) as draft:
            # Nobody else may read it before it has the owner of the file.
            with open(draft, "w", encoding="utf-8", opener=_private) as file:
                file.write(text)
            with suppress(PermissionError):
                os.chown(draft, facts.st_uid, facts.st_gid)
            shutil.copymode(path, draft)
    except OSError as err:
        raise ConfigurationError(f"cannot write {str(path)!r}: {err.strerror or err}") from err


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _readable(text: str, source: str) -> Document:
    document = load(text, source=source)
    if document.problems:
        raise ConfigProblems(document.problems, text)
    return document


def _laid_out(text: str) -> tuple[str, list[str]]:
    """The text in its new layout, and its comments."""
    page = _Page(text)
    for atom in _atoms(text):
        page.add(atom)
    return page.finished(), page.comments


# -- from tokens to atoms


def _atoms(text: str) -> Iterator[_Atom]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)

    def index(mark: Any) -> int:
        return min(starts[int(mark.line)] + int(mark.column), len(text))

    blocks: list[_Block] = []
    depth, key_follows = 0, False

    def push(column: int, *, sequence: bool, bare: bool = False) -> None:
        new = blocks[-1].new + _INDENT if blocks else 0
        blocks.append(_Block(column, new, sequence, bare))

    for token in yaml.scan(text, Loader=_LOADER):
        column = int(token.start_mark.column)
        if isinstance(token, yaml.BlockMappingStartToken | yaml.BlockSequenceStartToken):
            push(column, sequence=isinstance(token, yaml.BlockSequenceStartToken))
            continue
        if isinstance(token, yaml.BlockEntryToken) and not blocks[-1].sequence:
            push(column, sequence=True, bare=True)
        ends_bare = isinstance(token, yaml.KeyToken | yaml.ValueToken | yaml.BlockEndToken)
        if depth == 0 and ends_bare and blocks and blocks[-1].bare:
            blocks.pop()
        if isinstance(token, yaml.BlockEndToken):
            blocks.pop()
            continue
        start, end = index(token.start_mark), index(token.end_mark)
        if isinstance(token, yaml.KeyToken) and start == end:
            key_follows = True
            continue
        if start == end:
            continue
        if _is_block_scalar(token):
            end = _end_of_block_scalar(text, start, end)
        marks = isinstance(token, yaml.BlockEntryToken | yaml.KeyToken | yaml.ValueToken)
        heads = depth == 0 and (marks or key_follows)
        yield _Atom(token, start, end, column, tuple(blocks), depth, heads)
        key_follows = False
        depth += isinstance(token, _OPENERS) - isinstance(token, _CLOSERS)


def _end_of_block_scalar(text: str, start: int, end: int) -> int:
    """Without the break after its last line; blank lines at its end belong to `|+` alone."""
    content = text[start:end]
    header = content.partition("\n")[0]
    return start + len(content[:-1] if "+" in header and content[-1] == "\n" else content.rstrip())


# -- from atoms to lines


class _Page:
    """The lines that have been written."""

    def __init__(self, text: str) -> None:
        self.comments: list[str] = []
        self._text = text
        self._lines: list[str] = []
        self._line: str | None = None
        self._last: _Atom | None = None
        self._read = 0
        self._flow = 0
        # Blank lines up to here are part of a value.
        self._kept = 0

    def add(self, atom: _Atom) -> None:
        """Write what is before the atom, then the atom."""
        gap = self._text[self._read : atom.start]
        first = self._line is None or "\n" in gap
        if first:
            self._gap(gap, atom)
            self._line = " " * self._indent(atom)
        else:
            self._line = f"{self._line}{_space(self._last, atom)}"
        if atom.depth == 0 and isinstance(atom.token, _OPENERS):
            self._flow = max(len(self._line) - len(self._line.lstrip(" ")), atom.base)
        content = self._text[atom.start : atom.end].split("\n")
        self._line += content[0] if len(content) == 1 else content[0].rstrip(" \t")
        self._continue(atom, content, first=first)
        self._last, self._read = atom, atom.end

    def finished(self) -> str:
        """All of it, with what is after the last atom."""
        self._gap(self._text[self._read :], None)
        while len(self._lines) > self._kept and not self._lines[-1]:
            self._lines.pop()
        last = self._last.token if self._last else None
        # The break at the end of the file would be one of its value.
        open_end = self._read == len(self._text) and _is_block_scalar(last)
        return "\n".join(self._lines if open_end else [*self._lines, ""]) if self._lines else ""

    def _continue(self, atom: _Atom, content: Sequence[str], *, first: bool) -> None:
        """The further lines of an atom, which only a scalar has."""
        if len(content) == 1:
            return
        assert isinstance(atom.token, yaml.ScalarToken)
        assert self._line is not None
        style = atom.token.style
        if _is_block_scalar(atom.token):
            lines = _block_lines(content, atom)
        else:
            if style:
                # A blank at a line's end may be escaped.
                self._line += content[0][len(content[0].rstrip(" \t")) :]
            column = self._indent(atom) if first else self._inside(atom)
            stripped = (line.lstrip(" \t") for line in content[1:])
            lines = [" " * column + line if line else "" for line in stripped]
        for line in lines:
            self._lines.append(self._line)
            self._line = line
        self._kept = len(self._lines) + 1

    def _gap(self, gap: str, atom: _Atom | None) -> None:
        """Comments and blank lines between the last atom and one in a line of its own."""
        rows = gap.split("\n")
        if self._line is not None:
            self._lines.append(self._with_comment(self._line, rows.pop(0)))
        for row in rows if atom is None else rows[:-1]:
            comment = row.strip()
            if comment:
                self.comments.append(comment)
                column = self._comment_column(len(row) - len(row.lstrip()), atom)
                if self._last is not None and _is_block_scalar(self._last.token):
                    # In the column of its lines it would be one of them.
                    column = min(column, self._last.base)
                self._lines.append(" " * column + comment)
            elif self._lines and self._lines[-1]:
                self._lines.append("")
        self._line = None

    def _with_comment(self, line: str, rest: str) -> str:
        comment = rest.strip()
        if not comment:
            return line.rstrip() if not line.strip() else line
        self.comments.append(comment)
        start = self._text.rfind("\n", 0, self._read) + 1
        column = self._read - start + len(rest) - len(rest.lstrip())
        return line.ljust(max(column, len(line) + 2)) + comment

    def _indent(self, atom: _Atom) -> int:
        """The column of an atom that begins a line."""
        if atom.depth:
            closes = isinstance(atom.token, _CLOSERS)
            # A bracket in the column of its key is refused by some parsers.
            return self._flow + _INDENT * max(1, atom.depth - closes)
        if atom.heads or not atom.blocks:
            return atom.base
        return atom.base + _INDENT

    def _inside(self, atom: _Atom) -> int:
        """The column of the further lines of an atom that does not begin its line."""
        return self._flow + _INDENT * atom.depth if atom.depth else atom.base + _INDENT

    def _comment_column(self, column: int, after: _Atom | None) -> int:
        """Where a comment goes: it moves with what follows, or with the block that it is in."""
        if after is not None and after.depth:
            return self._flow + _INDENT * after.depth
        blocks = self._last.blocks if self._last else ()
        if after is not None:
            closed = any(block not in after.blocks for block in blocks)
            if column == after.column or (column > after.column and not closed):
                return self._indent(after) + column - after.column
            if column < after.column:
                blocks = after.blocks
        return next((b.new + column - b.old for b in reversed(blocks) if b.old <= column), 0)


def _is_block_scalar(token: yaml.Token | None) -> bool:
    return isinstance(token, yaml.ScalarToken) and token.style in ("|", ">")


def _space(last: _Atom | None, atom: _Atom) -> str:
    """What is between two atoms of a line."""
    if last is None or isinstance(last.token, _OPENERS) or isinstance(atom.token, yaml.ValueToken):
        return ""
    closes = isinstance(atom.token, (*_CLOSERS, yaml.FlowEntryToken))
    return "" if closes and not isinstance(last.token, yaml.ValueToken) else " "


def _block_lines(content: Sequence[str], atom: _Atom) -> list[str]:
    """The lines below `|` or `>`, moved with their block."""
    header = content[0].partition("#")[0]
    digit = next((int(c) for c in header if c.isdigit()), None)
    # A list in the column of its key is none to the scanner.
    own = [block for block in atom.blocks if not block.bare]
    if digit is None:
        filled = next((line for line in content[1:] if line.strip(" ")), "")
        old, new = len(filled) - len(filled.lstrip(" ")), atom.base + _INDENT
    else:
        old, new = (own[-1].old if own else 0) + digit, atom.base + digit
    return [" " * new + line[old:] if line[old:] else "" for line in content[1:]]
