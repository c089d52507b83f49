"""The section `inhibit`: issues that explain others, which then notify nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.configuration.routing.matches import Match
from tocsin.schemas.configuration.sections import Entry
from tocsin.schemas.configuration.values import Name


class InhibitEntry(Entry):
    """While an issue that fits `when` is open, those of its run that fit `mute` notify nobody.

    They are recorded anyway, and may stop their run.
    """

    MATCHES = ("when", "mute")

    name: Name | None = Field(default=None, examples=["nan-explains-rest"])
    """A name, for people."""
    when: Match = Field(examples=[{"rule": "nonfinite"}])
    """What the open issue must match; keys as in the `match` of a route."""
    mute: Match = Field(examples=[{"rule": ["loss_spike", "vanishing_gradient"]}])
    """What the issues must match that are muted meanwhile."""
    equal: tuple[str, ...] = Field(default=("run",), strict=False, examples=[["run"]])
    """Keys whose values must be equal in both issues. `run` is one of them: issues of other runs
    explain nothing."""


def inhibit_problems(entries: Sequence[InhibitEntry]) -> Iterator[Problem]:
    """Inhibitions that are not what they look like."""
    for entry in entries:
        if "run" not in entry.equal:
            message = "expected 'run' in the list: only issues of the same run are compared"
            yield Problem((*entry.loc, "equal"), message, hint="[run]")
        for key in ("when", "mute"):
            if not getattr(entry, key):
                message = "expected at least one key: this would match every issue"
                yield Problem((*entry.loc, key), message, hint="{rule: nonfinite}")
