"""The command line: `bus`, the topics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from tocsin.console.commands.options import BusOption, ConfigOption, JsonOption


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="Create and inspect the bus topics.", no_args_is_help=True, rich_markup_mode=None
    )
    example = "Example: tocsin bus"
    group.command("init", epilog=f"{example} init --bus kafka://kafka-1:9092")(bus_init)
    group.command("show", epilog=f"{example} show --json")(bus_show)
    app.add_typer(group, name="bus")


def bus_init(
    config: ConfigOption = None, bus: BusOption = None, json_output: JsonOption = False
) -> None:
    """Create missing topics. Existing topics are never changed."""
    _topics(config, bus, json_output, create=True)


def bus_show(
    config: ConfigOption = None, bus: BusOption = None, json_output: JsonOption = False
) -> None:
    """Show the topics, and where they differ from what tocsin expects."""
    _topics(config, bus, json_output, create=False)


def _topics(config: Path | None, bus: str | None, json_output: bool, *, create: bool) -> None:
    from rich.console import Console

    from tocsin.bus.port import TopicState
    from tocsin.console.context import read_context
    from tocsin.console.views.topics import print_topics, topics_json

    context = read_context(config, bus)

    async def look() -> tuple[str, list[TopicState]]:
        async with context.open_bus(create=create) as opened:
            specs = context.topics.specs()
            states = await opened.init(specs) if create else await opened.show(specs)
            return opened.url, list(states)

    url, states = asyncio.run(look())
    if json_output:
        typer.echo(topics_json(url, states))
    else:
        print_topics(url, states, Console())
