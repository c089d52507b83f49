"""`tocsin issues` and `tocsin why`: read the bus, choose, print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import read_commands, read_view
from tocsin.console.views.issues import IssueFilter, issue_table, issues_json, no_issues_line
from tocsin.console.views.precision import precision_json, precision_of_rules, precision_table
from tocsin.console.views.selection import choose_issue, choose_run
from tocsin.console.views.terminal import standard_output
from tocsin.console.views.why import (
    run_story_facts,
    run_story_lines,
    story_facts,
    story_lines,
    story_of,
)
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import CommandSeen


async def print_issues(
    context: CommandContext, wanted: IssueFilter, *, as_json: bool, precision: bool = False
) -> None:
    """List the issues that are wanted, or with `precision` how often their rules were right.

    Raises:
        ConfigurationError: there is no such run.
        BusUnavailable: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        view, url = await read_view(bus, context.topics, wanted.run_id), bus.url
        if wanted.run_id is not None and not view.runs and not view.issues:
            view = await read_view(bus, context.topics)
            wanted = replace(wanted, run_id=choose_run(view.runs, wanted.run_id).run_id)
    rules = precision_of_rules(view, wanted) if precision else ()
    table = precision_table(rules) if rules else issue_table(view, wanted)
    if as_json and precision:
        print(precision_json(rules))
    elif as_json:
        print(issues_json(view, wanted))
    elif table is None:
        print(no_issues_line(view, wanted, url))
    else:
        standard_output().print(table)


async def print_story(
    context: CommandContext, text: str, *, as_json: bool, since_ms: int | None = None
) -> None:
    """Tell the issue that `text` names; with `since_ms` what became of it since then.

    Raises:
        ConfigurationError: there is no such issue or run, or there are several.
        BusUnavailable: the bus does not answer.
    """
    commands: Mapping[str, CommandSeen]
    async with context.open_bus(create=False) as bus:
        view = await read_view(bus, context.topics)
        found = choose_issue(view, text)
        commands = await read_commands(bus, context.topics, found.run_id)
    prices = context.config.prices
    if isinstance(found, RunView):
        document = run_story_facts(found, commands, prices)
        lines = run_story_lines(found, commands, prices)
    else:
        story = story_of(view, commands, found, prices, since_ms=since_ms or 0)
        document, lines = story_facts(story), story_lines(story)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    out = standard_output()
    for line in lines:
        out.print(line, soft_wrap=True)
