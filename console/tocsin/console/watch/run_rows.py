"""The runs in the picture of `tocsin watch`: one line each, and a second one with what is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from tocsin.console.views.rule_status import FOUND, counts, named
from tocsin.console.views.sparkline import NONFINITE, sparkline
from tocsin.console.views.status import ago
from tocsin.console.watch.state import WatchedRun
from tocsin.console.watch.text import GAP, grid, squeezed
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.text import exit_text, plain_line

SILENT_MS: Final = 30_000
"""A running run that sent nothing for that long is shown as silent: three heartbeats."""

_MIN_SPARK: Final = 8
_MAX_SPARK: Final = 60
_RUN_NAME: Final = (8, 18, 36)

_STATE: Final = {
    "running": "green", "completed": "", "failed": "red", "stopped": "bold red",
    "interrupted": "yellow", "lost": "yellow", "silent": "yellow",
}  # fmt: skip

# In the order in which they are left out where the width does not suffice.
_DISPENSABLE: Final = ("ranks", "since", "/s", "issues", "trend", "step")
_COLUMNS: Final = (
    "run", "state", "step", "/s", "loss", "trend", "issues", "ranks", "since",
)  # fmt: skip
_RIGHT: Final = frozenset({"step", "/s", "loss", "issues", "ranks"})
_SPARK: Final = "trend"


def run_lines(runs: Sequence[WatchedRun], *, width: int, now_ms: int) -> list[Text]:
    """A line of titles, then one line for each run."""
    rows = [_cells(run, now_ms) for run in runs]
    sizes = {
        name: max([cell_len(name), *(row[name].cell_len for row in rows)])
        for name in _COLUMNS
        if name != _SPARK
    }
    least, short, longest = _RUN_NAME
    sizes["run"] = min(sizes["run"], longest)
    sizes[_SPARK] = _MIN_SPARK
    if not any(len(run.series) for run in runs):
        del sizes[_SPARK]
    if not any(run.seen.view is not None and len(run.seen.view.ranks) > 1 for run in runs):
        del sizes["ranks"]
    _shorten(sizes, width, short)
    for name in _DISPENSABLE:
        if _total(sizes) > width:
            sizes.pop(name, None)
    _shorten(sizes, width, least)
    if _SPARK in sizes:
        points = max(len(run.series) for run in runs)
        wanted = max(len(_SPARK), min(_MAX_SPARK, points))
        sizes[_SPARK] += max(0, min(width - _total(sizes), wanted - sizes[_SPARK]))
    columns = [name for name in _COLUMNS if name in sizes]
    lines = [[Text(name, "dim") for name in columns]]
    for run, row in zip(runs, rows, strict=True):
        row["run"].plain = squeezed(run.seen.run_id, sizes["run"])
        if _SPARK in sizes:
            row[_SPARK] = _spark(run, sizes[_SPARK])
        lines.append([row[name] for name in columns])
    right = [i for i, name in enumerate(columns) if name in _RIGHT]
    return grid(lines, [sizes[name] for name in columns], right)


def detail_line(run: WatchedRun, now_ms: int) -> Text:
    """What else is known, the most important first."""
    view = run.seen.view
    parts: list[tuple[str, str]] = []
    if run.seen.running and 0 < run.last_heard_ms < now_ms - SILENT_MS:
        quiet = ago(run.last_heard_ms, now_ms).removesuffix(" ago")
        parts.append((f"no data for {quiet}", "yellow"))
    if view is None:
        parts.append(("no rules worker has reported on it yet", "dim"))
    else:
        if view.stop is not None:
            parts.append((_stop(view.stop), "bold red"))
        for status in FOUND:
            style = "bold red" if status == "issues_found" else "yellow"
            parts.append((named(view.rules, status), style))
        if text := counts(view.rules):
            parts.append((f"rules: {text}", ""))
        if (eval_loss := run.progress.eval_loss) is not None:
            parts.append((f"evaluation loss {eval_loss:.4g}", "dim"))
        if view.capture is not None:
            parts.append((f"overhead {view.capture.overhead_text}", "dim"))
            if view.capture.dropped:
                parts.append((f"{view.capture.dropped:,} records dropped", "yellow"))
            if view.capture.not_watched:
                off = ", ".join(view.capture.not_watched)
                parts.append((f"not watched: {off}", "yellow"))
        parts += [(f"{key}={value}", "dim") for key, value in view.labels.items()]
        parts.append((view.node, "dim"))
    shown = [Text(plain_line(text), style) for text, style in parts if text]
    return Text("  ").append(Text(" · ", "dim").join(shown))


def _cells(run: WatchedRun, now_ms: int) -> dict[str, Text]:
    view = run.seen.view
    rate = run.per_s(now_ms) if run.seen.running else None
    issues = view.issues if view is not None else 0
    state = run.state
    style = _STATE.get(state, "")
    if state == "running" and 0 < run.last_heard_ms < now_ms - SILENT_MS:
        style = _STATE["silent"]
    since = run.seen.started_ms if run.seen.running else run.ended_ms
    when = "-" if not since else ago(since, now_ms)
    loss = run.loss
    bad = loss is not None and not math.isfinite(loss)
    return {
        "run": Text(run.seen.run_id, "bold" if run.seen.running else ""),
        "state": Text(state, style),
        "step": Text("-" if run.step is None else f"{run.step:,}"),
        "/s": Text("-" if rate is None else f"{rate:,.3g}" if rate < 100 else f"{rate:,.0f}"),
        "loss": Text("-" if loss is None else f"{loss:.4g}", "bold red" if bad else ""),
        "issues": Text(str(issues), "bold red" if issues else "dim"),
        "ranks": Text(str(len(view.ranks)) if view is not None and view.ranks else "-"),
        "since": Text(when.removesuffix(" ago") if run.seen.running else when),
    }


def _spark(run: WatchedRun, size: int) -> Text:
    """The loss in blocks, what is not finite in red."""
    line = Text(sparkline(run.series.buckets(size)), "cyan" if run.seen.running else "dim")
    line.highlight_words([NONFINITE], "bold red")
    return line


def _stop(stop: StopView) -> str:
    at = "" if stop.step is None else f" at step {stop.step:,}"
    how = "" if stop.how is None else f" {exit_text(stop.how)}"
    code = "" if stop.exit_code is None else f", exit code {stop.exit_code}"
    return f"stop {stop.state}{how}{at}{code}"


def _shorten(sizes: dict[str, int], width: int, least: int) -> None:
    """Take from the names of the runs what is too much, but leave them `least` cells."""
    sizes["run"] -= max(0, min(sizes["run"] - least, _total(sizes) - width))


def _total(sizes: dict[str, int]) -> int:
    return sum(sizes.values()) + GAP * (len(sizes) - 1)
