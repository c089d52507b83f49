"""The section `routes`: who is notified of an issue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, WithJsonSchema

from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.routing.matches import Match, covers
from tocsin.schemas.configuration.sections import Entry, GroupBy, GroupWait, RepeatInterval
from tocsin.schemas.configuration.values import NAME_PATTERN, Name, Names
from tocsin.schemas.records.issues import Severity

DEFAULT: Final = "default"

_NAMES: Final = {"type": "array", "items": {"type": "string", "pattern": NAME_PATTERN}}


def _by_severity(value: object) -> object:
    return {DEFAULT: value} if isinstance(value, list) else value


Notify = Annotated[
    Mapping[
        Literal["critical", "warning", "info", "default"],
        Annotated[tuple[str, ...], Field(strict=False)],
    ],
    BeforeValidator(_by_severity),
    WithJsonSchema(
        {
            "anyOf": [
                _NAMES,
                {
                    "type": "object",
                    "properties": dict.fromkeys(("critical", "warning", "info", DEFAULT), _NAMES),
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""Receivers by severity; a list is that of every severity."""


class RouteEntry(Entry):
    """Which receivers are notified of the issues that match.

    The routes are tried in their order. The first that matches decides alone, unless it has
    `also: true`: then the next ones are tried, too.
    """

    MATCHES = ("match",)

    name: Name | None = Field(default=None, examples=["vision"])
    """A name, for people."""
    match: Match = Field(
        default_factory=dict, examples=[{"team": "vision", "env": ["prod", "staging"]}]
    )
    """Labels that the run must have: each with a pattern (`*`, `?`) or a list of patterns. `run`,
    `rule` and `severity` are those of the issue. Absent: every issue."""
    notify: Notify = Field(examples=[{"critical": ["on-call", "chat"], "default": ["chat"]}])
    """Receivers by severity (`critical`, `warning`, `info`); `default` applies to severities that
    are not listed. A list alone applies to every severity."""
    also: bool = Field(default=False, examples=[True])
    """Whether the next routes are tried, too."""
    active: Names = Field(default=(), examples=["office-hours"])
    """Time windows; it notifies only while one of them is open."""
    mute: Names = Field(default=(), examples=["maintenance"])
    """Time windows; it does not notify while one of them is open."""
    group_by: GroupBy | None = Field(default=None, examples=[["run", "team"]])
    """What the issues of one message have in common; absent: `defaults.group_by`."""
    group_wait: GroupWait | None = Field(default=None, examples=["30s"])
    """How long the first issue of a group waits for others; absent: `defaults.group_wait`. Unit: a
    duration."""
    repeat_interval: RepeatInterval | None = Field(default=None, examples=["1h"])
    """How often to repeat a notice; absent: `defaults.repeat_interval`. Unit: a duration."""
    send_resolved: bool | None = Field(default=None, examples=[False])
    """Whether to notify when an issue resolves, too, whatever a receiver says of it; absent:
    `send_resolved` of the receiver, else `defaults.send_resolved`."""

    _listed: bool = PrivateAttr(default=False)

    def receivers(self, severity: Severity) -> Iterator[tuple[str, Loc]]:
        """Who is notified of an issue of this severity, each with its place in the file."""
        key: str = severity if severity in self.notify else DEFAULT
        return self._named(key)

    def named(self) -> Iterator[tuple[str, Loc]]:
        """All receivers that it names, each with its place in the file."""
        for key in self.notify:
            yield from self._named(key)

    def placed(self, loc: Loc, raw: object) -> None:
        """Note where it stands in the document, and how it was written there."""
        super().placed(loc, raw)
        self._listed = isinstance(raw, dict) and isinstance(raw.get("notify"), list)

    def _named(self, key: str) -> Iterator[tuple[str, Loc]]:
        names = next((names for severity, names in self.notify.items() if severity == key), ())
        for index, name in enumerate(names):
            inner = (index,) if self._listed else (key, index)
            yield name, (*self.loc, "notify", *inner)


def route_problems(routes: Sequence[RouteEntry]) -> Iterable[Problem]:
    """Routes that no issue can reach."""
    for index, route in enumerate(routes):
        for earlier in routes[:index]:
            if not earlier.also and covers(earlier.match, route.match):
                named = f" {earlier.name!r}" if earlier.name else ""
                message = f"no issue reaches this route: an earlier one{named} matches all of them"
                hint = "put it first, or add 'also: true' to the earlier one"
                yield Problem(route.loc, message, "unreachable_route", hint)
                break
