"""A run that was stopped before: its next job is told why, or is held back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from support.processes.launches import start
from support.records.stops import StopSigner, outgoing
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition
from tocsin.emitter.launch.predecessor import Predecessor, stopped_before
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.run_view import RunView, StopView
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.topics import Topics, telemetry_partition

State = Literal["left", "exited", "refused", "acknowledged"]


def ended(folder: Path, *, state: State | None, run_id: str = "r1", reason: str = "a NaN") -> None:
    """The bus of a run whose newest incarnation was stopped, or was not."""
    signer, topics = StopSigner(), Topics()
    command = signer.command(run_id, "i1", reason=reason)
    stop = None if state is None else StopView(state=state, command_id=command.command_id)
    view = RunView(run_id=run_id, incarnation="i1", state="ended", stop=stop)
    event = Event.wrap(view, id="1", source="/rules", time_ms=1)
    place = Partition(topics.runs, telemetry_partition(run_id))

    async def go() -> None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            await bus.init(topics.specs())
            producer = await bus.producer()
            record = Outgoing(place, run_id.encode(), event.encode(), meta_of(event).headers())
            await producer.publish([record, outgoing(signer.sign(command), run_id)])
            await producer.close()

    asyncio.run(go())


def found(folder: Path) -> Predecessor | None:
    async def go() -> Predecessor | None:
        async with EmbeddedBus(folder / "bus.db") as bus:
            return await stopped_before(bus, Topics(), "r1")

    return asyncio.run(go())


def test_the_reason_of_the_stop_is_found(tmp_path: Path) -> None:
    ended(tmp_path, state="exited")
    assert found(tmp_path) == Predecessor("i1", "a NaN")


@pytest.mark.parametrize("state", [None, "refused", "acknowledged"])
def test_a_run_that_was_not_stopped_has_none(tmp_path: Path, state: State | None) -> None:
    ended(tmp_path, state="exited")
    ended(tmp_path, state="exited", run_id="r2")
    ended(tmp_path, state=state)
    assert found(tmp_path) is None


JOB = "import os; open('told', 'w').write(os.environ.get('TOCSIN_AFTER_STOP', 'nothing'))"


@pytest.mark.parametrize(("state", "told"), [("exited", "a NaN"), (None, "nothing")])
def test_the_next_job_is_told_why_and_goes_on(
    tmp_path: Path, state: State | None, told: str
) -> None:
    ended(tmp_path, state=state)
    job = start(tmp_path, sys.executable, "-c", JOB.replace("told'", f"{tmp_path}/told'", 1))
    assert job.wait() == 0
    assert (tmp_path / "told").read_text() == told
    assert ("tocsin: this run was stopped before: a NaN" in job.err) == (state is not None)
    (begun,) = job.observed("tocsin.run.started")[:1]
    assert begun["after_stop"] == ("a NaN" if state else "")


def test_with_hold_it_is_not_started_however_often(tmp_path: Path) -> None:
    ended(tmp_path, state="exited")
    for _ in range(2):
        job = start(tmp_path, "touch", str(tmp_path / "ran"), hold="yes")
        assert job.wait() == 79
        assert "it is not started again (stop.on_restart: hold)" in job.err
    assert not (tmp_path / "ran").exists()
    assert job.observed("tocsin.run.started") == []


def test_with_hold_a_run_that_was_not_stopped_starts(tmp_path: Path) -> None:
    ended(tmp_path, state=None)
    job = start(tmp_path, "touch", str(tmp_path / "ran"), hold="yes")
    assert job.wait() == 0
    assert (tmp_path / "ran").exists()


STARTS = """
import os
from tocsin.emitter import start
run = start("r1", services=False)
print("after", os.environ.get("TOCSIN_AFTER_STOP"))
"""


@pytest.mark.parametrize(
    ("on_restart", "state", "code", "printed"),
    [
        ("hold", "exited", 79, ""),
        ("hold", None, 0, "after None\n"),
        ("go_on", "exited", 0, "after a NaN\n"),
    ],
)
def test_without_a_launcher_start_asks_too(
    tmp_path: Path, on_restart: str, state: State | None, code: int, printed: str
) -> None:
    ended(tmp_path, state=state)
    (tmp_path / "tocsin.yaml").write_text(
        f"version: 1\nbus: embedded:{tmp_path}/bus.db\nstop: {{on_restart: {on_restart}}}\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**kept, "TOCSIN_CONFIG": str(tmp_path / "tocsin.yaml")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
    assert ("this run was stopped before: a NaN" in done.stderr) == (state is not None)
    assert ("not started again (stop.on_restart: hold)" in done.stderr) == (code == 79)
