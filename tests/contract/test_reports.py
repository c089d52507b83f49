"""A report and a comparison of runs that are on a bus of either kind, with no store."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from support.buses import World
from support.configured_buses import context_on
from support.records.made_runs import made_run, of_team
from tocsin.bus.port import Bus
from tocsin.console.__main__ import app


async def test_runs_that_only_the_bus_has_are_reported_and_compared(
    world: World, bus: Bus, tmp_path: Path
) -> None:
    for run_id in ("run-1", "run-2"):
        await of_team(made_run(run_id), world.prefix).publish(bus)
    context_on(world, tmp_path, "defaults: {rules: none}\n")
    config = ("--config", str(tmp_path / "tocsin.yaml"))
    runner = CliRunner()

    report = runner.invoke(app, ["report", "run-1", "--output", str(tmp_path / "r.md"), *config])
    assert report.exit_code == 0, report.output
    assert "run-1" in (tmp_path / "r.md").read_text()

    compared = runner.invoke(app, ["compare", "run-1", "run-2", *config])
    assert compared.exit_code == 0, compared.output
