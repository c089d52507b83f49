"""The command line: `rules`, `actions` and `archive`, workers on a shared bus."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Annotated

import typer

from tocsin.bus.port import BusError
from tocsin.console.commands.options import (
    AllowCidrOption,
    AllowCommandOption,
    BusOption,
    ConfigOption,
    HttpOption,
    StoreOption,
)
from tocsin.console.services.log import log_to_stderr, print_error
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.exit_codes import FAILED


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    kafka = "--bus kafka://kafka-1:9092"
    app.command(epilog=f"Example: tocsin rules {kafka}")(rules)
    app.command(epilog=f"Example: tocsin actions {kafka} --allow-cidr 10.0.0.0/8")(actions)
    app.command(epilog=f"Example: tocsin archive {kafka} --store s3://ml-runs/tocsin")(archive)


MemberOption = Annotated[
    str | None,
    typer.Option(
        "--member",
        metavar="NAME",
        help="On Kafka: a unique name in the group. A worker that is restarted with it within 10 s "
        "keeps its partitions, and no other worker is disturbed.",
        show_default=False,
    ),
]
ParentOption = Annotated[int | None, typer.Option("--parent", metavar="PID", hidden=True)]


def rules(
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            max=256,
            help="Number of worker processes; one that ends is restarted. With --http, they use N "
            "ports from PORT on.",
        ),
    ] = 1,
    config: ConfigOption = None,
    bus: BusOption = None,
    http: HttpOption = None,
    allow_cidr: AllowCidrOption = None,
    member: MemberOption = None,
    standby: Annotated[
        int,
        typer.Option(
            "--standby",
            metavar="MIB",
            min=0,
            help="On Kafka: memory per process, in MiB, for a copy of other workers' rule state. "
            "Speeds up take-over; 0 disables it.",
        ),
    ] = 256,
    parent: ParentOption = None,
) -> None:
    """Start a rules worker: reads telemetry, reports issues. Workers share the load."""
    from tocsin.console.context import read_context
    from tocsin.console.services.workers import http_address, run_rules

    log_to_stderr()
    context = read_context(config, bus)
    if workers > 1:
        from tocsin.console.services.supervisor import Supervisor, worker_commands

        words = ["rules", *_option("--config", config), *_option("--bus", bus)]
        words += _option("--standby", standby)
        for cidr in allow_cidr or ():
            words += ["--allow-cidr", cidr]
        commands = worker_commands(
            words,
            workers=workers,
            parent=os.getpid(),
            http=None if http is None else http_address(http),
            member=member,
        )
        raise typer.Exit(asyncio.run(Supervisor(commands).run()))
    _end_with(parent)
    run = run_rules(
        context,
        allow_cidr=allow_cidr or (),
        http=http,
        member=member,
        standby_bytes=standby * 1024 * 1024,
    )
    raise typer.Exit(_work(run))


def actions(
    config: ConfigOption = None,
    bus: BusOption = None,
    http: HttpOption = None,
    allow_cidr: AllowCidrOption = None,
    allow_command: AllowCommandOption = None,
    member: MemberOption = None,
) -> None:
    """Start an action worker: sends notices and stops for issues. Workers share the load."""
    from tocsin.console.context import read_context
    from tocsin.console.services.workers import run_actions

    log_to_stderr()
    context = read_context(config, bus)
    worker = run_actions(
        context,
        allow_cidr=allow_cidr or (),
        allow_command=allow_command or (),
        http=http,
        member=member,
    )
    raise typer.Exit(_work(worker))


def archive(
    config: ConfigOption = None,
    bus: BusOption = None,
    store: StoreOption = None,
    http: HttpOption = None,
) -> None:
    """Start an archive worker: writes runs into Parquet files. Workers share the load.

    On an embedded bus, tocsin run archives by itself. This command then writes runs that it could
    not finish, for example because it was killed.
    """
    from tocsin.console.context import read_context
    from tocsin.console.services.workers import run_archive

    log_to_stderr()
    context = read_context(config, bus, store=store)
    raise typer.Exit(_work(run_archive(context, http=http)))


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


def _end_with(parent: int | None) -> None:
    """Get SIGTERM when the process that started this one dies; at once if it has died already."""
    from tocsin.emitter.process.process_group import end_with_parent

    if parent is not None:
        end_with_parent()
        if os.getppid() != parent:
            raise typer.Exit(FAILED)


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
