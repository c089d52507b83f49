"""The picture of `tocsin watch`: what is known, the time and a size in, lines of text out.

It fits into the height by leaving out the least important first: older deliveries and issues, what
is said of runs beyond one line, runs that have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from tocsin.console.views.issues import SEVERITY_STYLE, first_seen
from tocsin.console.views.status import ago
from tocsin.console.watch.layout import Plan, fit
from tocsin.console.watch.run_rows import detail_line, run_lines
from tocsin.console.watch.state import WatchState
from tocsin.console.watch.text import Line, Piece, cut, fields, squeezed
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.text import plain_line

STALE_MS: Final = 60_000
"""A run that goes on although no rules worker has told of it for so long."""

_DELIVERY: Final = {
    "pending": "yellow", "delivered": "green", "rejected": "bold red", "expired": "bold red",
    "suppressed": "dim",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """Lines that fit a size; something that rich can show."""

    lines: tuple[Line, ...]

    @property
    def plain(self) -> str:
        """The text without colours."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich asks for it."""
        for line in self.lines:
            for piece in line:
                yield Segment(piece.text, console.get_style(piece.style) if piece.style else None)
            yield Segment.line()


@dataclass(frozen=True, slots=True)
class Situation:
    """What is shown beside the records: which bus, and what is wrong with it, if anything."""

    bus_url: str
    trouble: str | None = None


