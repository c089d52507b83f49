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
)
from tocsin.schemas.exit_codes import FAILED


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin drill ml-hook")(drill)


def drill(
    receivers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECEIVER",
            help="Receivers of the configuration [default: all].",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="URL|ADDRESS",
            help="Send to this address instead, as tocsin run --notify does; may be repeated.",
        ),
    ] = None,
    allow_cidr: AllowCidrOption = None,
    allow_command: AllowCommandOption = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="S", help="Seconds to wait for deliveries.", min=0.0),
    ] = 30.0,
    json_output: JsonOption = False,
) -> None:
    """Send a marked test message to receivers.

    The message goes through the same steps as a real one: ledger, retries, address checks, plot. No
    record goes to the bus; its URL only decides whether private addresses are allowed, as for
    `tocsin run` and `tocsin actions`. The exit code is 0 if all receivers accepted the message,
    1 if not.
    """
    from tocsin.console.context import read_context
    from tocsin.console.services.drill import as_json, as_text
    from tocsin.console.services.drill import drill as send

    context = read_context(config, bus)
    for line in context.warnings:
        typer.echo(f"tocsin: {line}", err=True)
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
    typer.echo(as_json(done) if json_output else as_text(done, timeout))
    raise typer.Exit(0 if all(one.state == "delivered" for one in done) else FAILED)
