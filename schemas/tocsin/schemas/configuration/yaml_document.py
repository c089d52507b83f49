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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, NoReturn

import yaml
from pydantic import JsonValue

from tocsin.schemas.configuration.problems import PlacedProblem, split_lines

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


_ROOT: Final = ""


class Position(NamedTuple):
    """A place in a source: line and column count characters from 1."""

    line: int
    column: int


_START: Final = Position(1, 1)


@dataclass(slots=True)
class _Node:
    value: Plain
    position: Position
    key: Position | None = None
    last_line: int | None = None
    children: dict[str | int, _Node] = field(default_factory=dict)

    def attach(self, key: str | int, node: _Node) -> None:
        """Add a value; the keys of a list are its indices."""
        self.children[key] = node
        if isinstance(self.value, list):
            self.value.append(node.value)
        elif isinstance(self.value, dict):
            self.value[str(key)] = node.value


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
    problems: tuple[PlacedProblem, ...]
    complete: bool
    _root: _Node | None = field(repr=False, compare=False)

    def position(
        self, loc: Sequence[str | int], *, at: Literal["key", "value"] = "value"
    ) -> Position:
        """Where the value (or its key) stands; if there is none, the nearest that encloses it."""
        node, here = self._root, _START
        for part in (None, *loc):
            if part is not None:
                node = node.children.get(part) if node else None
            if node is None:
                return here
            here = node.key if at == "key" and node.key else node.position
        return here

    def lines(self, loc: Sequence[str | int]) -> range:
        """The lines of a value and its key, to the end of the source if reading ended in it."""
        node = self._root
        for part in loc:
            node = node.children.get(part) if node else None
        if node is None:
            return range(0)
        return range((node.key or node.position).line, (node.last_line or sys.maxsize - 1) + 1)


def load(text: str, *, source: str) -> Document:
    """Read one YAML document. Raises for nothing in the text: what is wrong is in `problems`."""
    composer = _Composer(source)
    composer.read(text)
    root = composer.top.children.get(_ROOT)
    return Document(
        source, root.value if root else None, tuple(composer.problems), composer.complete, root
    )


class _Stop(Exception):
    """Reading cannot go on; the problem was noted."""