def draw(state: WatchState, situation: Situation, *, now_ms: int, width: int, height: int) -> Frame:
    """The whole picture, at most `height` lines of at most `width` cells."""
    runs = state.ordered_runs()
    issues, deliveries = state.view.issues[::-1], state.view.deliveries[::-1]
    foot = _foot(state, now_ms)
    running = sum(run.seen.running for run in runs)
    plan = fit(
        Plan(
            runs=len(runs),
            running=running,
            issues=len(issues),
            deliveries=len(deliveries),
            fixed=1 + (situation.trouble is not None) + bool(foot),
        ),
        height,
    )
    # Of one run alone nobody needs to be told which one it is.
    run_width = max(10, width // 4) if len(runs) > 1 else 0
    lines: list[Line] = [_head(state, situation, running, len(runs) - running, now_ms, width)]
    if situation.trouble is not None:
        lines.append((Piece(plain_line(situation.trouble), "bold red"),))
    if not runs:
        lines.append((Piece(_nothing(state, situation)),))
    else:
        shown = runs[: plan.run_rows]
        head, *rows = run_lines(shown, width=width, now_ms=now_ms)
        lines.append(head)
        for run, row in zip(shown, rows, strict=True):
            lines.append(row)
            if plan.details == "all" or (plan.details == "running" and run.seen.running):
                lines.append(detail_line(run, now_ms))
        lines += _more(len(runs) - len(shown), "run")
    if plan.issue_rows or not issues:
        lines += [()] * plan.spaces
        lines += _issues(issues, plan, now_ms, width, run_width)
    if plan.delivery_rows or not deliveries:
        lines += [()] * plan.spaces
        lines += _deliveries(deliveries, plan, now_ms, width, run_width)
    if foot:
        lines.append((Piece(foot, "yellow"),))
    return Frame(tuple(cut(line, width) for line in lines[:height]))


def _head(
    state: WatchState, situation: Situation, running: int, ended: int, now_ms: int, width: int
) -> Line:
    left = "tocsin watch" + (f" {state.view.run_id}" if state.view.run_id else "")
    counts = f"{running} running, {ended} ended"
    room = width - cell_len(left) - len(counts) - 6
    url = plain_line(situation.bus_url)
    if cell_len(url) > room:
        # The end of a path says more than its beginning.
        url = "…" + url[len(url) - max(0, room - 1) :] if room > 8 else ""
    middle = set_cell_size(f"   {url}", max(0, width - cell_len(left) - len(counts)))
    return (Piece(left, "bold"), Piece(middle, "dim"), Piece(counts, "bold"))


def _nothing(state: WatchState, situation: Situation) -> str:
    run_id = state.view.run_id
    if run_id is not None:
        return f"no run {run_id} yet; waiting for: tocsin run --run-id {run_id} -- …"
    waiting = "no runs yet; waiting for: tocsin run -- python train.py"
    # There it is a worker that tells of runs, and nobody sees that it is missing.
    return waiting if situation.bus_url.startswith("embedded:") else f"{waiting}, and tocsin rules"


def _foot(state: WatchState, now_ms: int) -> str:
    parts = []
    stale = [
        run
        for run in state.ordered_runs()
        if run.seen.running and run.progress.heard_ms > now_ms - STALE_MS // 2
        if run.progress.heard_ms - max(run.seen.view_ms, run.seen.started_ms) > STALE_MS
    ]
    if stale:
        parts.append(
            f"{stale[0].seen.run_id} goes on, but no rules worker has told of it for a minute: "
            "does 'tocsin rules' run?"
        )
    if unread := state.view.unread:
        plural = "s" if unread > 1 else ""
        parts.append(f"{unread:,} record{plural} could not be read: of another release?")
    return "  ".join(parts)


def _issues(
    issues: Sequence[IssueFiring], plan: Plan, now_ms: int, width: int, run_width: int
) -> list[Line]:
    if not issues:
        return [(Piece("issues", "bold"), Piece("  none so far", "dim"))]
    states = Counter("resolved" if issue.state == "resolved" else "open" for issue in issues)
    counts = ", ".join(f"{states[name]} {name}" for name in ("open", "resolved") if states[name])
    lines: list[Line] = [(Piece("issues", "bold"), Piece(f"  {counts}", "dim"))]
    shown = issues[: plan.issue_rows]
    rows = [
        (
            Piece(ago(issue.onset_ms, now_ms).removesuffix(" ago"), "dim"),
            Piece(
                issue.severity,
                "dim" if issue.state == "resolved" else SEVERITY_STYLE[issue.severity],
            ),
            Piece(plain_line(issue.rule), "bold"),
            Piece(squeezed(issue.run_id, run_width)),
            Piece(first_seen(issue)),
            Piece("resolved" if issue.state == "resolved" else "", "green"),
        )
        for issue in shown
    ]
    widths = (8, 8, max(12, width // 4), run_width, 18, 8)
    for issue, line in zip(shown, fields(rows, widths), strict=True):
        reason = plain_line(issue.reason)
        if plan.reasons:
            lines += [line, (Piece(f"    {reason}"),)]
        else:
            lines.append((*line, Piece(f"  {reason}")))
    return lines + _more(len(issues) - len(shown), "issue")


def _deliveries(
    deliveries: Sequence[Delivery], plan: Plan, now_ms: int, width: int, run_width: int
) -> list[Line]:
    if not deliveries:
        return [(Piece("deliveries", "bold"), Piece("  none so far", "dim"))]
    states = Counter[str](delivery.state for delivery in deliveries)
    counts = ", ".join(f"{states[name]} {name}" for name in _DELIVERY if states[name])
    lines: list[Line] = [(Piece("deliveries", "bold"), Piece(f"  {counts}", "dim"))]
    shown = deliveries[: plan.delivery_rows]
    rows = [
        (
            Piece(ago(delivery.updated_ms, now_ms).removesuffix(" ago"), "dim"),
            Piece(delivery.state, _DELIVERY[delivery.state]),
            Piece(plain_line(delivery.action), "bold"),
            Piece(plain_line(delivery.rule)),
            Piece(squeezed(delivery.run_id, run_width)),
            Piece(plain_line(_what(delivery, now_ms))),
        )
        for delivery in shown
    ]
    widths = (8, 10, max(10, width // 5), max(12, width // 4), run_width, width)
    lines += fields(rows, widths)
    return lines + _more(len(deliveries) - len(shown), "delivery")


def _what(delivery: Delivery, now_ms: int) -> str:
    """Why it is in its state; of a pending notice when it is tried next."""
    # A stop that is pending waits for the job; when to give up is not of interest.
    if delivery.next_attempt_ms is None or delivery.final or delivery.kind == "stop":
        return delivery.reason
    wait_s = max(0, delivery.next_attempt_ms - now_ms + 999) // 1000
    return f"attempt {delivery.attempts + 1} in {wait_s} s: {delivery.reason}"


def _more(count: int, what: str) -> list[Line]:
    if count <= 0:
        return []
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return [(Piece(f"… and {count:,} more {what if count == 1 else plural}", "dim"),)]
