"""The command line: `sample`, which looks after a node."""

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
            help="Only for this run, which need not be registered on this node "
            "[default: each run that is].",
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
            help="Time between two samples, 100ms to 60s [default: the file's "
            "capture.system.interval, else 500ms].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Sample this node for its runs (CPU, memory, GPUs, disks, network) until SIGINT or SIGTERM.

    For nodes where trainings run without `tocsin run`. A training that calls start() registers
    here; each registered run gets its own copy of the samples, on its own bus. Launchers and
    helpers of the same user on this node step aside. With --run-id it is one run, found on --bus if
    nobody here speaks for it.
    """
    from tocsin.console.context import read_setting
    from tocsin.console.services.node_sampler import plan_samples, sample_node

    if run_id is not None:
        check_run_id(run_id)
    setting = read_setting(config, bus)
    plan = plan_samples(setting, interval)
    log_to_stderr()
    raise typer.Exit(asyncio.run(sample_node(setting, run_id, plan)))
