"""Which lines of a configuration are never shown: those on which a secret may stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tocsin.schemas.configuration.problems import Loc, PlacedProblem, Problem
from tocsin.schemas.configuration.sources import Sources

_SECRET: Final[tuple[Loc, ...]] = (
    ("receivers",),
    ("secrets",),
    ("heartbeat",),
    ("bus", "sasl"),
)


def hide_lines(
    sources: Sources, placed: Iterable[PlacedProblem], problems: Iterable[Problem] = ()
) -> list[PlacedProblem]:
    """The problems by place. Only keys will be shown of a line that holds, or may hold, a secret.

    In flow style a line is shared: what is wrong beside a receiver would show the receiver, too.

    Args:
        sources: where receivers, secrets and log-in stand.
        placed: what is wrong.
        problems: what they were made of; the values of those that hide are hidden in all.
    """
    secret = [*_SECRET, *(problem.loc for problem in problems if problem.hide_value)]
    lines = [place for loc in dict.fromkeys(secret) for place in sources.lines(loc)]
    return [
        replace(problem, hide_value=True)
        if any(problem.source == source and problem.line in hidden for source, hidden in lines)
        else problem
        for problem in sorted(placed, key=sources.order)
    ]
