"""The picture of `tocsin watch`: what is known, the time and a size in, lines of text out.

It fits into the height by leaving out the least important first: older deliveries and issues, what
is shown of runs beyond one line, runs that have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tocsin.console.views.issues import SEVERITY_STYLE, first_seen
from tocsin.console.views.status import ago
from tocsin.console.watch.layout import Plan, fit
from tocsin.console.watch.run_rows import detail_line, run_lines
from tocsin.console.watch.state import WatchedRun, WatchState
from tocsin.console.watch.text import grid, squeezed
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line

STALE_MS: Final = 60_000
"""A run that goes on although no rules worker has reported on it for that long."""

_DELIVERY: Final = {
    "pending": "yellow", "delivered": "green", "rejected": "bold red", "expired": "bold red",
    "suppressed": "dim",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """Lines that fit a size; something that rich can show."""

    lines: tuple[Text, ...]

    @property
    def plain(self) -> str:
        """The text without colours."""
        return "\n".join(line.plain.rstrip() for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich asks for it."""
        yield from self.lines


@dataclass(frozen=True, slots=True)
class Situation:
    """What is shown beside the records: which bus, and what is wrong with it, if anything."""

    bus_url: str
    trouble: str | None = None


def draw(state: WatchState, situation: Situation, *, now_ms: int, width: int, height: int) -> Frame:
    """The whole picture, at most `height` lines of at most `width` cells."""
    runs = state.ordered_runs()
    issues, deliveries = state.view.issues[::-1], state.view.deliveries[::-1]
    foot = _foot(state, runs, now_ms)
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
    # Of one run alone nobody needs to know which one it is.
    run_width = max(10, width // 4) if len(runs) > 1 else 0
    lines = [_head(state, situation, running, len(runs) - running, width)]
    if situation.trouble is not None:
        lines.append(Text(plain_line(situation.trouble), "bold red"))
    if not runs:
        lines.append(Text(_nothing(state, situation)))
    else:
        shown = runs[: plan.run_rows]
        head, *rows = run_lines(shown, width=width, now_ms=now_ms)
        lines.append(head)
        for number, (run, row) in enumerate(zip(shown, rows, strict=True)):
            lines += [row, detail_line(run, now_ms)] if number < plan.details else [row]
        lines += _more(len(runs) - len(shown), "run")
    if plan.issue_rows or not issues:
        lines += [Text()] * plan.spaces
        lines += _issues(state.view, plan, now_ms, width, run_width)
    if plan.delivery_rows or not deliveries:
        lines += [Text()] * plan.spaces
        lines += _deliveries(deliveries, plan, now_ms, width, run_width)
    if foot:
        lines.append(Text(foot, "yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Frame(tuple(lines[:height]))


def _head(state: WatchState, situation: Situation, running: int, ended: int, width: int) -> Text:
    left = "tocsin watch" + (f" {state.view.run_id}" if state.view.run_id else "")
    counts = f"{running} running, {ended} ended"
    room = width - cell_len(left) - len(counts) - 6
    url = plain_line(situation.bus_url)
    if cell_len(url) > room:
        # The end of a path says more than its beginning.
        url = "…" + url[len(url) - max(0, room - 1) :] if room > 8 else ""
    middle = set_cell_size(f"   {url}", max(0, width - cell_len(left) - len(counts)))
    return Text.assemble((left, "bold"), (middle, "dim"), (counts, "bold"))


def _nothing(state: WatchState, situation: Situation) -> str:
    run_id = state.view.run_id
    if run_id is not None:
        return f"no run {run_id} yet; waiting for: tocsin run --run-id {run_id} -- …"
    waiting = "no runs yet; waiting for: tocsin run -- python train.py"
    # On Kafka a worker reports on runs, and nobody sees that it is missing.
    return waiting if situation.bus_url.startswith("embedded:") else f"{waiting}, and tocsin rules"


def _foot(state: WatchState, runs: Sequence[WatchedRun], now_ms: int) -> str:
    parts = []
    stale = [
        run
        for run in runs
        if run.seen.running and run.progress.heard_ms > now_ms - STALE_MS // 2
        if run.progress.heard_ms - max(run.seen.view_ms, run.seen.started_ms) > STALE_MS
    ]
    if stale:
        parts.append(
            f"{stale[0].seen.run_id} is running, but no rules worker has reported on it for a "
            "minute: does 'tocsin rules' run?"
        )
    if unread := state.view.unread:
        plural = "s" if unread > 1 else ""
        parts.append(f"{unread:,} record{plural} could not be read: of another release?")
    return "  ".join(parts)


def _issues(view: RunsView, plan: Plan, now_ms: int, width: int, run_width: int) -> list[Text]:
    issues = view.issues[::-1]
    states = Counter("open" if view.open(issue) else "resolved" for issue in issues)
    lines = [_title("issues", [(states[name], name) for name in ("open", "resolved")])]
    shown = issues[: plan.issue_rows]
    rows = [
        (
            Text(ago(issue.onset_ms, now_ms).removesuffix(" ago"), "dim"),
            Text(
                issue.severity,
                SEVERITY_STYLE[issue.severity] if view.open(issue) else "dim",
            ),
            Text(plain_line(issue.rule), "bold"),
            Text(squeezed(issue.run_id, run_width)),
            Text(first_seen(issue)),
            Text(_answer(view, issue), "green"),
        )
        for issue in shown
    ]
    widths = (8, 8, max(12, width // 4), run_width, 18, 12)
    for issue, line in zip(shown, grid(rows, widths), strict=True):
        reason = plain_line(issue.reason)
        lines += [line, Text(f"    {reason}")] if plan.reasons else [line.append(f"  {reason}")]
    return lines + _more(len(issues) - len(shown), "issue")


def _answer(view: RunsView, issue: IssueFiring) -> str:
    """What people answered last, else whether it is over; empty while it goes on."""
    if (verdict := view.verdict(issue)) is not None:
        return verdict.verdict
    return "resolved" if issue.state == "resolved" else ""


def _deliveries(
    deliveries: Sequence[Delivery], plan: Plan, now_ms: int, width: int, run_width: int
) -> list[Text]:
    states = Counter[str](delivery.state for delivery in deliveries)
    lines = [_title("deliveries", [(states[name], name) for name in _DELIVERY])]
    shown = deliveries[: plan.delivery_rows]
    rows = [
        (
            Text(ago(delivery.updated_ms, now_ms).removesuffix(" ago"), "dim"),
            Text(delivery.state, _DELIVERY[delivery.state]),
            Text(plain_line(delivery.action), "bold"),
            Text(plain_line(delivery.rule)),
            Text(squeezed(delivery.run_id, run_width)),
            Text(plain_line(_what(delivery, now_ms))),
        )
        for delivery in shown
    ]
    widths = (8, 10, max(10, width // 5), max(12, width // 4), run_width, width)
    return lines + grid(rows, widths) + _more(len(deliveries) - len(shown), "delivery")


def _title(name: str, counts: Sequence[tuple[int, str]]) -> Text:
    """A section's name, and how many it has of each state."""
    listed = ", ".join(f"{count} {state}" for count, state in counts if count)
    return Text.assemble((name, "bold"), (f"  {listed or 'none so far'}", "dim"))


def _what(delivery: Delivery, now_ms: int) -> str:
    """Why it is in its state; of a pending notice when it is tried next."""
    # A stop that is pending waits for the job; when to give up is not of interest.
    if delivery.next_attempt_ms is None or delivery.final or delivery.kind == "stop":
        return delivery.reason
    wait_s = max(0, delivery.next_attempt_ms - now_ms + 999) // 1000
    return f"attempt {delivery.attempts + 1} in {wait_s} s: {delivery.reason}"


def _more(count: int, what: str) -> list[Text]:
    if count <= 0:
        return []
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return [Text(f"… and {count:,} more {what if count == 1 else plural}", "dim")]
