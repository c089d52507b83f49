"""The command line: `sample`, which samples a node."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tocsin.console.commands.options import BusOption, ConfigOption
from tocsin.console.services.log import log_to_stderr
from tocsin.schemas.ids import check_run_id


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin sample --config tocsin.yaml --interval 1s")(sample)


def sample(
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="ID",
            help="Sample only for this run, even if it is not registered on this node "
            "[default: all registered runs].",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    bus: BusOption = None,
    interval: Annotated[
        str | None,
        typer.Option(
            "--interval",
            metavar="TIME",
            help="Time between samples, 100ms to 60s [default: capture.system.interval in the "
            "configuration, else 500ms].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Sample CPU, memory, GPUs, disks and network of this node.

    Runs until SIGINT or SIGTERM, for nodes where jobs run without `tocsin run`. A job that calls
    start() registers on its node. Each registered run gets a copy of the samples on its own bus.
    Meanwhile launchers and helpers of the same user on this node do not sample. With --run-id, a
    run that is not registered here is looked up on --bus.
    """
    from tocsin.console.context import read_context
    from tocsin.console.services.node_sampler import plan_samples, sample_node

    if run_id is not None:
        check_run_id(run_id)
    context = read_context(config, bus)
    plan = plan_samples(context, interval)
    log_to_stderr()
    raise typer.Exit(asyncio.run(sample_node(context, run_id, plan)))
