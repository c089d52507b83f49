"""The command line: `mcp`, read-only tools for agents."""

from __future__ import annotations

import typer

from tocsin.console.commands.options import BusOption, ConfigOption, StoreOption


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin mcp --bus embedded:.tocsin/bus.db")(mcp)


def mcp(
    store: StoreOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
) -> None:
    """Answer an agent's questions about runs.

    Speaks the Model Context Protocol on stdin and stdout; an agent's client starts this command.
    Its tools read: list_runs, get_run, list_issues, explain_issue, query_series. None stops or
    changes anything. What a training has written is marked as data.
    """
    from tocsin.console.context import read_viewing_context
    from tocsin.schemas.errors import require_extra

    require_extra("mcp", "tocsin mcp", "mcp")
    from tocsin.console.agents.server import serve
    from tocsin.console.api.bus_source import source_of
    from tocsin.console.run_lookup import store_of

    context = read_viewing_context(config, bus, store=store)
    serve(source_of(context, store_of(context)))
