"""The command line: `serve`, the live page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import BusOption, ByOption, ConfigOption, StoreOption


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin serve --http 127.0.0.1:8470")(serve)


def serve(
    http: Annotated[
        str,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Address to listen on; port 0 is any free one. Other machines reach the page only "
            "at another address than 127.0.0.1, which needs --token-file.",
        ),
    ] = "127.0.0.1:8470",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with the token that people type to log in, on one line.",
            show_default=False,
        ),
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            "--host-name",
            metavar="NAME",
            help="Name under which people reach the page, for example that of a proxy; may be "
            "repeated.",
        ),
    ] = None,
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    store: StoreOption = None,
) -> None:
    """Serve a live page of all runs, for a browser.

    Open the address that it prints: it shows issues, curves, tensors and machines. Its buttons
    acknowledge issues and stop runs, with the same signed records as `tocsin ack`, `silence`,
    `approve` and `stop`. Ctrl-C ends it.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.console.page.server import ServeOptions
    from tocsin.console.page.server import serve as run
    from tocsin.console.services.log import log_to_stderr

    options = ServeOptions.parse(http, token_file=token_file, names=host_name or (), by=by)
    log_to_stderr()
    context = read_viewing_context(config, bus, store=store)
    run(
        context,
        options,
        os.environ,
        lambda line: print(f"tocsin: {line}", file=sys.stderr, flush=True),
    )
