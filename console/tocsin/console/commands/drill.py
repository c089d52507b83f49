"""The command line: `drill`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tocsin.console.commands.options import (
    AllowCidrOption,
    AllowCommandOption,
    BusOption,
    ConfigOption,
    JsonOption,
    NotifyOption,
    ReceiversArgument,
)
from tocsin.schemas.exit_codes import FAILED


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin drill ml-hook")(drill)


def drill(
    receivers: ReceiversArgument = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    notify: NotifyOption = None,
    allow_cidr: AllowCidrOption = None,
    allow_command: AllowCommandOption = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="S", help="Seconds to wait for deliveries.", min=0.0),
    ] = 30.0,
    json_output: JsonOption = False,
) -> None:
    """Send a marked test message to receivers; check stop targets.

    The message goes through the same steps as a real one: ledger, retries, address checks, plot. No
    record goes to the bus; its URL only decides whether private addresses are allowed, as for
    `tocsin run` and `tocsin actions`. Stop targets are opened, not asked; they are left out if you
    name receivers. The exit code is 0 if all receivers accepted the message and all targets can be
    asked, 1 if not.
    """
    from tocsin.console.context import read_context
    from tocsin.console.services.drill import as_json, as_text
    from tocsin.console.services.drill import drill as send
    from tocsin.console.views.stop_targets import target_lines, targets_seen

    context = read_context(config, bus)
    for line in context.warnings:
        typer.echo(f"tocsin: {line}", err=True)
    of_all = not (receivers or notify)
    targets = asyncio.run(targets_seen(context, allow_cidr or ())) if of_all else []
    done = []
    if context.config.receivers or not targets:
        done = asyncio.run(
            send(
                context,
                receivers or (),
                notify=notify or (),
                allow_cidr=allow_cidr or (),
                allow_command=allow_command or (),
                timeout_s=timeout,
            )
        )
    if json_output:
        typer.echo(as_json(done, targets))
    else:
        for text in (as_text(done, timeout) if done else "", *target_lines(targets)):
            if text:
                typer.echo(text)
    delivered = all(one.state == "delivered" for one in done)
    raise typer.Exit(0 if delivered and not any(one.problem for one in targets) else FAILED)
