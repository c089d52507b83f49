"""The launcher's few lines for people: pure text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tocsin.emitter.summary import Summary
from tocsin.schemas.control import (
    StopAcknowledged,
    StopEscalated,
    StopExited,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.deliveries import Delivery
from tocsin.schemas.events import Data
from tocsin.schemas.issues import SHORT_ID, Issue, gravest
from tocsin.schemas.text import plain_line

PREFIX = "tocsin: "


def issue_line(issue: Issue) -> str:
    """One line: severity, rule, where first, why."""
    if issue.state == "resolved":
        return plain_line(f"resolved: {issue.rule}: {issue.reason}")
    where = []
    if issue.first_step is not None:
        where.append(f"step {issue.first_step:,}")
    if issue.first_rank is not None and issue.world_size > 1:
        where.append(f"rank {issue.first_rank}")
    where.append(issue.subject.name)
    line = f"{issue.severity}: {issue.rule} at {', '.join(where)}: {issue.reason}"
    if issue.consequence_of is not None:
        line += f" (a consequence of {issue.consequence_of[:SHORT_ID]})"
    return plain_line(line)


def delivery_line(delivery: Delivery) -> str | None:
    """What became of a notice; None while nothing has, and for stops: those have their own."""
    if not delivery.final or delivery.kind == "stop":
        return None
    about = f"{delivery.rule} -> {delivery.action}: {delivery.state} ({delivery.reason})"
    return f"  {plain_line(about)}"


def stop_line(data: Data, *, command: StopRequested | None = None) -> str | None:
    """How a stop goes on; None for what needs no line. `command` is the one that is obeyed."""
    match data:
        case StopAcknowledged():
            person = "" if command is None else asked_by(command)
            reason = "" if command is None else plain_line(command.reason)
            return f"  stopping the job{f', asked by {person}' if person else ''}: {reason}"
        case StopEscalated():
            return f"  {data.how} to the job: {plain_line(data.reason)}"
        case StopExited(how="itself"):
            return f"  the job had ended by itself with {data.exit_code} when the stop came"
        case StopExited():
            how = "at an edge of its loop" if data.how == "edge" else f"by {data.how}"
            return f"  the job is stopped: it left {how}"
        case StopRefused():
            return f"a stop was refused ({data.why}): {plain_line(data.reason)}"
        case _:
            return None


def asked_by(command: StopRequested) -> str:
    """Who asked for a stop, where it was a person; empty where an issue did."""
    return "" if command.issue_id is not None else plain_line(command.requested_by) or "somebody"


def end_line(summary: Summary, *, unsaid: int = 0, again: Sequence[str] = ()) -> str:
    """`1,200 steps watched, 1 issue, overhead 0.3 %; tocsin why 1a2b3c4d`.

    A person's stop is said again; that of an issue decides which issue is pointed to.

    Args:
        summary: what is to be summed up.
        unsaid: how many records of the launcher's own were not sent.
        again: options with which another command finds the same bus.
    """
    steps, issues, capture = summary.steps, summary.issues, summary.capture
    stop = None if summary.stop is None else summary.stop.command
    watched = "no training seen" if steps == 0 else f"{_count(steps, 'step')} watched"
    line = f"{watched}, {_count(len(issues), 'issue')}"
    if capture is not None and steps:
        line += f", overhead {capture.overhead_percent:.1f} %"
        if capture.dropped:
            line += f", {_count(capture.dropped, 'record')} dropped"
    if unsaid:
        line += f", {_count(unsaid, 'record')} of the launcher not sent"
    if stop is not None and (person := asked_by(stop)):
        line += f", stopped by {person}: {plain_line(stop.reason)}"
    stopping = [issue for issue in issues if stop is not None and issue.issue_id == stop.issue_id]
    if (told := gravest(stopping or issues)) is not None:
        line += f"; {shlex.join(['tocsin', 'why', told.short_id, *again])}"
    return line


def left_over_line(
    open_deliveries: Sequence[Delivery], ended: bool, drain_s: float, bus_url: str
) -> str:
    """What was not done when the drain was over, and how to finish it."""
    if not ended:
        how = (
            f"`tocsin rules --bus {bus_url}` goes on with it"
            if bus_url.startswith("embedded:")
            else f"look whether `tocsin rules` runs on {bus_url}"
        )
        return f"the rules have not seen the end of this run within {drain_s:g} s; {how}"
    names = plain_line(", ".join(sorted({delivery.action for delivery in open_deliveries})))
    count = _count(len(open_deliveries), "delivery", "deliveries")
    what = f"{count} not final ({names})" if open_deliveries else "deliveries may be left"
    return f"{what} after {drain_s:g} s; `tocsin actions --bus {bus_url}` finishes what is left"


def unheard_line(command: Sequence[str]) -> str:
    """The hook never spoke, though the job ran."""
    interpreter = interpreter_of(command)
    who = interpreter or "if it runs python, that"
    line = (
        f"nothing was heard from the job: {who} lacks tocsin's hook (-I, -E and -S leave it out, "
        "and so does an environment without our PYTHONPATH); try without that, or "
        "tocsin.emitter.start() in the script"
    )
    return line if interpreter else f"{line}. A program that is no python is watched from outside"


def unwatched_line(reason: str) -> str:
    """Loud: nobody watches."""
    return f"NOT WATCHING: {plain_line(reason)}; the job runs without tocsin"


def interpreter_of(command: Sequence[str]) -> str | None:
    """The interpreter that CMD seems to use, from its name or the script's first line."""
    name = Path(command[0]).name
    if name.startswith(("python", "pypy")):
        return command[0]
    try:
        with open(command[0], "rb") as file:
            first = file.readline(200)
    except OSError:
        return None
    if first.startswith(b"#!") and b"python" in first:
        return plain_line(first[2:].decode(errors="replace"))
    return None


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
