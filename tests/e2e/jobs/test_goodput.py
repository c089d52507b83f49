"""Where the time of a killed and resumed run went, and what a stop saves: real processes."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.processes.site import SCRIPTS, Site, embedded_site_in, family_of
from support.servers.receiver import Receiver
from support.waiting import wait_until
from tocsin.schemas.records.goodput import PARTS

LOOP = str(SCRIPTS / "resume_loop.py")


@pytest.fixture
def site(tmp_path: Path, receiver: Receiver) -> Site:
    return embedded_site_in(tmp_path, receiver)


def run_of(site: Site, run_id: str) -> dict[str, Any]:
    done = site.tocsin("status", run_id, "--json", "--config", str(site.config))
    (run,) = json.loads(done.stdout)["runs"]
    found: dict[str, Any] = run
    return found


@pytest.mark.torture  # in CI: engine/test_goodput
def test_the_time_of_a_killed_and_resumed_run_adds_up(site: Site) -> None:
    began = time.monotonic()
    first = site.start(sys.executable, LOOP, run_id="resumed", options=["--drain", "30"])
    wait_until(lambda: "step 50\n" in first.stdout)
    for process in family_of(first, "resume_loop"):
        process.send_signal(signal.SIGKILL)
    killed = first.finish()
    over = time.monotonic()
    assert killed.exit_code == 128 + signal.SIGKILL, killed
    made = killed.summary["steps"]
    assert made > 50, killed

    again = time.monotonic()
    resumed = site.run(sys.executable, LOOP, run_id="resumed", options=["--drain", "30"])
    ended = time.monotonic()
    assert resumed.exit_code == 0, resumed

    run = run_of(site, "resumed")
    goodput = run["goodput"]
    assert goodput == resumed.summary["goodput"]
    assert goodput["incarnations"] == 2
    whole = sum(goodput[f"{part}_s"] for part in PARTS)
    assert whole == pytest.approx(goodput["wall_s"], rel=0.01)
    # What is measured outside of tocsin bounds it: the jobs lasted, and then all lasted, so long.
    jobs = killed.summary["duration_s"] + resumed.summary["duration_s"]
    assert jobs <= goodput["wall_s"] <= ended - began
    assert again - over <= goodput["down_s"] <= ended - began - jobs
    # It went on after step 39.
    assert goodput["unknown_s"] == 0
    pause_s = 0.02
    assert goodput["redone_s"] >= (made - 41) * pause_s
    assert goodput["productive_s"] >= (39 + 59) * pause_s
    assert (run["outlook"]["total_steps"], run["outlook"]["done_steps"]) == (100, 40)
    assert "% productive over 2 incarnations" in resumed.stderr


def test_what_a_stop_has_saved_is_told_with_its_inputs(site: Site) -> None:
    site.config.write_text(site.config.read_text() + "prices: {cpu: 3600, currency: EUR}\n")
    command = (LOOP, "--nan-at", "30", "--steps", "10000")
    stopped = site.run(sys.executable, *command, run_id="stopped", options=["--drain", "30"])
    stopped.stopped_by("nonfinite")

    saved = stopped.summary["saved"]
    made = stopped.summary["steps"]
    step_s = run_of(site, "stopped")["outlook"]["step_s"]
    assert (saved["unit"], saved["ranks"], saved["devices"]) == ("rank-hours", 1, {})
    assert saved["estimate"] == pytest.approx((10_000 - made) * step_s / 3600)
    assert saved["cost"] == pytest.approx(saved["estimate"] * 3600)
    assert f"{10_000 - made:,} of 10,000 steps left at " in saved["method"]
    assert "saved an estimated " in stopped.stderr
    told = site.tocsin("why", "stopped", "--config", str(site.config)).stdout
    assert "saved: an estimated " in told
    assert "EUR" in told
    report = site.tocsin("stops", "report", "--json", "--config", str(site.config))
    (rule,) = json.loads(report.stdout)["rules"]
    assert (rule["stopped"], rule["saved_unknown"]) == (1, 0)
    assert rule["saved_hours"] == pytest.approx(saved["estimate"])
