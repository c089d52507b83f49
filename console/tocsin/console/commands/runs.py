"""The command line: `issues`, `why`, `stop` and `watch`, about runs that there are."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from tocsin.console.commands.options import BusOption, ConfigOption, JsonOption
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import check_run_id


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    example = "Example: tocsin"
    app.command(epilog=f"{example} issues --severity critical --state open")(issues)
    app.command(epilog=f"{example} why 1a2b3c4d")(why)
    app.command(epilog=f'{example} stop gpt-1 --reason "wrong data set"')(stop)
    app.command(epilog=f"{example} watch")(watch)


class SeverityOption(StrEnum):
    """How grave an issue is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class StateOption(StrEnum):
    """Which issues `tocsin issues` lists."""

    OPEN = "open"
    RESOLVED = "resolved"
    ALL = "all"


def issues(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only of this run.", show_default=False)
    ] = None,
    rule: Annotated[str | None, typer.Option("--rule", metavar="R", help="Only of it.")] = None,
    severity: Annotated[
        SeverityOption | None, typer.Option("--severity", help="Only of this severity.")
    ] = None,
    state: Annotated[
        StateOption, typer.Option("--state", help="Whether it goes on, or has been resolved.")
    ] = StateOption.ALL,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """List what was found, in order of occurrence, and what was done about it."""
    from tocsin.console.context import read_setting
    from tocsin.console.views.issues import IssueFilter
    from tocsin.console.views.printing import print_issues

    wanted = IssueFilter(
        run_id=None if run_id is None else check_run_id(run_id),
        rule=rule,
        severity=None if severity is None else severity.value,
        state=state.value,
    )
    setting = read_setting(config, bus)
    asyncio.run(print_issues(setting, wanted, as_json=json_output))


def why(
    issue: Annotated[
        str,
        typer.Argument(
            metavar="ISSUE",
            help="Its id, or the first 4 characters or more; or a run, or the beginning of its id.",
        ),
    ],
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Tell one issue: where it began, the evidence, what to do, what was done and who decided.

    Of a run the gravest issue is told: the first critical one, else the first.
    """
    from tocsin.console.context import read_setting
    from tocsin.console.views.printing import print_story

    try:
        check_run_id(issue)  # those of issues are UUIDs
    except ConfigurationError:
        raise ConfigurationError(
            f"{issue[:200]!r}: expected the id of an issue, its beginning, or a run; "
            "`tocsin issues` lists them"
        ) from None
    setting = read_setting(config, bus)
    asyncio.run(print_story(setting, issue, as_json=json_output))


def stop(
    run_id: Annotated[
        str, typer.Argument(metavar="RUN", help="The run, or the beginning of its id.")
    ],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; the run's summary will say so.")
    ],
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="How long the job has to leave at an edge of its loop before it gets SIGTERM, "
            "and then SIGKILL; for example 30s, 2m.",
        ),
    ] = "30s",
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0,
            metavar="S",
            help="Follow the stop for so long, s [default: twice the grace and 20 s].",
            show_default=False,
        ),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only ask; do not follow it.")] = False,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Stop a run by hand: the same signed command that rules send, followed until the job is gone.

    If a stop of the run is under way already, that one is followed and no other sent. The exit code
    is 0 if the job left, 1 if the run refused, the command expired or the job was not seen to leave
    within the wait, 2 if no stop of this run was asked for. With --no-wait 0 means that one was.
    """
    from tocsin.console.context import read_setting
    from tocsin.console.stop.send import read_options, stop_run

    options = read_options(
        check_run_id(run_id), reason, grace=grace, wait_s=0.0 if no_wait else wait
    )
    setting = read_setting(config, bus)
    say = (lambda line: None) if json_output else (lambda line: print(line, flush=True))
    outcome = asyncio.run(stop_run(setting, options, os.environ, say))
    if json_output:
        typer.echo(outcome.document)
    raise typer.Exit(outcome.exit_code)


def watch(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Only this run: its whole id, since it may be one that is still to come.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and end, as without a terminal.")
    ] = False,
) -> None:
    """Watch all runs live: steps, losses, rules, issues, deliveries. Ctrl-C ends it."""
    from tocsin.console.context import read_setting
    from tocsin.console.watch.screen import watch as show

    if run_id is not None:
        check_run_id(run_id)
    raise typer.Exit(show(read_setting(config, bus), run_id, once=once, console=Console()))
