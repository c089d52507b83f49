"""Which lines of a configuration are never shown: those on which a secret may stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tocsin.schemas.configuration.document import Document
from tocsin.schemas.configuration.problems import Loc, PlacedProblem, Problem

_SECRET: Final[tuple[Loc, ...]] = (("receivers",), ("secrets",), ("bus", "sasl"))


def hide_lines(
    document: Document, placed: Iterable[PlacedProblem], problems: Iterable[Problem] = ()
) -> list[PlacedProblem]:
    """The problems by place. Only keys will be shown of a line that holds, or may hold, a secret.

    In flow style a line is shared: what is wrong beside a receiver would show the receiver, too.

    Args:
        document: where receivers, secrets and log-in stand.
        placed: what is wrong.
        problems: what they were made of; the values of those that hide are hidden in all.
    """
    secret = [*_SECRET, *(problem.loc for problem in problems if problem.hide_value)]
    lines = [document.lines(loc) for loc in dict.fromkeys(secret)]
    return [
        replace(problem, hide_value=True)
        if any(problem.line in hidden for hidden in lines)
        else problem
        for problem in sorted(placed, key=lambda problem: (problem.line, problem.column))
    ]
