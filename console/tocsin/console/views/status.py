"""`tocsin status`: what runs, how far it is, what was found and what was done about it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tocsin.console.context import CommandContext
from tocsin.console.views.goodput import goodput_line
from tocsin.console.views.issues import (
    IssueFilter,
    delivery_facts,
    issue_facts,
    issue_table,
    no_runs_line,
)
from tocsin.console.views.receivers import suspended_lines, suspended_receivers
from tocsin.console.views.rule_status import in_a_line
from tocsin.console.views.stop_history import backend_lines
from tocsin.schemas.compute_estimates import NO_PRICES, saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.issues import gravest
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line, time_text

if TYPE_CHECKING:
    from tocsin.actions.decision.stop_policy import StopPolicy

_MAX_IN_FULL: Final = 2
"""Up to so many runs are all shown with their rules and times; of more, the newest."""

_STATE_STYLE: Mapping[str, str] = {"running": "green", "ended": "", "lost": "yellow"}


def status_json(
    view: RunsView,
    refused: Sequence[ConfigurationRefused] = (),
    prices: PricesConfig = NO_PRICES,
    policy: StopPolicy | None = None,
) -> str:
    """The status for programs: one JSON object with `version`, `runs`, `issues`, `deliveries`,
    `suspended_receivers` by name, and `refused_configurations`. A run that was stopped has `saved`;
    one that runs has `stop_target`, if there is a `policy`.
    """
    return json.dumps(
        {
            "version": 1,
            "runs": [run_facts(run, prices, policy) for run in view.runs],
            "issues": [issue_facts(view, issue) for issue in view.issues],
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
    since_ms: int | None = None,
) -> None:
    """Tables for people, and where to read more; one helpful line where there is nothing to show.

    `again` are options with which another command finds the same bus; `prices` are for estimates;
    `since_ms` is since when what is shown has changed, where that was asked for.
    """
    for line in refused_lines(refused, now_ms):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not view.runs:
        line = no_runs_line(bus_url)
        if since_ms is not None:
            line = f"no run on {bus_url} changed since {time_text(since_ms)}"
        console.print(line, highlight=False, markup=False)
        return
    console.print(_runs_table(view.runs, now_ms))
    if (table := issue_table(view, IssueFilter(), ids=False)) is not None:
        console.print(table)
    shown = view.runs if len(view.runs) <= _MAX_IN_FULL else view.runs[-1:]
    for run in shown:
        lines = [f"rules of {run.run_id}: {in_a_line(run.rules)}"] if run.rules else []
        if run.goodput is not None and (time := goodput_line(run.goodput)):
            lines.append(f"time of {run.run_id}: {time}")
        if (saved := saved_by_stop(run, prices)) is not None:
            lines.append(f"saved by the stop of {run.run_id}: {saved.text}")
        for line in map(plain_line, lines):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if len(shown) < len(view.runs):
        command = shlex.join(["tocsin", "status", *again, "RUN"])
        line = f"rules and times of another run: {command}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in backend_lines(view.deliveries):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in suspended_lines(suspended_receivers(view.deliveries)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    issues = view.issues
    newest = [issue for issue in issues if issue.run_id == issues[-1].run_id]
    if (grave := gravest(newest)) is not None:
        command = shlex.join(["tocsin", "why", grave.short_id, *again])
        console.print(f"more: {command}", highlight=False, markup=False, soft_wrap=True)


def run_facts(
    run: RunView, prices: PricesConfig = NO_PRICES, policy: StopPolicy | None = None
) -> dict[str, object]:
    """One run as JSON values: the fields of its view, `saved` if it was stopped, and with a policy
    the target that a stop of it would be asked of.
    """
    facts: dict[str, object] = run.model_dump(mode="json", exclude_none=True)
    if (saved := saved_by_stop(run, prices)) is not None:
        facts["saved"] = saved.facts
    if policy is not None and run.state != "ended":
        # Not paid by who has no targets.
        from tocsin.console.views.stop_targets import stop_target

        facts["stop_target"] = stop_target(run, policy)
    return facts


def target_policy(context: CommandContext) -> StopPolicy | None:
    """Which target may end which job, by this configuration; None: it has no targets."""
    if not (context.config.targets or context.config.policy):
        return None
    # Not paid by who has none.
    from tocsin.console.views.stop_targets import policy_of

    return policy_of(context)


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
