"""The command line: `status`, `issues`, `why`, `stop` and `watch`, about runs on the bus."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import BusOption, ConfigOption, JsonOption, SinceOption
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import check_run_id
from tocsin.schemas.monotonic_clock import unix_ms


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    example = "Example: tocsin"
    app.command(epilog=f"{example} status --json")(status)
    app.command(epilog=f"{example} issues --severity critical --state open")(issues)
    app.command(epilog=f"{example} why 1a2b3c4d")(why)
    app.command(epilog=f'{example} stop gpt-1 --reason "wrong data set"')(stop)
    app.command(epilog=f"{example} watch")(watch)


class SeverityOption(StrEnum):
    """Severities of issues."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class StateOption(StrEnum):
    """Which issues `tocsin issues` lists."""

    OPEN = "open"
    RESOLVED = "resolved"
    ALL = "all"


def status(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Show only this run.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show runs, their issues, and what was done about each issue."""
    from tocsin.console.context import read_viewing_context
    from tocsin.console.services.own_archive import NOT_INSTALLED
    from tocsin.console.services.own_archive import installed as archives
    from tocsin.console.views.bus_view import read_refused, read_view
    from tocsin.console.views.selection import choose_run
    from tocsin.console.views.since import since_ms
    from tocsin.console.views.status import print_status, status_json, target_policy
    from tocsin.console.views.terminal import standard_output
    from tocsin.schemas.records.configurations import ConfigurationRefused
    from tocsin.schemas.records.runs_fold import RunsView

    if run_id is not None:
        check_run_id(run_id)
    now_ms = unix_ms()
    from_ms = since_ms(since, now_ms)
    context = read_viewing_context(config, bus)

    async def read() -> tuple[str, RunsView, Sequence[ConfigurationRefused]]:
        async with context.open_bus(create=False) as opened:
            view = await read_view(opened, context.topics, run_id)
            if run_id is not None and not view.runs and not view.issues:
                every = await read_view(opened, context.topics)
                chosen = choose_run(every.runs, run_id).run_id
                view = await read_view(opened, context.topics, chosen)
            return opened.url, view, await read_refused(opened, context.topics)

    url, view, refused = asyncio.run(read())
    view = view if from_ms is None else view.since(from_ms)
    if json_output:
        typer.echo(status_json(view, refused, context.config.prices, target_policy(context)))
    else:
        print_status(
            view,
            refused=refused,
            prices=context.config.prices,
            bus_url=url,
            now_ms=now_ms,
            console=standard_output(),
            again=_again(config, bus),
            since_ms=from_ms,
        )
        if context.embedded and context.settings.store.enabled and not archives():
            standard_output().print(NOT_INSTALLED, style="dim", highlight=False, soft_wrap=True)


def _again(config: Path | None, bus: str | None) -> tuple[str, ...]:
    """The options with which the next command finds the same bus."""
    from tocsin.console.services.launch import RunOptions

    return RunOptions(config=config, bus=bus).again


def issues(
    run_id: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="List only issues of this run.", show_default=False),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", metavar="R", help="List only issues of this rule.")
    ] = None,
    severity: Annotated[
        SeverityOption | None,
        typer.Option(
            "--severity", metavar="info|warning|critical", help="List only this severity."
        ),
    ] = None,
    state: Annotated[
        StateOption,
        typer.Option(
            "--state", metavar="open|resolved|all", help="List only open or only resolved issues."
        ),
    ] = StateOption.ALL,
    precision: Annotated[
        bool,
        typer.Option(
            "--precision",
            help="Instead, print for each rule how many issues people confirmed (`tocsin ack`, "
            "`resolve`) and how many were false alarms.",
        ),
    ] = False,
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List issues in order of occurrence, with what was done."""
    from tocsin.console.context import read_viewing_context
    from tocsin.console.views.issue_commands import print_issues
    from tocsin.console.views.issues import IssueFilter
    from tocsin.console.views.since import since_ms

    wanted = IssueFilter(
        run_id=None if run_id is None else check_run_id(run_id),
        rule=rule,
        severity=None if severity is None else severity.value,
        state=state.value,
        since_ms=since_ms(since, unix_ms()),
    )
    context = read_viewing_context(config, bus)
    asyncio.run(print_issues(context, wanted, as_json=json_output, precision=precision))


def why(
    issue: Annotated[
        str,
        typer.Argument(
            metavar="ISSUE",
            help="Id of an issue or of a delivery (at least its first 4 characters), or of a run "
            "(or its beginning).",
        ),
    ],
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Explain one issue.

    Prints where it started, the evidence, what to do, what was done, and which line of the
    configuration decided it. Given a run, explains its first critical issue, else its first issue;
    given the id of a delivery, as a webhook or a dead letter has it, the issue that it is about.
    With --since, prints what became of it since then.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.console.views.issue_commands import print_story
    from tocsin.console.views.since import since_ms

    try:
        check_run_id(issue)  # those of issues are UUIDs
    except ConfigurationError:
        raise ConfigurationError(
            f"{issue[:200]!r}: expected the id of an issue, its beginning, or a run; "
            "`tocsin issues` lists them"
        ) from None
    from_ms = since_ms(since, unix_ms())
    context = read_viewing_context(config, bus)
    asyncio.run(print_story(context, issue, as_json=json_output, since_ms=from_ms))


def stop(
    run_id: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of the run, or its first characters.")
    ],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Reason, shown in the run's summary.")
    ],
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="Time for the job to finish its step before it gets SIGTERM, then SIGKILL; for "
            "example 30s, 2m.",
        ),
    ] = "30s",
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0,
            metavar="S",
            help="Seconds to wait for the job to exit [default: twice the grace plus 20 s].",
            show_default=False,
        ),
    ] = None,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="Send the stop and return; do not wait for the job."),
    ] = False,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Stop a run, and wait until the job has exited.

    Sends the same signed command that rules send. If another stop of the run is in progress, waits
    for that one and sends nothing. The exit code is 0 if the job exited; 1 if the run refused, the
    command expired, or the job did not exit in time; 2 if no stop was sent. With --no-wait, 0 means
    that a stop was sent.
    """
    from tocsin.console.context import read_context
    from tocsin.console.stop.send import read_options, stop_run

    options = read_options(
        check_run_id(run_id), reason, grace=grace, wait_s=0.0 if no_wait else wait
    )
    context = read_context(config, bus)
    print_line = (lambda line: None) if json_output else (lambda line: print(line, flush=True))
    outcome = asyncio.run(stop_run(context, options, os.environ, print_line))
    if json_output:
        typer.echo(outcome.document)
    raise typer.Exit(outcome.exit_code)


def watch(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Show only this run; its full id, because the run may not have started.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot and exit, as without a terminal.")
    ] = False,
    since: SinceOption = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="With --once: print JSON, as `tocsin status` does.")
    ] = False,
) -> None:
    """Show all runs live: steps, losses, rules, issues, deliveries. Ctrl-C exits."""
    if json_output or since is not None:
        if not once:
            raise ConfigurationError("--json and --since of `tocsin watch` expect --once")
        # What a program gets of one snapshot is the status.
        status(run_id, config, bus, since, json_output)
        return
    from rich.console import Console

    from tocsin.console.context import read_viewing_context
    from tocsin.console.watch.screen import watch as show

    if run_id is not None:
        check_run_id(run_id)
    raise typer.Exit(show(read_viewing_context(config, bus), run_id, once=once, console=Console()))
