"""The command line: `approve` and `stops`, people's hands on the stops that rules ask for."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated

import typer

from tocsin.console.commands.options import (
    BusOption,
    ByOption,
    ConfigOption,
    JsonOption,
    SinceOption,
    WhyOption,
)
from tocsin.schemas.monotonic_clock import unix_ms


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog="Example: tocsin approve 7f8a4a1c")(approve)
    group = typer.Typer(
        help="Switch all stops off and on, and report what they did.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    example = "Example: tocsin stops"
    group.command("off", epilog=f'{example} off --why "the new rule is wrong"')(stops_off)
    group.command("on", epilog=f"{example} on")(stops_on)
    group.command("show", epilog=f"{example} show --json")(stops_show)
    group.command("report", epilog=f"{example} report --json")(stops_report)
    app.add_typer(group, name="stops")


def approve(
    stop: Annotated[
        str,
        typer.Argument(
            metavar="STOP",
            help="Id of the stop or of its issue (at least its first 4 characters), or the run.",
        ),
    ],
    reject: Annotated[
        bool, typer.Option("--reject", help="Reject: the run is not stopped for this issue.")
    ] = False,
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Approve or reject a stop that waits for people.

    A stop waits if its mode is ask, or if it is beyond a limit. The answer is signed with your key,
    which must be among those that `tocsin actions` trusts.
    """
    from tocsin.console.context import read_context
    from tocsin.console.person import person_named, reason_given
    from tocsin.console.stop.approve import StopReply, answer_stop, answered_json, answered_line

    reply = StopReply(
        text=stop,
        verdict="reject" if reject else "approve",
        by=person_named(by),
        why=reason_given(why),
    )
    found = asyncio.run(answer_stop(read_context(config, bus), reply, os.environ, unix_ms()))
    typer.echo(answered_json(found) if json_output else answered_line(found, reply))


def stops_off(
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Stop no run from now on.

    Action services send no stop, and runs refuse those in progress, manual ones included, until
    `tocsin stops on`. The switch is signed with your key, which services and runs must trust.
    """
    _switch(True, why, by, config, bus, json_output)


def stops_on(
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Stop runs again. What was not stopped meanwhile is not stopped now."""
    _switch(False, why, by, config, bus, json_output)


def stops_show(
    config: ConfigOption = None, bus: BusOption = None, json_output: JsonOption = False
) -> None:
    """Show whether stops are on, and who switched them."""
    from tocsin.console.context import read_context
    from tocsin.console.stop.switch import read_switch, switch_json, switch_line

    switched = asyncio.run(read_switch(read_context(config, bus), os.environ))
    typer.echo(switch_json(switched) if json_output else switch_line(switched))


def stops_report(
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Report which runs each rule stopped, or would have stopped.

    Counts what people answered to those issues (`tocsin ack`, `resolve`, `false-alarm`), and how
    much compute the stops saved, or would have saved in mode enforce, and how often that was wrong.
    """
    from tocsin.console.context import read_context
    from tocsin.console.stop.report import METHOD, report_facts, report_table, stops_of_rules
    from tocsin.console.views.bus_view import read_view
    from tocsin.console.views.since import since_ms
    from tocsin.console.views.terminal import standard_output
    from tocsin.schemas.records.runs_fold import RunsView

    from_ms = since_ms(since, unix_ms())
    context = read_context(config, bus)

    async def read() -> RunsView:
        async with context.open_bus(create=False) as opened:
            return await read_view(opened, context.topics)

    prices = context.config.prices
    rules = stops_of_rules(asyncio.run(read()), prices, since_ms=from_ms or 0)
    if json_output:
        typer.echo(json.dumps(report_facts(rules, prices), indent=2))
    elif rules:
        console = standard_output()
        console.print(report_table(rules, prices))
        console.print(METHOD, highlight=False, style="dim")
    else:
        when = "" if from_ms is None else " in this time"
        typer.echo(f"no rule has decided to stop a run on this bus{when}")


def _switch(
    off: bool,
    why: str,
    by: str | None,
    config: ConfigOption,
    bus: BusOption,
    json_output: bool,
) -> None:
    from tocsin.console.context import read_context
    from tocsin.console.person import person_named, reason_given
    from tocsin.console.stop.switch import switch_json, switch_line, switch_stops
    from tocsin.schemas.records.stops.control import StopsSwitched

    switched = StopsSwitched(off=off, by=person_named(by), why=reason_given(why), at_ms=unix_ms())
    switched = asyncio.run(switch_stops(read_context(config, bus), switched, os.environ))
    typer.echo(switch_json(switched) if json_output else switch_line(switched))
