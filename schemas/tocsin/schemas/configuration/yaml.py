"""A small YAML: 1.2 core scalars, positions kept, nothing that can surprise or explode.

The file is read from PyYAML's event stream (libyaml's where it is there), never through its
constructors: aliases are refused before they can be expanded. Size, lines and directives are
bounded before the parser sees the text, depth and node count while it reads: any text of
`MAX_BYTES` takes less than a second.

PyYAML itself follows YAML 1.1, where `no` is False, `12:30` is 750, `0o17` and `1e3` are text, and
it takes the last of two equal keys silently. Here scalars follow the core schema of YAML 1.2.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import yaml
from pydantic import JsonValue

from tocsin.schemas.configuration.problems import Problem, split_lines
from tocsin.schemas.configuration.yaml_places import (
    Position,
    allowed,
    last_line_of,
    place_in,
    start_of,
)

MAX_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 32
MAX_NODES: Final = 30_000
MAX_LINE: Final = 10_000
"""Characters of a line. YAML looks ahead within a line, so one of a MiB may cost minutes."""

MAX_DIRECTIVES: Final = 8
"""Lines that begin with `%`. libyaml compares each %TAG with all those before it."""

MAX_PROBLEMS: Final = 100
"""Reading ends after so many problems."""

Plain = JsonValue
"""What a document is made of: None, bool, int, float, str, lists and mappings with text keys."""

# libyaml's parser is about seven times as fast as the Python one; both give the same events.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL: Final = {
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_HIDDEN_BREAK: Final = re.compile("[\x85\u2028\u2029]")
_INT_LIMIT: Final = 2**63
_NUMBER_LENGTH: Final = 400


@dataclass(slots=True)
class _Node:
    value: Plain
    position: Position
    key: Position | None = None
    children: dict[str | int, _Node] | None = None
    last_line: int | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A source that was read.

    Attributes:
        source: its name, for messages.
        data: plain Python. Where a problem was found, the part that could be read, None in the
            place of what was refused.
        problems: what is wrong with it as YAML, in the order of reading.
        complete: False when reading had to end early (a syntax error, a bound): `data` is then a
            fragment.
    """

    source: str
    data: Plain
    problems: tuple[Problem, ...]
    complete: bool
    _root: _Node | None = field(repr=False, compare=False)

    def position(
        self, loc: Sequence[str | int], *, at: Literal["key", "value"] = "value"
    ) -> Position:
        """Where the value (or its key) stands; if there is none, the nearest that encloses it."""
        node, here = self._root, Position(1, 1)
        for part in (None, *loc):
            if part is not None:
                node = (node.children or {}).get(part) if node else None
            if node is None:
                return here
            here = node.key if at == "key" and node.key else node.position
        return here

    def lines(self, loc: Sequence[str | int]) -> range:
        """The lines of a value and its key, to the end of the source if reading ended in it."""
        node = self._root
        for part in loc:
            node = (node.children or {}).get(part) if node else None
        if node is None:
            return range(0)
        return range((node.key or node.position).line, (node.last_line or sys.maxsize - 1) + 1)


def load(text: str, *, source: str) -> Document:
    """Read one YAML document. Raises for nothing in the text: what is wrong is in `problems`."""
    reader = _Reader(source)
    reader.read(text)
    return Document(
        source,
        reader.root.value if reader.root else None,
        tuple(reader.problems),
        reader.complete,
        reader.root,
    )


