"""The command line: `rules` and `actions`, workers on a shared bus."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import typer

from tocsin.bus.port import BusError
from tocsin.console.commands.options import (
    AllowCidrOption,
    AllowCommandOption,
    BusOption,
    ConfigOption,
    HttpOption,
)
from tocsin.console.services.log import log_to_stderr, print_error
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    kafka = "--bus kafka://kafka-1:9092"
    app.command(epilog=f"Example: tocsin rules {kafka}")(rules)
    app.command(epilog=f"Example: tocsin actions {kafka} --allow-cidr 10.0.0.0/8")(actions)


def rules(
    config: ConfigOption = None,
    bus: BusOption = None,
    http: HttpOption = None,
    allow_cidr: AllowCidrOption = None,
) -> None:
    """Start a rules worker: reads telemetry, reports issues. Workers share the load."""
    from tocsin.console.context import read_context
    from tocsin.console.services.workers import run_rules

    log_to_stderr()
    context = read_context(config, bus)
    raise typer.Exit(_work(run_rules(context, allow_cidr=allow_cidr or (), http=http)))


def actions(
    config: ConfigOption = None,
    bus: BusOption = None,
    http: HttpOption = None,
    allow_cidr: AllowCidrOption = None,
    allow_command: AllowCommandOption = None,
) -> None:
    """Start an action worker: sends notices and stops for issues. Workers share the load."""
    from tocsin.console.context import read_context
    from tocsin.console.services.workers import run_actions

    log_to_stderr()
    context = read_context(config, bus)
    worker = run_actions(
        context, allow_cidr=allow_cidr or (), allow_command=allow_command or (), http=http
    )
    raise typer.Exit(_work(worker))


def _work(worker: Coroutine[None, None, int]) -> int:
    """Run a worker. An unreachable bus is no error of the user: 1, so that whatever started the
    worker (systemd, an engine) starts it again; 2 says that this would be in vain."""
    try:
        return asyncio.run(worker)
    except BusError as error:
        if isinstance(error, ConfigurationError):
            raise
        print_error(error)
        return FAILED
