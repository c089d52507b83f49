"""Each scenario of the demo ends as announced, on both buses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import pytest

from support.processes.site import Site, on_both_buses

TOLD: Final = ("webhook arrives", "mail arrives")
MOMENTS: Final[Mapping[str, Sequence[str]]] = {
    "healthy": (),
    "nan": ("step 40 begins", "issue: nonfinite", "stop decided", "training loop left", "job gone"),
    "diverge": (
        "step 40 begins", "issue: loss_diverged", "people are asked", "stop approved",
        "training loop left", "job gone",
    ),
    "stall": (
        "step 40 begins", "issue: stalled-soon", "stop decided", "SIGTERM to the job",
        "job gone",
    ),
}  # fmt: skip
"""What the table of each says, in this order."""


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("site", "scenarios"),
    [
        ("embedded", ("diverge",)),
        pytest.param("embedded", tuple(MOMENTS), marks=pytest.mark.torture),
        pytest.param("kafka", tuple(MOMENTS), marks=[pytest.mark.kafka, pytest.mark.torture]),
    ],
    indirect=["site"],
)
def test_scenarios_of_the_demo_end_as_announced_side_by_side(
    site: Site, scenarios: Sequence[str]
) -> None:
    _show(site, *scenarios)


@pytest.mark.torture
@on_both_buses
@pytest.mark.parametrize("scenarios", [(name,) for name in MOMENTS] + [()], ids="-".join)
def test_each_scenario_of_the_demo_ends_as_announced(site: Site, scenarios: Sequence[str]) -> None:
    _show(site, *scenarios)


def _show(site: Site, *scenarios: str) -> None:
    command = [sys.executable, "-m", "tocsin.console", "demo", *scenarios]
    command += ["--bus", site.bus_url] if site.kind == "kafka" else []
    done = subprocess.run(
        command,
        cwd=site.folder,
        # The tables stand in one line per moment.
        env={**os.environ, **site.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = set(re.findall(r"logs: (/\S+/tocsin-demo-\w+)$", done.stdout, re.MULTILINE))
    for name in scenarios or ("healthy", "nan", "diverge"):
        (closing,) = re.findall(
            rf"^({name} (?:completed|stopped) after .*?)(?=^\w+ \w+ after |  tocsin )",
            done.stdout,
            re.MULTILINE | re.DOTALL,
        )
        assert closing.splitlines()[0].endswith(": as announced"), done.stdout
        (report,) = re.findall(
            rf"report of {name}: ({folder}/\S+\.html)$", done.stdout, re.MULTILINE
        )
        assert "<h1>demo-" in Path(report).read_text()
        places = [closing.index(f" {moment} ") for moment in MOMENTS[name]]
        assert places == sorted(places), done.stdout
        if places:
            assert all(f" {moment} " in closing for moment in TOLD), done.stdout
            assert "signature verified" in closing
            assert "NOT VALID" not in closing
            pages = re.findall(rf"{folder}/mail-\d+-demo-{name}-\w+\.html", done.stdout)
            assert pages
    assert _started_from(folder) == []


def _started_from(folder: str) -> list[psutil.Process]:
    """The processes whose configuration lies there: of the demo nobody should be left."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TOCSIN_CONFIG", "").startswith(f"{folder}/"):
                found.append(process)
        except psutil.Error:
            continue
    return found
