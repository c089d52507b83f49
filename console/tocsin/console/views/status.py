"""`tocsin status`: what runs, how far it is, what was found and what was done about it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tocsin.console.views.goodput import goodput_line
from tocsin.console.views.issues import (
    IssueFilter,
    delivery_facts,
    feedback_facts,
    issue_table,
    no_runs_line,
)
from tocsin.console.views.receivers import suspended_lines, suspended_receivers
from tocsin.console.views.rule_status import in_a_line
from tocsin.console.views.stop_history import backend_lines
from tocsin.schemas.compute import NO_PRICES, saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.issues import gravest
from tocsin.schemas.records.runs import RunView
from tocsin.schemas.records.runs_view import RunsView
from tocsin.schemas.text import plain_line

_RULES_OF: Final = 5
"""Of how many runs, the ones that began last, the rules' statuses are told."""

_STATE_STYLE: Mapping[str, str] = {"running": "green", "ended": "", "lost": "yellow"}


def status_json(
    view: RunsView,
    refused: Sequence[ConfigurationRefused] = (),
    prices: PricesConfig = NO_PRICES,
) -> str:
    """The status for programs: one JSON object with `version`, `runs`, `issues`, `deliveries`,
    `suspended_receivers` by name, and `refused_configurations`. A run that was stopped has `saved`.
    """
    return json.dumps(
        {
            "version": 1,
            "runs": [_run_facts(run, prices) for run in view.runs],
            "issues": [
                {
                    "state": issue.state,
                    **issue.model_dump(mode="json", exclude_none=True),
                    "feedback": [*map(feedback_facts, view.feedback(issue.issue_id))],
                }
                for issue in view.issues
            ],
            "deliveries": [delivery_facts(delivery) for delivery in view.deliveries],
            "suspended_receivers": {
                name: asdict(one) for name, one in suspended_receivers(view.deliveries).items()
            },
            "refused_configurations": [one.model_dump(mode="json") for one in refused],
        },
        indent=2,
    )


def print_status(
    view: RunsView,
    *,
    bus_url: str,
    now_ms: int,
    console: Console,
    again: Sequence[str] = (),
    refused: Sequence[ConfigurationRefused] = (),
    prices: PricesConfig = NO_PRICES,
) -> None:
    """Tables for people, and where to read more; one helpful line where there is nothing to show.

    `again` are options with which another command finds the same bus; `prices` are for estimates.
    """
    for line in refused_lines(refused, now_ms):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not view.runs:
        console.print(no_runs_line(bus_url), highlight=False, markup=False)
        return
    console.print(_runs_table(view.runs, now_ms))
    if (table := issue_table(view, IssueFilter(), ids=False)) is not None:
        console.print(table)
    for run in sorted(view.runs, key=lambda run: run.started_ms)[-_RULES_OF:]:
        lines = [f"rules of {run.run_id}: {in_a_line(run.rules)}"] if run.rules else []
        if run.goodput is not None and (time := goodput_line(run.goodput)):
            lines.append(f"time of {run.run_id}: {time}")
        if (saved := saved_by_stop(run, prices)) is not None:
            lines.append(f"saved by the stop of {run.run_id}: {saved.text}")
        for line in map(plain_line, lines):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in backend_lines(view.deliveries):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in suspended_lines(suspended_receivers(view.deliveries)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    issues = view.issues
    newest = [issue for issue in issues if issue.run_id == issues[-1].run_id]
    if (told := gravest(newest)) is not None:
        command = shlex.join(["tocsin", "why", told.short_id, *again])
        console.print(f"more: {command}", highlight=False, markup=False, soft_wrap=True)


def _run_facts(run: RunView, prices: PricesConfig) -> dict[str, object]:
    facts: dict[str, object] = run.model_dump(mode="json", exclude_none=True)
    saved = saved_by_stop(run, prices)
    return facts if saved is None else {**facts, "saved": saved.facts}


def refused_lines(refused: Sequence[ConfigurationRefused], now_ms: int) -> Iterator[str]:
    """The configurations that workers have refused; a line for each, and one for each problem."""
    for one in refused:
        when = ago(one.at_ms, now_ms)
        yield plain_line(
            f"{one.worker} refused its new configuration {when}; the old one is in effect:"
        )
        yield from (f"  {plain_line(problem)}" for problem in one.problems)
        if one.more:
            yield f"  and {one.more:,} more; `tocsin check` prints all"


def _runs_table(runs: Sequence[RunView], now_ms: int) -> Table:
    table = Table("run", "state", "step", "loss", "ranks", "issues", "stop", "started", box=None)
    for run in runs:
        cells = (
            "-" if run.last_step is None else f"{run.last_step:,}",
            "-" if run.last_loss is None else f"{run.last_loss:.4g}",
            str(len(run.ranks)),
            str(run.issues),
            "-" if run.stop is None else run.stop.state,
            ago(run.started_ms, now_ms),
        )
        table.add_row(
            Text(plain_line(run.run_id)),
            Text(run.outcome or run.state, style=_STATE_STYLE.get(run.state, "")),
            *map(Text, cells),
        )
    return table


def ago(then_ms: int, now_ms: int) -> str:
    """How long ago, in one unit: `42 s ago`, `5 min ago`, `3 h ago`, `2 d ago`."""
    seconds = max(0, now_ms - then_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
