"""The command line: `bus`, the topics and their dead letters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.console.commands import fleet
from tocsin.console.commands.options import BusOption, ConfigOption, JsonOption, SinceOption
from tocsin.schemas.monotonic_clock import unix_ms

if TYPE_CHECKING:
    from tocsin.console.dead_letters.redrive import Contents


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="Create and inspect the bus topics.", no_args_is_help=True, rich_markup_mode=None
    )
    example = "Example: tocsin bus"
    group.command("init", epilog=f"{example} init --bus kafka://kafka-1:9092")(bus_init)
    group.command("show", epilog=f"{example} show --json")(bus_show)
    dlq = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    dlq.callback(epilog=f"{example} dlq --json")(bus_dlq)
    dlq.command("list", epilog=f"{example} dlq list --json")(dlq_list)
    dlq.command("show", epilog=f"{example} dlq show 1a2b3c4d")(dlq_show)
    group.add_typer(dlq, name="dlq")
    group.command("redrive", epilog=f"{example} redrive --all --receiver vision-chat")(bus_redrive)
    fleet.register(group)
    app.add_typer(group, name="bus")


def bus_init(
    replication: Annotated[
        int | None,
        typer.Option(
            "--replication",
            metavar="N",
            help="Copies of each record on Kafka [default: 3, or as many as there are brokers].",
            show_default=False,
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Change settings of existing topics to what tocsin expects."),
    ] = False,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Create missing topics, and show where others differ.

    Topics that exist are not changed without --apply; their partitions and copies not even then.
    """
    from rich.console import Console

    from tocsin.console.context import read_context
    from tocsin.console.fleet.topic_setup import set_up
    from tocsin.console.views.topics import print_topics, topics_json

    context = read_context(config, bus)
    url, states, changed = asyncio.run(set_up(context, replication=replication, apply=apply))
    if json_output:
        typer.echo(topics_json(url, states, changed))
        return
    print_topics(url, states, Console())
    for line in changed:
        typer.echo(f"changed: {line}")
    if not apply and any(state.differs for state in states):
        typer.echo("to change settings, but no partitions or copies: tocsin bus init --apply")


def bus_show(
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show the topics, and where they differ from what tocsin expects.

    With --since, counts the records that were written since then, too.
    """
    from rich.console import Console

    from tocsin.bus.port import TopicState
    from tocsin.console.context import read_context
    from tocsin.console.views.bus_view import count_since
    from tocsin.console.views.since import since_ms
    from tocsin.console.views.topics import print_topics, topics_json

    from_ms = since_ms(since, unix_ms())
    context = read_context(config, bus)

    async def read_topics() -> tuple[str, list[TopicState], dict[str, int] | None]:
        async with context.open_bus(create=False) as opened:
            states = await opened.show(context.topics.specs())
            counts = None
            if from_ms is not None:
                there = [state.spec for state in states if state.exists]
                counts = await count_since(opened, there, from_ms)
            return opened.url, list(states), counts

    url, states, counts = asyncio.run(read_topics())
    if json_output:
        typer.echo(topics_json(url, states, counts=counts))
    else:
        print_topics(url, states, Console(), counts)


LetterArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="Id of a dead letter, or at least its first 4 characters."),
]


def bus_dlq(
    context: typer.Context,
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List failed deliveries, and records that no service could use."""
    command = context.invoked_subcommand
    if command is None:
        dlq_list(config, bus, since, json_output)
    elif config is not None or bus is not None or since is not None or json_output:
        from tocsin.schemas.errors import ConfigurationError

        raise ConfigurationError(f"put options after `{command}`: tocsin bus dlq {command} …")


def dlq_list(
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List dead letters, and what has become of each."""
    from tocsin.console.dead_letters.letters import letters_json, letters_table
    from tocsin.console.views.since import since_ms
    from tocsin.console.views.terminal import standard_output

    from_ms = since_ms(since, unix_ms())
    found = _dead_letters(config, bus)
    letters = [one for one in found.letters if one.changed_ms >= (from_ms or 0)]
    if json_output:
        typer.echo(letters_json(letters, found.ledger))
    elif letters:
        standard_output().print(letters_table(letters, found.ledger))
    else:
        typer.echo("no dead letters" if from_ms is None else "no dead letters in this time")


def dlq_show(
    letter: LetterArgument,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show one dead letter: its content, and why it was set aside."""
    from tocsin.console.dead_letters.letters import choose_letter, letter_text, letters_json

    found = _dead_letters(config, bus)
    one = choose_letter(found.letters, letter)
    if json_output:
        typer.echo(letters_json([one], found.ledger))
    else:
        typer.echo("\n".join(letter_text(one, found.ledger)))


def bus_redrive(
    letter: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="Id of a dead letter, or at least its first 4 characters."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All dead letters that were not sent since.")
    ] = False,
    receiver: Annotated[
        str | None,
        typer.Option("--receiver", metavar="NAME", help="With --all: deliveries to this receiver."),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Send dead letters once more.

    They are failed deliveries, and records that no service could use. A delivery keeps its id, and
    its `give_up_after` starts again. What was delivered meanwhile, or is older than what was
    delivered, is not sent. Stops are never sent again.
    """
    from tocsin.console.context import read_context
    from tocsin.console.dead_letters.redrive import Redriven, as_json, as_text, redrive
    from tocsin.console.person import this_person
    from tocsin.schemas.errors import ConfigurationError

    if (letter is None) != everything or (receiver is not None and not everything):
        raise ConfigurationError(
            "expected one of: an ID, --all, --all --receiver NAME; `tocsin bus dlq` lists the ids"
        )
    context = read_context(config, bus)

    async def send() -> Redriven:
        async with context.open_bus(create=False) as opened:
            return await redrive(
                opened,
                context.topics,
                letter,
                receiver=receiver,
                by=this_person(),
                now_ms=unix_ms(),
            )

    result = asyncio.run(send())
    if json_output:
        typer.echo(as_json(result))
    else:
        typer.echo("\n".join(as_text(result, single=letter is not None)))


def _dead_letters(config: Path | None, bus: str | None) -> Contents:
    from tocsin.console.context import read_context
    from tocsin.console.dead_letters.redrive import read_contents

    context = read_context(config, bus)

    async def read() -> Contents:
        async with context.open_bus(create=False) as opened:
            return await read_contents(opened, context.topics)

    return asyncio.run(read())
