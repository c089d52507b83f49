"""Command lines of tocsin as text: whether they are ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from typer.main import get_command

from tocsin.console.__main__ import app


@cache
def program() -> Any:
    """The program `tocsin`; it takes a tenth of a second to make."""
    return get_command(app)


def parse(words: Sequence[str]) -> None:
    """Raises what click does if these words behind `tocsin` are no command line of it."""
    ours, dashes, job = list(words), [], []
    if "--" in ours:
        at = ours.index("--")
        ours, dashes, job = ours[:at], ["--"], ours[at + 1 :] or ["train"]
    command = program()
    context = command.make_context("tocsin", ours[:1], resilient_parsing=True)
    # A group such as `bus dlq` may be a command, too.
    while hasattr(command, "commands") and ours and not ours[0].startswith("-"):
        command = command.commands[ours.pop(0)]
    command.make_context("tocsin", [*ours, *dashes, *job], parent=context)


def parse_exactly(words: Sequence[str]) -> None:
    """As `parse`, of words that are run as they stand: a group alone, or `--` without a job, is no
    command line."""
    command = program()
    context = command.make_context("tocsin", [words[0]], resilient_parsing=True)
    rest = list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context("tocsin", rest, parent=context)
