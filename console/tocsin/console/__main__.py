"""The command line: composed of the groups in `commands/`, and where errors become sentences."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from tocsin.schemas.process.own_python import leave_users_modules

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "tocsin":
    # A project's modules must not stand in for those that the commands need.
    leave_users_modules()

from typing import Annotated

import typer

from tocsin.bus.port import BusError
from tocsin.console.commands import (
    agents,
    bus,
    catalog,
    compare,
    configuration,
    convert,
    data,
    demo,
    drill,
    feedback,
    heartbeat,
    keys,
    node,
    rehearsal,
    report,
    run,
    runs,
    serve,
    silence,
    stops,
    workers,
)
from tocsin.console.services.log import print_error
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import WRONG_USAGE
from tocsin.store.errors import StoreError

# Each command imports what it needs when it is called: `tocsin run` must not wait for what only
# `tocsin demo` uses.

app = typer.Typer(
    name="tocsin",
    help="An alarm bell for machine-learning training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tocsin {version('tocsin')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """What holds before a command is named: only `--version`, which its callback has done."""


for _group in (
    bus, run, demo, drill, workers, heartbeat, runs, serve, report, compare, stops, data, agents,
    feedback, silence, keys, node, catalog, convert, configuration, rehearsal,
):  # fmt: skip
    # `--help` lists them in this order.
    _group.register(app)


def main() -> None:
    """The console script. Errors of the user are sentences, not tracebacks."""
    for stream in (sys.stdout, sys.stderr):
        # Where the locale is not UTF-8, "≥" is "?", not the end of the command.
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            # Of a stream that cannot tell its place Python changes nothing.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="replace")
    try:
        app(prog_name="tocsin")
    except (ConfigurationError, BusError, StoreError) as error:
        print_error(error)
        raise SystemExit(WRONG_USAGE) from None


if __name__ == "__main__":
    main()
