"""The command line: `heartbeat check`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tocsin.console.commands.options import (
    AllowCidrOption,
    AllowCommandOption,
    BusOption,
    ConfigOption,
    NotifyOption,
    ReceiversArgument,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(
        help="Alert people when tocsin itself fails.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    example = "Example: tocsin heartbeat check --notify mailto:me@example.com"
    group.command("check", epilog=example)(check)
    app.add_typer(group, name="heartbeat")


def check(
    receivers: ReceiversArgument = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    notify: NotifyOption = None,
    http: Annotated[
        str,
        typer.Option("--http", metavar="HOST:PORT", help="Listen for heartbeats at this address."),
    ] = "127.0.0.1:9480",
    after: Annotated[
        str,
        typer.Option(
            "--after", metavar="DURATION", help="How long a sender may be silent, at least 2s."
        ),
    ] = "90s",
    expect: Annotated[
        list[str] | None,
        typer.Option(
            "--expect",
            metavar="SENDER",
            help="A sender that must ping, even if it never has; may be repeated.",
        ),
    ] = None,
    allow_cidr: AllowCidrOption = None,
    allow_command: AllowCommandOption = None,
) -> None:
    """Notify receivers when a worker or run sends no more heartbeats.

    They are also notified when it sends them again. Workers and runs send heartbeats if the
    configuration has the section heartbeat. The path of a heartbeat is the name of its sender, for
    example /rules@node-1. Run this command on another machine than the workers. It does not use the
    bus; the URL of the bus only decides whether private addresses are allowed, as for tocsin drill.
    """
    from tocsin.console.context import read_context
    from tocsin.console.services.heartbeat_check import check_heartbeats
    from tocsin.console.services.log import log_to_stderr

    log_to_stderr()
    code = check_heartbeats(
        read_context(config, bus),
        receivers or (),
        http=http,
        after=after,
        expect=expect or (),
        notify=notify or (),
        allow_cidr=allow_cidr or (),
        allow_command=allow_command or (),
    )
    raise typer.Exit(asyncio.run(code))