class _Composer:
    """Makes nodes of the parser's events, each attached to its parent before it is filled: where
    reading ends early, all that was read is there.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[PlacedProblem] = []
        self.complete = False
        self.top = _Node({}, _START)
        self._events: Iterator[Any] = iter(())
        self._nodes = 0
        self._last_line = 1

    def read(self, text: str) -> None:
        try:
            self._check_bounds(text)
            self._events = yaml.parse(text, Loader=_LOADER)
            self._compose()
            self.complete = True
        except _Stop:
            pass
        except yaml.YAMLError as err:
            self._note_syntax(err, text)

    # -- bounds and syntax

    def _check_bounds(self, text: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as err:
            # Bytes that are not UTF-8 come in as lone surrogates (see `load_config`).
            self._fatal(
                _place_in(text, err.start), "encoding", "this is not UTF-8 text", "save it as UTF-8"
            )
        hidden = _HIDDEN_BREAK.search(text)
        if hidden:
            # YAML 1.1, and so PyYAML, begins a line there; YAML 1.2 and editors do not.
            message = (
                f"a character (U+{ord(hidden[0]):04X}) that some programs read as a line break"
            )
            hint = "remove it, or write it as an escape in double quotes"
            self._fatal(_place_in(text, hidden.start()), "syntax", message, hint)
        if size > MAX_BYTES:
            self._fatal(_START, "too_large", f"{size:,} bytes are over the limit of {MAX_BYTES:,}")
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
        place, message = _START, str(err)
        if isinstance(err, yaml.MarkedYAMLError):
            place = _place(err.problem_mark or err.context_mark)
            message = " ".join(filter(None, (err.problem, err.context)))
        elif bad := yaml.reader.Reader.NON_PRINTABLE.search(text):
            place = _place_in(text, bad.start())
            message = f"a character (U+{ord(bad[0]):04X}) that YAML does not allow"
        self._note(
            place,
            "syntax",
            f"not valid YAML: {message}",
            _syntax_hint(message, text, place),
            stop=False,
        )

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
            PlacedProblem(self.source, place.line, place.column, code, message, hint, hide_value)
        )
        if stop and len(self.problems) >= MAX_PROBLEMS:
            self._fatal(place, "too_many_problems", f"stopped after {MAX_PROBLEMS} problems")

    def _fatal(
        self,
        place: Position,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        hide_value: bool = False,
    ) -> NoReturn:
        self._note(place, code, message, hint, stop=False, hide_value=hide_value)
        raise _Stop

    # -- events

    def _compose(self) -> None:
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.NodeEvent):
                self._value(event, self.top, _ROOT, depth=0)
            elif isinstance(event, yaml.DocumentStartEvent):
                place, documents = _place(event.start_mark), documents + 1
                if documents > 1:
                    message = "expected one document in the file"
                    self._fatal(place, "documents", message, "remove the line '---'")
                if event.tags:
                    self._note(place, "tag", "tags are not allowed here", "remove the %TAG line")

    def _value(
        self,
        event: yaml.NodeEvent,
        parent: _Node,
        key: str | int,
        *,
        depth: int,
        key_place: Position | None = None,
    ) -> None:
        """Read a value, which becomes the parent's at `key`."""
        place = self._node_place(event)
        if not isinstance(event, yaml.CollectionStartEvent):
            self._last_line = _last_line_of(event) or place.line
            value = None
            if isinstance(event, yaml.ScalarEvent):
                value = self._scalar(event, place)
                if key_place and not event.value and event.implicit[0]:
                    place = key_place  # an empty value (`key:`) stands nowhere: point at its key
            parent.attach(key, _Node(value, place, key_place, self._last_line))
            return
        mapping = isinstance(event, yaml.MappingStartEvent)
        node = _Node({} if mapping else [], place, key_place)
        if depth >= MAX_DEPTH:
            self._fatal(place, "too_deep", f"nested deeper than {MAX_DEPTH} levels")
        parent.attach(key, node)
        number = 0
        while not isinstance(inner := next(self._events), yaml.CollectionEndEvent):
            if mapping:
                self._item(inner, node, depth=depth + 1)
            else:
                self._value(inner, node, number, depth=depth + 1)
            number += 1
        self._last_line = node.last_line = _last_line_of(inner) or self._last_line

    def _item(self, event: yaml.NodeEvent, node: _Node, *, depth: int) -> None:
        """Read a key and its value; of one that is refused only the problems count."""
        refused = _Node({}, _START)
        place = _place(event.start_mark)
        key = None
        if isinstance(event, yaml.CollectionStartEvent):
            if depth < MAX_DEPTH:
                self._note(place, "key", "expected text as a key, got a list or mapping")
            self._value(event, refused, _ROOT, depth=depth)
        else:
            self._node_place(event)
            self._last_line = _last_line_of(event) or place.line
            key = self._key(event, place, node)
        if key is not None:
            # A place for it, should its value not be read any more.
            node.children[key] = _Node(None, place, place)
        parent = refused if key is None else node
        self._value(next(self._events), parent, key or _ROOT, depth=depth, key_place=place)

    def _key(self, event: yaml.NodeEvent, place: Position, node: _Node) -> str | None:
        """The key; None where it is refused."""
        if not isinstance(event, yaml.ScalarEvent):
            return None
        key = self._scalar(event, place)
        if not isinstance(key, str):
            hint = f'"{_short(event.value)}"' if event.value else None
            self._note(place, "key", f"expected text as a key, got {kind_of(key)}", hint)
            return None
        earlier = node.children.get(key)
        if earlier is not None and earlier.key is not None:
            message = f"the key {_short(key)!r} is already set in line {earlier.key.line}"
            self._note(place, "duplicate_key", message, "keep one of them")
            return None
        if key == "<<":
            message = "merge keys (<<) are not allowed here"
            self._note(place, "merge_key", message, "write the keys out")
            return None
        return key

    def _node_place(self, event: yaml.NodeEvent) -> Position:
        """Where a node is, once what no node may have was noted."""
        place = _place(event.start_mark)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fatal(place, "too_many_nodes", f"more than {MAX_NODES:,} values")
        if isinstance(event, yaml.AliasEvent):
            message = f"aliases (*{_short(event.anchor)}) are not allowed here"
            hint = "write the value out; text that begins with * needs quotes"
            self._note(place, "alias", message, hint)
        elif event.anchor is not None:
            message = f"anchors (&{_short(event.anchor)}) are not allowed here"
            self._note(place, "anchor", message, "remove it")
        if tag := getattr(event, "tag", None):
            shown = _short(tag.replace("tag:yaml.org,2002:", "!!"))
            self._note(place, "tag", f"tags ({shown}) are not allowed here", "remove it")
        return place

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


def _place(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1) if mark else _START


def _syntax_hint(message: str, text: str, place: Position) -> str | None:
    """What to try after a syntax error; YAML names neither a tab nor the character that it met."""
    line = split_lines(text)[place.line - 1 :][:1]
    if "".join(line)[place.column - 1 :].startswith("\t"):
        return "indent with spaces"
    if "cannot start any token" in message or "scanning an a" in message:
        # @, ` or %; or * and & as the begin of an alias and an anchor.
        return "put the text in quotes"
    return None


def _place_in(text: str, index: int) -> Position:
    """The place of a character."""
    before = text[:index].replace("\r\n", "\n").replace("\r", "\n")
    return Position(before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def _last_line_of(event: yaml.Event) -> int | None:
    """The last line of what an event stands for; None for the end of a block.

    That stands, without any width, where the next value begins.
    """
    start, end = event.start_mark, event.end_mark
    if start is None or end is None or (start.line, start.column) == (end.line, end.column):
        return None
    # A text in several lines ends at the begin of the line after them.
    return int(end.line + (end.column > 0))


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
