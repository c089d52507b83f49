"""The command line: `bus quarantine`, rules that are off for a run; `bus dump` and `load`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.console.commands.options import (
    BusOption,
    ByOption,
    ConfigOption,
    JsonOption,
    SinceOption,
    WhyOption,
)
from tocsin.console.commands.rehearsal import FromOption, ToOption, time_ms
from tocsin.schemas.monotonic_clock import unix_ms

if TYPE_CHECKING:
    from tocsin.bus.kafka.permissions import Role


def register(bus: typer.Typer) -> None:
    """Add the commands to the group `bus`."""
    example = "Example: tocsin bus quarantine"
    group = typer.Typer(
        help="List the rules that failed in a run, and let one try again.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("list", epilog=f"{example} list --json")(quarantine_list)
    group.command("release", epilog=f'{example} release gpt-1 loss_spike --why "fixed"')(
        quarantine_release
    )
    bus.add_typer(group, name="quarantine")
    bus.command("acls", epilog="Example: tocsin bus acls --trainer User:train --rules User:rules")(
        bus_acls
    )
    bus.command("dump", epilog="Example: tocsin bus dump gpt-1.dump.gz --run gpt-1")(bus_dump)
    bus.command("load", epilog="Example: tocsin bus load gpt-1.dump.gz --bus embedded:test.db")(
        bus_load
    )


TopicsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="telemetry|runs|issues|dlq",
        help="Records of this topic; may be repeated [default: telemetry].",
        show_default=False,
    ),
]
OfRunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="Only the records of this run.")
]


def _principals(role: str, who: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{role}", metavar="PRINCIPAL", help=f"{who}; may be repeated.", show_default=False
    )
    return option


def bus_acls(
    trainer: Annotated[
        list[str] | None, _principals("trainer", "Who trains, such as User:train")
    ] = None,
    rules: Annotated[list[str] | None, _principals("rules", "Of the rules workers")] = None,
    actions: Annotated[list[str] | None, _principals("actions", "Of action workers")] = None,
    archive: Annotated[list[str] | None, _principals("archive", "Of archive workers")] = None,
    reader: Annotated[list[str] | None, _principals("reader", "With read access only")] = None,
    stopper: Annotated[
        list[str] | None, _principals("stopper", "Who looks, and stops runs")
    ] = None,
    operator: Annotated[
        list[str] | None,
        _principals("operator", "Who also answers issues, redrives and releases rules"),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Give the rights, instead of printing commands.")
    ] = False,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print the permissions that Kafka principals need, or give them.

    The topics are those of `bus.prefix`: a principal of one team gets no right on the topics of
    another. No permission is ever taken away.
    """
    from tocsin.console.context import read_context
    from tocsin.console.fleet.topic_setup import acls_json, acls_text, grant

    context = read_context(config, bus)
    principals: dict[Role, Sequence[str]] = {
        "trainer": trainer or (),
        "rules": rules or (),
        "actions": actions or (),
        "archive": archive or (),
        "reader": reader or (),
        "stopper": stopper or (),
        "operator": operator or (),
    }
    wanted, given = asyncio.run(grant(context, principals, apply=apply))
    if json_output:
        typer.echo(acls_json(wanted, given, applied=apply))
    elif apply:
        there = len(wanted) - len(given)
        more = f", {there:,} were there already" if there else ""
        typer.echo(f"permissions given: {len(given):,}{more}")
    else:
        typer.echo(acls_text(wanted, context.settings.bus.url.removeprefix("kafka://")))


def bus_dump(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="New file; with .gz at its end, compressed.")
    ],
    run: OfRunOption = None,
    since: FromOption = None,
    until: ToOption = None,
    topic: TopicsOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
) -> None:
    """Write records of the bus to a file.

    `tocsin replay --file` and `tocsin diff --file` evaluate it; `tocsin bus load` puts it onto
    another bus. It has what the bus has: metrics, names of tensors, labels, command lines.
    """
    from tocsin.console.context import read_context
    from tocsin.console.fleet.past_telemetry import Span, dump, run_with_records

    context = read_context(config, bus)
    from_ms = 0 if since is None else time_ms("--from", since)
    to_ms = None if until is None else time_ms("--to", until)

    async def write() -> int:
        async with context.open_bus(create=False) as opened:
            run_id = None if run is None else await run_with_records(opened, context.topics, run)
            span = Span(run_id, from_ms, to_ms)
            return await dump(
                opened, context.topics, file, topic or ("telemetry",), span, unix_ms()
            )

    count = asyncio.run(write())
    typer.echo(f"{count:,} records in {file}")


def bus_load(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of `tocsin bus dump`.")],
    run: OfRunOption = None,
    topic: TopicsOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
) -> None:
    """Publish the records of a dump on a bus.

    Use a separate bus: workers of the bus read the records as new ones, and the bus gives them
    the time of now. To evaluate a dump, use `tocsin replay --file`, which keeps the times.
    """
    from tocsin.console.context import read_context
    from tocsin.console.fleet.dump import open_dump
    from tocsin.console.fleet.past_telemetry import Span, load

    context = read_context(config, bus)
    source = open_dump(file)

    async def publish() -> int:
        async with context.open_bus() as opened:
            if context.embedded:
                await opened.init(context.topics.specs())
            wanted = topic or ("telemetry",)
            return await load(opened, context.topics, source, wanted, Span(run))

    typer.echo(f"{asyncio.run(publish()):,} records published")


def quarantine_list(
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List the rules that are off for a run, and why.

    A rule is switched off for a run if it raises an exception, if one call takes too long, or if
    its state gets too large. The other rules of the run continue.
    """
    from tocsin.console.context import read_context
    from tocsin.console.fleet.quarantines import as_json, as_table, list_quarantines
    from tocsin.console.views.since import since_ms
    from tocsin.console.views.terminal import standard_output

    from_ms = since_ms(since, unix_ms())
    found = asyncio.run(list_quarantines(read_context(config, bus), from_ms))
    if json_output:
        typer.echo(as_json(found))
    elif found:
        standard_output().print(as_table(found))
    else:
        typer.echo("no rule is quarantined" if from_ms is None else "no rule was quarantined since")


def quarantine_release(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or its beginning.")],
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Name of the rule.")],
    why: WhyOption = "",
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
) -> None:
    """Let a quarantined rule try again in a run that is active.

    It starts without its memory of the run, as after a loss of its state.
    """
    from tocsin.console.context import read_context
    from tocsin.console.fleet.quarantines import release
    from tocsin.console.person import person_named, reason_given
    from tocsin.schemas.text import plain_line

    released = asyncio.run(
        release(
            read_context(config, bus),
            run,
            rule,
            by=person_named(by),
            why=reason_given(why),
            now_ms=unix_ms(),
        )
    )
    typer.echo(
        f"{plain_line(released.rule)} is tried again in run {plain_line(released.run_id)}, "
        "from its next record on"
    )
