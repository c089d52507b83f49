"""The command line: `demo`."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from tocsin.schemas.errors import require_extra
from tocsin.schemas.exit_codes import FAILED


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: tocsin demo stall")(demo)


class ScenarioOption(StrEnum):
    """The demo's scenarios."""

    HEALTHY = "healthy"
    NAN = "nan"
    DIVERGE = "diverge"
    STALL = "stall"


def demo(
    scenarios: Annotated[
        list[ScenarioOption] | None,
        typer.Argument(
            metavar="SCENARIO",
            help="Scenarios to run side by side: healthy, nan, diverge, stall [default: healthy "
            "nan diverge].",
            show_default=False,
        ),
    ] = None,
    bus: Annotated[
        str | None,
        typer.Option(
            "--bus",
            metavar="URL",
            help="Bus, as for run [default: a new one in a temporary folder].",
        ),
    ] = None,
) -> None:
    """Train healthy and failing models; show issues and stops."""
    require_extra("demo", "tocsin demo", "torch", "sklearn", "aiosmtpd")
    require_extra("actions", "tocsin demo", "aiohttp", "aiosmtplib")
    from rich.console import Console

    from tocsin.console.demo.demo import Demo, ScenarioName

    chosen = scenarios or (ScenarioOption.HEALTHY, ScenarioOption.NAN, ScenarioOption.DIVERGE)
    names: list[ScenarioName] = [scenario.value for scenario in dict.fromkeys(chosen)]

    async def play() -> bool:
        play = Demo(names, bus, Console())
        return await play.run()

    raise typer.Exit(0 if asyncio.run(play()) else FAILED)