class _Stop(Exception):
    """Reading cannot go on; the problem was noted."""


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read yet."""

    node: _Node
    mapping: bool
    is_key: bool
    key: str | None = None
    key_position: Position | None = None
    awaits_value: bool = False


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.root: _Node | None = None
        self.complete = False
        self._open: list[_Open] = []
        self._nodes = 0
        self._documents = 0
        self._last_line = 1

    def read(self, text: str) -> None:
        try:
            self._check_size(text)
            for event in yaml.parse(text, Loader=_LOADER):
                self._take(event)
            self.complete = True
        except _Stop:
            pass
        except yaml.YAMLError as err:
            self._note_syntax(err, text)
        if not self.complete:
            self._add_unread()

    # -- bounds and syntax

    def _check_size(self, text: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as err:
            # Bytes that are not UTF-8 come in as lone surrogates (see `load_config`).
            self._fatal(
                place_in(text, err.start), "encoding", "this is not UTF-8 text", "save it as UTF-8"
            )
        hidden = _HIDDEN_BREAK.search(text)
        if hidden:
            # YAML 1.1, and so PyYAML, begins a line there; YAML 1.2 and editors do not.
            message = f"a character (U+{ord(hidden[0]):04X}) that some take for a line break"
            hint = "remove it, or write it as an escape in double quotes"
            self._fatal(place_in(text, hidden.start()), "syntax", message, hint)
        if size > MAX_BYTES:
            message = f"{size:,} bytes are over the limit of {MAX_BYTES:,}"
            self._fatal(Position(1, 1), "too_large", message)
        directives = 0
        for number, line in enumerate(split_lines(text), 1):
            if len(line) > MAX_LINE:
                message = f"this line has {len(line):,} characters, over the limit of {MAX_LINE:,}"
                hint = "break it into several lines"
                self._fatal(Position(number, 1), "line_too_long", message, hint, hide_value=True)
            directives += line.startswith("%")
            if directives > MAX_DIRECTIVES:
                message = f"more than {MAX_DIRECTIVES} lines begin with %"
                self._fatal(Position(number, 1), "directives", message, "remove them")

    def _note_syntax(self, err: yaml.YAMLError, text: str) -> None:
        if isinstance(err, yaml.MarkedYAMLError):
            mark = err.problem_mark or err.context_mark
            place = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
            said = " ".join(filter(None, (err.problem, err.context)))
        elif isinstance(err, yaml.reader.ReaderError):
            bad = next((i for i, c in enumerate(text) if not allowed(c)), 0)
            place, said = (
                place_in(text, bad),
                f"a character (U+{ord(text[bad]):04X}) that YAML does not allow",
            )
        else:
            place, said = Position(1, 1), str(err)
        hint = "indent with spaces" if "\\t" in said or "cannot start any token" in said else None
        self._note(place, "syntax", f"not valid YAML: {said}", hint, stop=False)

    def _note(
        self,
        place: Position,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        stop: bool = True,
        hide_value: bool = False,
    ) -> None:
        self.problems.append(
            Problem(self.source, place.line, place.column, code, message, hint, hide_value)
        )
        if stop and len(self.problems) >= MAX_PROBLEMS:
            self._fatal(place, "too_many_problems", f"reading ended after {MAX_PROBLEMS} problems")

    def _fatal(
        self,
        place: Position,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        hide_value: bool = False,
    ) -> None:
        self._note(place, code, message, hint, stop=False, hide_value=hide_value)
        raise _Stop

    # -- events

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.NodeEvent):
            self._take_node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._last_line = last_line_of(event) or self._last_line
            closed = self._open.pop()
            closed.node.last_line = self._last_line
            if closed.is_key:
                self._begin_value(None, start_of(event))
            else:
                self._close_value()
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                hint = "remove the line '---'"
                self._fatal(start_of(event), "documents", "expected one document in the file", hint)
            if event.tags:
                self._note(
                    start_of(event), "tag", "tags are not allowed here", "remove the %TAG line"
                )

    def _take_node(self, event: yaml.NodeEvent) -> None:
        place = start_of(event)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fatal(place, "too_many_nodes", f"more than {MAX_NODES:,} values")
        if isinstance(event, yaml.AliasEvent):
            message = f"aliases (*{_short(event.anchor)}) are not allowed here"
            self._note(place, "alias", message, "write the value out")
        elif event.anchor is not None:
            message = f"anchors (&{_short(event.anchor)}) are not allowed here"
            self._note(place, "anchor", message, "remove it")
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "":
            shown = _short(tag.replace("tag:yaml.org,2002:", "!!"))
            self._note(place, "tag", f"tags ({shown}) are not allowed here", "remove it")
        if isinstance(event, yaml.CollectionStartEvent):
            self._open_collection(event, place)
            return
        self._last_line = last_line_of(event) or place.line
        if self._expects_key():
            self._take_key(event, place)
        else:
            value = self._scalar(event, place) if isinstance(event, yaml.ScalarEvent) else None
            place = self._value_place(event, place)
            self._add(_Node(value, place, last_line=self._last_line))
            self._close_value()

    def _open_collection(self, event: yaml.NodeEvent, place: Position) -> None:
        if len(self._open) >= MAX_DEPTH:
            self._fatal(place, "too_deep", f"nested deeper than {MAX_DEPTH} levels")
        mapping = isinstance(event, yaml.MappingStartEvent)
        node = _Node({} if mapping else [], place, children={})
        is_key = self._expects_key()
        if is_key:
            self._note(place, "key", "expected text as a key, got a list or mapping")
            self._begin_value(None, place)
        self._add(node)
        self._open.append(_Open(node, mapping, is_key))

    def _expects_key(self) -> bool:
        return bool(self._open) and self._open[-1].mapping and not self._open[-1].awaits_value

    def _take_key(self, event: yaml.NodeEvent, place: Position) -> None:
        key: Plain = None
        if isinstance(event, yaml.ScalarEvent):
            key = self._scalar(event, place)
            if not isinstance(key, str):
                hint = f'"{_short(event.value)}"' if event.value else None
                self._note(place, "key", f"expected text as a key, got {kind_of(key)}", hint)
        if not isinstance(key, str):
            self._begin_value(None, place)
            return
        earlier = (self._open[-1].node.children or {}).get(key)
        if earlier is not None and earlier.key is not None:
            message = f"the key {_short(key)!r} was given already in line {earlier.key.line}"
            self._note(place, "duplicate_key", message, "keep one of them")
            self._begin_value(None, place)
        elif key == "<<":
            self._note(
                place, "merge_key", "merge keys (<<) are not allowed here", "write the keys out"
            )
            self._begin_value(None, place)
        else:
            self._begin_value(key, place)

    def _begin_value(self, key: str | None, place: Position) -> None:
        """The next node is this key's value; None: it belongs nowhere, only its problems count."""
        top = self._open[-1]
        top.key, top.key_position, top.awaits_value = key, place, True

    def _add(self, node: _Node) -> None:
        if not self._open:
            self.root = node
            return
        top = self._open[-1]
        parent = top.node
        if isinstance(parent.value, list):
            assert parent.children is not None
            parent.children[len(parent.value)] = node
            parent.value.append(node.value)
        elif isinstance(parent.value, dict) and top.key is not None:
            assert parent.children is not None
            node.key = top.key_position
            parent.children[top.key] = node
            parent.value[top.key] = node.value

    def _add_unread(self) -> None:
        """Keys whose values were not read have a place, too."""
        for top in self._open:
            children = top.node.children
            if top.awaits_value and top.key and top.key_position and children is not None:
                unread = _Node(None, top.key_position, top.key_position)
                children.setdefault(top.key, unread)

    def _close_value(self) -> None:
        if self._open and self._open[-1].mapping:
            self._open[-1].awaits_value = False

    def _value_place(self, event: yaml.NodeEvent, place: Position) -> Position:
        """An empty value (`key:`) stands nowhere: point at its key."""
        empty = isinstance(event, yaml.ScalarEvent) and not event.value and event.implicit[0]
        top = self._open[-1] if self._open else None
        return top.key_position if empty and top and top.mapping and top.key_position else place

    # -- scalars

    def _scalar(self, event: yaml.ScalarEvent, place: Position) -> Plain:
        text: str = event.value
        if not event.implicit[0]:
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if text in _SPECIAL:
            return _SPECIAL[text]
        if _INT.fullmatch(text):
            number = (
                int(text, 0 if text[1:2] in "ox" else 10)
                if len(text) <= _NUMBER_LENGTH
                else _INT_LIMIT
            )
            if -_INT_LIMIT <= number < _INT_LIMIT:
                return number
            self._note(
                place, "number", "this number does not fit into 64 bits", "quote it if it is text"
            )
            return None
        if _FLOAT.fullmatch(text):
            value = float(text)
            if abs(value) != float("inf"):
                return value
            self._note(place, "number", "this number is too large", ".inf, or quotes if it is text")
            return None
        return text


def _short(text: str | None) -> str:
    text = text or ""
    if "://" in text:
        return "(an address)"
    return text if len(text) <= 60 else text[:60] + "…"


def kind_of(value: Plain) -> str:
    """The kind of a value, in words for messages."""
    names: dict[type, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
    }
    names |= {list: "a list", dict: "a mapping", type(None): "nothing"}
    return names[type(value)]
