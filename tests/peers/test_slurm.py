"""A job of a real Slurm whose launcher is killed: `tocsin actions` ends that job, for good."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from support.records.telemetry import said
from support.servers.slurm import Slurm, slurm_cluster, unavailable
from support.waiting import HANGS_S, wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.stops.commands import StopExited
from tocsin.schemas.topics import Topics

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]

CONFIG = """\
version: 1
bus: embedded:{folder}/bus.db
targets:
  hpc: {{type: slurm, confirm_within: 2m}}
policy:
  - {{match: {{team: vision}}, may_stop_on: [hpc]}}
rules:
  - nonfinite: [{{stop: {{grace: 1s}}}}]
"""

TRAINING = """\
import os, pathlib, time
import torch
name = os.environ["TOCSIN_RUN_ID"]
pathlib.Path(f"pid-{name}").write_text(str(os.getpid()))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    if os.path.exists(f"spoil-{name}"):
        model.weight.grad[0, 0] = float("nan")
    optimizer.step()
    pathlib.Path(f"stepped-{name}").touch()
    time.sleep(0.05)
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tocsin-s") as name:
        folder = Path(name)
        (folder / "tocsin.yaml").write_text(CONFIG.format(folder=folder))
        (folder / "train.py").write_text(TRAINING)
        kept = {key for key in os.environ if key.startswith("TOCSIN_")}
        environ = {
            **dict.fromkeys(kept, ""),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "OMP_NUM_THREADS": "1",
        }
        with slurm_cluster(folder, environ) as cluster:
            yield cluster


def submit(slurm: Slurm, run: str, *options: str) -> str:
    """A job that goes on when its launcher is gone, as many scripts do."""
    tocsin = f"{sys.executable} -m tocsin.console run --config tocsin.yaml --label team=vision"
    lines = f"{tocsin} --run-id {run} -- {sys.executable} train.py\necho launcher gone\nsleep 1000"
    return slurm.submit(lines, "--overcommit", *options)


@contextmanager
def service(slurm: Slurm, name: str) -> Iterator[None]:
    """A worker beside the cluster, with the rights of the job's owner."""
    command = [sys.executable, "-m", "tocsin.console", name, "--config", "tocsin.yaml"]
    with (slurm.folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=slurm.folder, env=dict(slurm.environ), stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def stop_of(slurm: Slurm, run: str) -> Delivery | None:
    """The stop in the ledger."""

    async def read() -> Delivery | None:
        async with EmbeddedBus(slurm.folder / "bus.db") as bus:
            view = await read_view(bus, Topics(), run)
        return next((one for one in view.deliveries if one.kind == "stop"), None)

    return asyncio.run(read())


def pid_of(slurm: Slurm, run: str) -> int:
    noted = slurm.folder / f"pid-{run}"
    wait_until(lambda: (slurm.folder / f"stepped-{run}").exists(), HANGS_S, f"{run} trains")
    return int(noted.read_text())


def runs(pid: int) -> bool:
    """Whether that process runs; one that nobody has buried does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_launcher(slurm: Slurm, run: str, training: int) -> None:
    """SIGKILL to the launcher; the training goes on."""
    launcher = psutil.Process(training).parent()
    assert launcher is not None
    assert "tocsin.console" in " ".join(launcher.cmdline()), launcher
    helpers = [child for child in launcher.children() if child.pid != training]
    launcher.send_signal(signal.SIGKILL)
    psutil.wait_procs([launcher, *helpers], 60)
    assert runs(training)


@pytest.mark.timeout(900)
def test_the_job_of_a_killed_launcher_is_ended_by_its_scheduler_for_good(slurm: Slurm) -> None:
    # One may be queued again, and the other's names begin with the same letters.
    jobs = {run: submit(slurm, run, "--requeue") for run in ("gpt", "gpt-2")}
    pids = {run: pid_of(slurm, run) for run in jobs}
    for run, pid in pids.items():
        kill_launcher(slurm, run, pid)
    with ExitStack() as stack:
        for name in ("rules", "actions"):
            stack.enter_context(service(slurm, name))
        (slurm.folder / "spoil-gpt").touch()
        wait_until(lambda: (stop := stop_of(slurm, "gpt")) and stop.final, 300, "gpt was stopped")
        stop = stop_of(slurm, "gpt")
    assert stop is not None
    assert (stop.state, stop.reason) == (
        "delivered",
        "the backend ended the job: hpc: CANCELLED",
    )
    # proctrack/pgid ends the job's own process group alone; that of a site, cgroup, all of it. The
    # end of this cluster kills what is left.
    found = slurm.job(jobs["gpt"])
    assert (found["JobState"], found["Restarts"], found["Requeue"]) == ("CANCELLED", "0", "0")
    assert slurm.fails("scontrol", "requeue", jobs["gpt"])
    # Nobody has touched the other one.
    assert slurm.job(jobs["gpt-2"])["JobState"] == "RUNNING"
    assert runs(pids["gpt-2"])
    assert stop_of(slurm, "gpt-2") is None
    started = [each.scheduler for each in said(slurm.folder, RunStarted, "gpt") if each.scheduler]
    assert {each.names["job"] for each in started} == {jobs["gpt"]}
    # The launcher was to say it, and is gone.
    assert said(slurm.folder, StopExited, "gpt") == []
