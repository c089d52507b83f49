"""The command line: `silence`, for issues that people know already."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from typing import Annotated

import typer

from tocsin.console.commands.options import (
    BusOption,
    ByOption,
    ConfigOption,
    JsonOption,
    SinceOption,
    WhyOption,
)
from tocsin.schemas.monotonic_clock import unix_ms


class MutesOption(StrEnum):
    """What a silence mutes."""

    NOTIFY = "notify"
    STOP = "stop"


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="Do not notify of known issues, for some time.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    example = "Example: tocsin silence"
    add_example = f'{example} add "run=sweep-*" --for 2h --why "bad learning rates"'
    group.command("add", epilog=add_example)(silence_add)
    group.command("list", epilog=f"{example} list --all")(silence_list)
    group.command("expire", epilog=f"{example} expire 1a2b3c4d")(silence_expire)
    app.add_typer(group, name="silence")


def silence_add(
    match: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=PATTERN…",
            help="What issues must match: a label of the run, or run, rule or severity. A key that "
            "is repeated may match either pattern.",
        ),
    ],
    why: WhyOption,
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Duration, for example 30m, 2h, 1d.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="TIME",
            help="End, instead of --for; for example 2026-12-01T00:00Z.",
        ),
    ] = None,
    mutes: Annotated[
        list[MutesOption] | None,
        typer.Option(
            "--mutes",
            metavar="notify|stop",
            help="What is not sent: notifications [default], stops; may be repeated.",
        ),
    ] = None,
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """Silence issues, starting now.

    Issues that match are recorded, and nobody is notified of them; `tocsin why` shows the silence.
    Receivers that were notified before still get the end of an issue. If an issue continues after
    the silence, receivers are notified with its next update. The silence is signed with your key,
    which must be among those that `tocsin actions` trusts.
    """
    from tocsin.console.context import read_context
    from tocsin.console.person import person_named
    from tocsin.console.silences.send import add_silence, as_json, read_request, silence_line

    now_ms = unix_ms()
    request = read_request(
        match,
        lasts=lasts,
        until=until,
        by=person_named(by),
        why=why,
        mutes=[one.value for one in mutes or ()],
        now_ms=now_ms,
    )
    silence = asyncio.run(add_silence(read_context(config, bus), request, os.environ, now_ms))
    typer.echo(as_json([silence]) if json_output else silence_line(silence, now_ms))


def silence_list(
    every: Annotated[
        bool, typer.Option("--all", help="List silences that have ended, too (for 7 days).")
    ] = False,
    config: ConfigOption = None,
    bus: BusOption = None,
    since: SinceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List silences. Those of the configuration file are not among them."""
    from tocsin.console.context import read_context
    from tocsin.console.silences.send import as_json, list_silences, silence_table
    from tocsin.console.views.since import since_ms
    from tocsin.console.views.terminal import standard_output

    now_ms = unix_ms()
    from_ms = since_ms(since, now_ms)
    found = asyncio.run(list_silences(read_context(config, bus), os.environ))
    shown = [one for one in found if every or one.until_ms > now_ms]
    if from_ms is not None:
        shown = [one for one in shown if one.set_ms >= from_ms]
    if json_output:
        typer.echo(as_json(shown))
    elif shown:
        standard_output().print(silence_table(shown, now_ms))
    else:
        typer.echo("no silences" if every else "no silences; --all lists those that have ended")


def silence_expire(
    silence: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the silence, or its first characters.")
    ],
    by: ByOption = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    json_output: JsonOption = False,
) -> None:
    """End a silence now."""
    from tocsin.console.context import read_context
    from tocsin.console.person import person_named
    from tocsin.console.silences.send import as_json, expire_silence, silence_line

    now_ms = unix_ms()
    ended = asyncio.run(
        expire_silence(
            read_context(config, bus),
            silence,
            by=person_named(by),
            environ=os.environ,
            now_ms=now_ms,
        )
    )
    typer.echo(as_json([ended]) if json_output else silence_line(ended, now_ms))
