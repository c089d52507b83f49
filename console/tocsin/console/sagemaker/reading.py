"""Rule configurations in SageMaker Debugger's JSON, found wherever they may stand. Pure.

They come as a request of CreateTrainingJob (or its description), as a list, alone, or as its
libraries write them, a rule with the collections that it asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tocsin.schemas.configuration.problems import ConfigProblems, Loc, PlacedProblem
from tocsin.schemas.configuration.yaml_document import Document, Plain, kind_of, load

NOT_CONVERTED: Final = "not_converted"
"""The code of what is left out."""

_ESCAPES: Final = r"(?<!\\)((?:\\\\)*)"
_PAIR: Final = re.compile(
    _ESCAPES + r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_HALF: Final = re.compile(_ESCAPES + r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

_LISTS: Final = (
    "DebugRuleConfigurations",
    "ProfilerRuleConfigurations",
    # As the developer guide has it in one place.
    "DebugRulesConfigurations",
)
_ONE: Final = ("DebugRuleConfiguration", "ProfilerRuleConfiguration")
_OF_A_RULE: Final = frozenset({"RuleConfigurationName", "RuleParameters", "RuleEvaluatorImage"})
_EXPECTED: Final = (
    "expected rule configurations: a request of CreateTrainingJob, a list of them, or one, with "
    "RuleConfigurationName and RuleParameters"
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A mapping of the file, and the way to it."""

    loc: Loc
    data: Mapping[str, Plain]

    def text(self, key: str) -> str | None:
        """A text in it, if there is one that is not empty."""
        value = self.data.get(key)
        return value.strip() or None if isinstance(value, str) else None

    def inner(self, key: str) -> Placed:
        """A mapping in it; empty if there is none."""
        value = self.data.get(key)
        return Placed((*self.loc, key), value if isinstance(value, dict) else {})


@dataclass(slots=True)
class Found:
    """What a file has.

    Attributes:
        collections: each with `CollectionName` and `CollectionParameters`.
        hooks: `DebugHookConfig`s.
        profiler: the `ProfilerConfig`, or an empty one.
    """

    rules: list[Placed] = field(default_factory=list)
    collections: list[Placed] = field(default_factory=list)
    hooks: list[Placed] = field(default_factory=list)
    profiler: Placed = field(default_factory=lambda: Placed((), {}))


@dataclass(slots=True)
class Notes:
    """What could not be taken over, each with its place in the file."""

    document: Document
    found: list[PlacedProblem] = field(default_factory=list)

    def add(self, loc: Loc, message: str, hint: str | None = None) -> None:
        """Note something at a value."""
        line, column = self.document.position(loc, at="value")
        self.found.append(
            PlacedProblem(self.document.source, line, column, NOT_CONVERTED, message, hint)
        )

    def line(self, loc: Loc) -> int:
        """The line of a value."""
        return self.document.position(loc).line


def read_json(text: str, source: str) -> Document:
    """The file with the places of its values.

    Raises:
        ConfigProblems: it is no JSON; with line and column.
    """
    try:
        json.loads(text)
    except ValueError as error:
        line, column, message = 1, 1, str(error)
        if isinstance(error, json.JSONDecodeError):
            line, column, message = error.lineno, error.colno, error.msg
        comment = "//" in text.splitlines()[line - 1 : line][0][column - 1 :] if text else False
        hint = "JSON has no comments: remove this one" if comment else None
        problem = PlacedProblem(source, line, column, "syntax", f"not valid JSON: {message}", hint)
        raise ConfigProblems([problem], text) from None
    # Within JSON a tab is white space; YAML, which JSON is a part of, is read with places.
    document = load(_with_characters(text).replace("\t", " "), source=source)
    if document.problems:
        raise ConfigProblems(document.problems, text)
    return document


def _with_characters(text: str) -> str:
    """JSON writes what is beyond 16 bits as two escaped halves, which YAML refuses."""
    whole = _PAIR.sub(lambda m: m[1] + json.loads(f'"{m[2]}"'), text)
    return _HALF.sub(lambda m: m[1] + "\ufffd", whole)


def find(document: Document, text: str) -> Found:
    """The rule configurations in it, and what belongs to them.

    Raises:
        ConfigProblems: there are none, or something that should be a list is none.
    """
    found = Found()
    problems: list[PlacedProblem] = []

    def wrong(loc: Loc, message: str) -> None:
        line, column = document.position(loc)
        problems.append(PlacedProblem(document.source, line, column, "invalid_value", message))

    def listed(loc: Loc, value: Plain) -> Iterator[Placed]:
        if not isinstance(value, list):
            wrong(loc, f"expected a list, got {kind_of(value)}")
            return
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield Placed((*loc, index), item)
            else:
                wrong((*loc, index), f"expected a mapping, got {kind_of(item)}")

    def one(placed: Placed) -> None:
        wrapped = [placed.inner(key) for key in _ONE if key in placed.data]
        for rule in wrapped or [placed]:
            if _OF_A_RULE & set(rule.data):
                found.rules.append(rule)
            else:
                wrong(rule.loc, "expected RuleConfigurationName and RuleParameters here")
            collect(rule)
        if wrapped:
            collect(placed)

    def collect(placed: Placed) -> None:
        key = "CollectionConfigurations"
        if key in placed.data:
            found.collections.extend(listed((*placed.loc, key), placed.data[key]))

    data = document.data
    if isinstance(data, list):
        for item in listed((), data):
            one(item)
    elif isinstance(data, dict):
        top = Placed((), data)
        if _OF_A_RULE & set(data) or any(key in data for key in _ONE):
            one(top)
        else:
            collect(top)
        for key in _LISTS:
            if key in data:
                for item in listed((key,), data[key]):
                    one(item)
        if "DebugHookConfig" in data:
            hook = top.inner("DebugHookConfig")
            found.hooks.append(hook)
            collect(hook)
        found.profiler = top.inner("ProfilerConfig")
        if not found.rules and not problems:
            wrong((), _EXPECTED)
    else:
        wrong((), f"{_EXPECTED}; got {kind_of(data)}")
    if problems:
        raise ConfigProblems(problems, text)
    return found


def renamed(placed: Placed, **values: Plain) -> Placed:
    """The mapping with other values."""
    return replace(placed, data={**placed.data, **values})
