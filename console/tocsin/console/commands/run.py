"""The command line: `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tocsin.console.commands.options import AllowCommandOption, BusOption, ConfigOption


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
        epilog="Example: tocsin run --label team=vision -- python train.py --lr 0.001",
    )(run)


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD", help="Command of the job.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="ID",
            help="Id of the run [default: $TOCSIN_RUN_ID, else the scheduler's job id, else a new "
            "one].",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="K=V", help="Label of the run; may be repeated."),
    ] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="URL|ADDRESS",
            help="Also send each issue to this address: https://…, mailto:me@example.com, "
            "slack://…, discord://…, tgram://…; may be repeated.",
        ),
    ] = None,
    allow_command: AllowCommandOption = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            "--summary", metavar="FILE", help="Write a summary to this JSON file when the job ends."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write a report (`tocsin report`) to this file when the job ends: .html, .md or "
            ".json.",
        ),
    ] = None,
    no_stop: Annotated[bool, typer.Option("--no-stop", help="Never stop the job.")] = False,
    drain: Annotated[
        float,
        typer.Option(
            "--drain", metavar="S", min=0, help="Seconds to wait at the end for pending deliveries."
        ),
    ] = 15.0,
    require_bus: Annotated[
        bool, typer.Option("--require-bus", help="Do not start the job if the bus is unreachable.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only problems.")] = False,
) -> None:
    """Run a job and monitor it. The job's code needs no changes.

    The exit code is the job's own, 79 if tocsin stopped the job, or 2 if nothing was started.
    """
    from tocsin.emitter.launch.forked import importing

    with importing():  # the launcher forks its helper
        from tocsin.console.services.launch import RunOptions, launch_options
        from tocsin.emitter.launch.forwarded_signals import die_of_interrupt
        from tocsin.emitter.launch.launcher import launch

    given = RunOptions(
        config=config,
        bus=bus,
        run_id=run_id,
        labels=label or (),
        notify=notify or (),
        allow_command=allow_command or (),
        summary=summary,
        report=report,
        stop=not no_stop,
        drain_s=drain,
        require_bus=require_bus,
        quiet=quiet,
    )
    with importing():
        options = launch_options(command or (), given)
    ended = launch(options)
    if report is not None:
        from tocsin.console.services.final_report import write_final_report

        write_final_report(options, report)
    if ended.interrupted is not None:
        die_of_interrupt(ended.interrupted)
    raise typer.Exit(ended.exit_code)
