"""A stop takes all ranks out of the loop at the same step, whenever it comes.

Gloo ranks under a launcher. They catch the stop and train again, so one launch is stopped many
times: four ranks twice in CI, eight a hundred times by `make torture`, at steps from
`TOCSIN_STOP_SEED`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from support.processes.launches import Launched, start
from support.records.stops import StopSigner, outgoing
from support.records.telemetry import said, wait_for
from support.waiting import HANGS_S, wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.records.stops.commands import StopEscalated, StopExited, StopLeft, StopRequested

RANKS = 4
SEED = int(os.environ.get("TOCSIN_STOP_SEED", "20261123"))


def train(
    folder: Path, signer: StopSigner, rounds: int, *arguments: str, ranks: int = RANKS
) -> Launched:
    """So many ranks, stopped so many times."""
    return start(
        folder,
        *(sys.executable, "-m", "support.ranks.stopped", str(folder), str(ranks), str(rounds)),
        *arguments,
        signer=signer,
    )


def wait_for_step(folder: Path, number: int, step: int) -> None:
    """Until rank 0 has made that step of that round."""
    path, wanted = folder / "steps", f"{number} {step}"
    wait_until(
        lambda: path.exists() and wanted in path.read_text().splitlines(),
        what=f"round {number} comes to step {step}",
    )


def stop(
    folder: Path,
    signer: StopSigner,
    *,
    trained: int = 1,
    grace_s: float = HANGS_S,
    ranks: int = RANKS,
) -> StopRequested:
    """A command for the incarnation in which all ranks train for the `trained`-th time."""
    started = wait_for(folder, RunStarted, 1 + trained * ranks)
    newest = [each for each in started if each.role == "trainer"][-ranks:]
    (incarnation,) = {each.incarnation for each in newest}
    command = signer.command("r1", incarnation, grace_s=grace_s)

    async def publish() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            producer = await bus.producer()
            await producer.publish([outgoing(signer.sign(command), "r1")])
            await producer.close()

    asyncio.run(publish())
    return command


@pytest.mark.parametrize(
    ("rounds", "ranks"),
    [
        (2, RANKS),
        pytest.param(100, 8, marks=[pytest.mark.torture, pytest.mark.timeout(3600)]),
    ],
)
def test_all_ranks_leave_at_the_same_step(tmp_path: Path, rounds: int, ranks: int) -> None:
    signer, chance = StopSigner(), random.Random(SEED)
    job = train(tmp_path, signer, rounds, ranks=ranks)
    commands = []
    for number in range(rounds):
        wait_for_step(tmp_path, number, chance.randrange(60))
        commands.append(stop(tmp_path, signer, trained=number + 1, ranks=ranks).command_id)
    job.wait()
    left: dict[str, dict[int, int | None]] = {}
    for each in said(tmp_path, StopLeft):
        left.setdefault(each.command_id, {})[each.rank] = each.step
    assert list(left) == commands, f"seed {SEED}"
    for command_id, steps in left.items():
        assert set(steps) == set(range(ranks)), f"seed {SEED}: {command_id}"
        assert len(set(steps.values())) == 1, f"seed {SEED}: {steps}"
    exits = [each.how for each in said(tmp_path, StopExited)]
    assert exits == ["edge"] * rounds
    assert said(tmp_path, StopEscalated) == []


def test_a_rank_that_does_not_come_is_named_and_the_launcher_escalates(tmp_path: Path) -> None:
    signer = StopSigner()
    job = train(tmp_path, signer, 1, "--sleeps", "3")
    # One step further nobody comes: its gradients need those of rank 3.
    wait_for_step(tmp_path, 0, 19)
    stop(tmp_path, signer, grace_s=1.0)
    job.wait()
    (escalated,) = said(tmp_path, StopEscalated)
    assert escalated.how == "SIGTERM"
    assert "3" in escalated.reason
    assert "did not leave within 1 s" in escalated.reason
    (exited,) = said(tmp_path, StopExited)
    assert exited.how == "SIGTERM"


def test_a_rank_that_is_dead_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    signer = StopSigner()
    job = train(tmp_path, signer, 1)
    wait_for_step(tmp_path, 0, 10)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    # Else the others may fail for want of it, and end the job, before the command comes.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    os.kill(pids[2], signal.SIGKILL)
    stop(tmp_path, signer, grace_s=1.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    job.wait()
    (exited,) = said(tmp_path, StopExited)
    assert exited.how in ("edge", "SIGTERM", "itself")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
