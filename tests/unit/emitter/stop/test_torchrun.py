"""Several ranks under the real torchrun: one stop, one step, no restart."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from support.processes.launches import TESTS, Launched, start
from support.records.stops import StopSigner, outgoing
from support.records.telemetry import said, wait_for
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.records.runs import CaptureDegraded, RunStarted
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopLeft, StopRequested

RANKS = str(TESTS / "support" / "ranks" / "until_stopped.py")


def torchrun(folder: Path, signer: StopSigner, *arguments: str) -> Launched:
    """Two ranks on this machine, with two restarts to spare."""
    return start(
        folder,
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", "--max-restarts", "2", RANKS, *arguments),
        signer=signer,
    )


def trainers(folder: Path) -> list[RunStarted]:
    return [each for each in said(folder, RunStarted) if each.role == "trainer"]


def stop(folder: Path, signer: StopSigner, *, grace_s: float = 20.0) -> StopRequested:
    """Wait for both ranks, then send a command for their incarnation."""
    wait_for(folder, RunStarted, 3)
    one, two = trainers(folder)
    assert one.incarnation == two.incarnation
    command = signer.command("r1", one.incarnation, grace_s=grace_s)

    async def publish() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            producer = await bus.producer()
            await producer.publish([outgoing(signer.sign(command), "r1")])
            await producer.close()

    asyncio.run(publish())
    return command


@pytest.mark.torture  # in CI: on Kafka, by the action worker's stop, in test_must_hold
def test_both_ranks_leave_at_the_same_step_and_are_not_started_again(tmp_path: Path) -> None:
    signer = StopSigner()
    job = torchrun(tmp_path, signer)
    command = stop(tmp_path, signer)
    assert job.wait() == 79
    left = {each.rank: each for each in said(tmp_path, StopLeft)}
    assert set(left) == {0, 1}
    assert left[0].step == left[1].step
    assert {each.command_id for each in left.values()} == {command.command_id}
    assert {each.rank for each in said(tmp_path, StopAcknowledged)} == {0, 1}
    assert [each.restart_count for each in trainers(tmp_path)] == [0, 0]
    assert job.out.count("begin rank") == 2
    assert said(tmp_path, CaptureDegraded) == []
    summary = job.summary()
    assert (summary["outcome"], summary["stop"]["how"]) == ("stopped", "edge")
    assert summary["stop"]["step"] == left[0].step


@pytest.mark.torture
def test_ranks_that_do_not_step_together_leave_each_at_its_own_exit_point(tmp_path: Path) -> None:
    signer = StopSigner()
    job = torchrun(tmp_path, signer, "--alone", "100")
    wait_for(tmp_path, CaptureDegraded, 1)
    stop(tmp_path, signer)
    assert job.wait() == 79
    # torchrun ends the other one as soon as the first has left.
    assert {each.rank for each in said(tmp_path, StopLeft)} >= {1}
    assert len(trainers(tmp_path)) == 2


@pytest.mark.torture
def test_ranks_that_are_left_alone_end_as_ever(tmp_path: Path) -> None:
    job = torchrun(tmp_path, StopSigner(), "--steps", "200", "--pause-ms", "0")
    assert job.wait() == 0
    assert job.out.count("end rank") == 2
    assert said(tmp_path, CaptureDegraded) == []
    assert job.summary()["steps"] == 200
