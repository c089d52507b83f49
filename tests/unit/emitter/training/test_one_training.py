"""Ranks that were launched apart are in one incarnation, whichever way they began."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.launches import environment, start
from support.records.telemetry import frames
from support.records.telemetry import said as events_of
from support.trainings.captured import said
from tocsin.schemas.records.runs import PhaseMark, RunStarted

TRAIN = """
import torch
import torch.distributed as dist

def train(steps):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        dist.all_reduce(torch.zeros(1))
        optimizer.step()

torch.set_num_threads(1)
"""

STARTS = """
from tocsin.emitter import start
dist.init_process_group("gloo")
for _ in range(2):
    with start("r1", services=False) as run:
        # Said before the first step: it must not begin a training of this rank alone.
        run.record("scores", [1.0, 2.0], kind="scores")
        train(3)
dist.destroy_process_group()
"""

LAUNCHED = """
from tocsin.emitter import start
run = start()
with run.phase("preparation"):
    run.record("scores", [1.0, 2.0], kind="scores")
dist.init_process_group("gloo")
train(20)
dist.destroy_process_group()
"""


def place(rank: int, port: int) -> dict[str, str]:
    """What a scheduler says to the rank on the node of that number."""
    return {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "SLURM_JOB_ID": "4711",
        "SLURM_NODEID": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_start_after_the_process_group_was_made_and_once_more(
    tmp_path: Path, short_path: Path
) -> None:
    script, port = tmp_path / "train.py", free_port()
    script.write_text(TRAIN + STARTS)
    ranks = []
    for rank in range(2):
        # Two nodes share no folder: what they have in common is the process group.
        runtime = short_path / str(rank)
        runtime.mkdir(mode=0o700)
        environ = {
            **environment(tmp_path), **place(rank, port), "XDG_RUNTIME_DIR": str(runtime),
            "TOCSIN_BUS": f"embedded:{tmp_path}/bus.db",
        }  # fmt: skip
        command = [sys.executable, str(script)]
        ranks.append(subprocess.Popen(command, env=environ, cwd=tmp_path))
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    by_rank: dict[int, list[str]] = {0: [], 1: []}
    for started in said(tmp_path).of(RunStarted):
        by_rank[started.rank].append(started.incarnation)
    assert by_rank[0] == by_rank[1]
    assert len(set(by_rank[0])) == 2


@pytest.mark.torture
@pytest.mark.timeout(180)
def test_the_launchers_of_two_nodes(tmp_path: Path) -> None:
    script, port = tmp_path / "train.py", free_port()
    script.write_text(TRAIN + LAUNCHED)
    url = f"embedded:{tmp_path}/bus.db"
    jobs = []
    for node in range(2):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        command = (sys.executable, str(script))
        jobs.append(start(folder, *command, environ=place(node, port), bus=url))
    assert [job.wait(120) for job in jobs] == [0, 0], [job.err for job in jobs]
    started = events_of(tmp_path, RunStarted)
    ranks = [each for each in started if each.role == "trainer"]
    launchers = {each.incarnation for each in started if each.role == "launcher"}
    assert sorted(each.rank for each in ranks) == [0, 1]
    marks = [each for each in events_of(tmp_path, PhaseMark) if each.name == "preparation"]
    assert len(marks) == 4
    early = [frame.origin for frame in frames(tmp_path) if frame.collection == "scores"]
    assert sorted(origin.rank for origin in early) == [0, 1]
    assert {mark.incarnation for mark in marks} == {ranks[0].incarnation}
    assert {origin.incarnation for origin in early} == {ranks[0].incarnation}
    (incarnation,) = {each.incarnation for each in ranks}
    assert incarnation in launchers
    assert len(launchers) == 2
