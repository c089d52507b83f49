"""The launcher's few lines for people: pure text."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from tocsin.emitter.launch.summary import Summary
from tocsin.emitter.plan.collections import FLOOR
from tocsin.emitter.process.isolation import switched_off
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.deliveries import STOPPED, Delivery
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.issues import SHORT_ID, Issue, gravest, root_of
from tocsin.schemas.records.runs import CaptureFigures
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopEscalated,
    StopExited,
    StopExpired,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.text import counted, number_text, plain_line, share_text, time_text

PREFIX = "tocsin: "


def issue_line(issue: Issue, cause: Issue | None = None) -> str:
    """One line: severity, rule, where first, why. `cause` is the issue that it follows from."""
    if issue.state == "resolved":
        return plain_line(f"resolved: {issue.rule} ({issue.subject.name}) no longer fires")
    where = []
    if issue.first_step is not None:
        where.append(f"step {issue.first_step:,}")
    if issue.first_rank is not None and issue.world_size > 1:
        where.append(f"rank {issue.first_rank}")
    where.append(issue.subject.name)
    line = f"{issue.severity}: {issue.rule} at {', '.join(where)}: {issue.reason}"
    if cause is not None:
        since = "" if cause.first_step is None else f" at step {cause.first_step:,}"
        line += f" (a consequence of {cause.rule}{since})"
    return plain_line(line)


def delivery_line(delivery: Delivery) -> str | None:
    """What became of a notice, or why a stop is not sent (now); None while there is nothing."""
    if delivery.waits_for_people and delivery.approval is not None:
        until = time_text(delivery.approval.until_ms)
        command = f"tocsin approve {delivery.delivery_id[:SHORT_ID]}"
        then = "stopped" if delivery.approval.on_timeout == "stop" else "not stopped"
        return f"  stop the job? `{command}` stops it; without an answer until {until} it is {then}"
    if not delivery.final or (delivery.occasion == STOPPED and delivery.state == "delivered"):
        return None
    if delivery.kind == "stop":
        return f"  not stopped: {plain_line(delivery.reason)}" if delivery.held else None
    about = f"{delivery.rule} -> {delivery.action}: {delivery.state} ({delivery.reason})"
    return f"  {plain_line(about)}"


def refused_line(refused: ConfigurationRefused) -> str:
    """The configuration has changed, and cannot be used."""
    more = len(refused.problems) - 1 + refused.more
    also = f" ({more:,} more: tocsin check)" if more else ""
    first = plain_line(refused.problems[0])
    return f"new configuration refused, the old one stays in effect: {first}{also}"


def stop_line(
    data: Data, *, command: StopRequested | None = None, step: int | None = None
) -> str | None:
    """The progress of a stop; None for what needs no line.

    `command` is the one that is obeyed, `step` the last that the ranks made.
    """
    match data:
        case StopAcknowledged():
            person = "" if command is None else requested_by(command)
            reason = "" if command is None else plain_line(command.reason)
            return f"  stopping the job{f', requested by {person}' if person else ''}: {reason}"
        case StopEscalated():
            return f"  {data.how} to the job: {plain_line(data.reason)}"
        case StopExited(how="itself"):
            return f"  the job had already exited with code {data.exit_code} when the stop arrived"
        case StopExited():
            cleanly = "cleanly" if step is None else f"cleanly after step {step:,}"
            return f"  job stopped {cleanly if data.how == 'edge' else f'by {data.how}'}"
        case StopRefused():
            return f"stop refused ({data.why}): {plain_line(data.reason)}"
        case StopExpired():
            return f"stop expired: {plain_line(data.reason)}"
        case _:
            return None


def requested_by(command: StopRequested) -> str:
    """Who asked for a stop, where it was a person; empty where an issue did."""
    return "" if command.issue_id is not None else plain_line(command.requested_by) or "somebody"


def end_line(
    summary: Summary,
    *,
    unsent: int = 0,
    again: Sequence[str] = (),
    unwatched: Mapping[str, Collection[int]] | None = None,
) -> str:
    """`1,200 steps watched, 1 issue, overhead 0.3 %; tocsin why 1a2b3c4d`.

    A person's stop is repeated; that of an issue decides which issue is pointed to. Steps that no
    rule has seen are never counted as watched.

    Args:
        summary: what is to be summed up.
        unsent: how many records of the launcher's own were not sent.
        again: options with which another command finds the same bus.
        unwatched: kinds of trainings that were not watched, and the processes in which they were.
    """
    steps, issues, capture = summary.steps, summary.issues, summary.capture
    stop = None if summary.stop is None else summary.stop.command
    found = counted(len(issues), "issue")
    if steps == 0:
        line = f"no training seen, {found}"
    elif summary.judged_steps >= steps:
        line = f"{counted(steps, 'step')} watched, {found}"
    elif summary.judged_steps == 0 and not issues:
        line = f"{counted(steps, 'step')} recorded, none checked: no rules worker has read them"
    else:
        checked = f"only {summary.judged_steps:,} checked by rules"
        line = f"{counted(steps, 'step')} recorded, {checked}, {found}"
    if capture is not None and steps:
        line += f", {overhead(capture)}"
        if capture.dropped:
            line += f", {counted(capture.dropped, 'record')} dropped"
        if capture.not_watched:
            line += f"; not watched: {plain_line(', '.join(capture.not_watched))}"
    if unsent:
        line += f", {counted(unsent, 'launcher record')} not sent"
    if unwatched:
        line += f", not watched: {', '.join(_unwatched(*each) for each in unwatched.items())}"
    if stop is not None and (person := requested_by(stop)):
        line += f", stopped by {person}: {plain_line(stop.reason)}"
    goodput = summary.goodput
    if goodput is not None and goodput.incarnations > 1 and goodput.share is not None:
        share = share_text(100 * goodput.share)
        line += f", {share} % productive over {goodput.incarnations:,} incarnations"
    if summary.saved is not None and summary.saved.device_hours:
        line += f", saved {summary.saved.text}"
    stopping = [issue for issue in issues if stop is not None and issue.issue_id == stop.issue_id]
    if (worst := gravest(stopping or issues)) is not None:
        line += f"; {shlex.join(['tocsin', 'why', root_of(worst, issues).short_id, *again])}"
    return line


SHORT_STEP_S: Final = 0.004
"""Steps below which the budget is 20 µs each, and summaries come less often for it."""


def overhead(capture: CaptureFigures) -> str:
    """What watching has cost: `overhead 0.3 %`, of a short run `overhead 0.4 s`.

    Of short steps, how often they are looked at, too: `steps of 2 ms: capture thinned to 1 step in
    20, gradients summarised every 500 steps`.
    """
    cost = f"overhead {capture.overhead_text}"
    step_s, thinned = capture.step_s, []
    if (looks := capture.intervals.get("steps", 1)) > 1:
        thinned.append(f"capture thinned to 1 step in {looks}")
    every = capture.intervals.get("gradients", 0)
    if step_s is not None and step_s < SHORT_STEP_S and every > FLOOR["gradients"]:
        thinned.append(f"gradients summarised every {every:,} steps")
    if step_s is None or not thinned:
        return cost
    step_ms = number_text(float(f"{1e3 * step_s:.1g}"))
    return f"{cost} (steps of {step_ms} ms: {', '.join(thinned)})"


def switched_off_lines(figures: CaptureFigures, reported: set[str]) -> list[str]:
    """A line for each part of capture that is off and not in `reported` yet; it is from now on."""
    lines = []
    for text in figures.degraded:
        probe, _, reason = text.partition(": ")
        if probe in figures.not_watched and probe not in reported:
            reported.add(probe)
            lines.append(plain_line(switched_off(probe, reason)))
    return lines


def _unwatched(kind: str, pids: Collection[int]) -> str:
    match kind:
        case "child":
            return f"trainings in {counted(len(pids), 'child process', 'child processes')}"
        case "thread":
            return "trainings in further threads"
        case _:
            return "a training without steps of a torch.optim.Optimizer"


def left_over_line(
    open_deliveries: Sequence[Delivery],
    ended: bool,
    drain_s: float,
    bus_url: str,
    again: Sequence[str] = (),
) -> str:
    """What was not done when the drain was over, and how to finish it.

    `again` are options with which another command finds the same configuration and bus.
    """
    options = [*again, *(() if "--bus" in again else ("--bus", bus_url))]
    if not ended:
        how = (
            f"run `{shlex.join(['tocsin', 'rules', *options])}` to finish it"
            if bus_url.startswith("embedded:")
            else f"check that `tocsin rules` is running on {bus_url}"
        )
        return f"the rules did not finish reading this run within {drain_s:g} s; {how}"
    names = plain_line(", ".join(sorted({delivery.action for delivery in open_deliveries})))
    count = counted(len(open_deliveries), "delivery", "deliveries")
    what = f"{count} pending ({names})" if open_deliveries else "deliveries may be pending"
    command = shlex.join(["tocsin", "actions", *options])
    return f"{what} after {drain_s:g} s; to finish, run `{command}`"


def unjudged_line(bus_url: str, seconds: float, log: Path | None) -> str:
    """Nobody judges the run, though it is recorded. `log` is that of the run's own helper."""
    if log is not None:
        return (
            f"RULES NOT RUNNING: this run's rules have not reported for {seconds:.0f} s; the run "
            f"is recorded, but no issue is reported and no stop is sent (see {log})"
        )
    return (
        f"RULES NOT RUNNING: no rules worker has reported on this run for {seconds:.0f} s; the run "
        f"is recorded, but no issue is reported and no stop is sent until `tocsin rules` runs on "
        f"{bus_url}"
    )


def unheard_line(command: Sequence[str]) -> str:
    """The hook never spoke, though the job ran."""
    interpreter = interpreter_of(command)
    who = interpreter or "its Python, if it has one,"
    line = (
        f"no data from the job: {who} runs without tocsin's hook (`-I`, `-E`, `-S` and an "
        "environment without tocsin's PYTHONPATH disable it); remove the cause, or call "
        "tocsin.emitter.start() in the script"
    )
    if interpreter:
        return line
    return f"{line}. Programs other than Python are monitored from outside only (CPU, memory, GPU)"


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
