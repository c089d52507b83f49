"""What must not reach the user's code, nor pile up in it: hooks of the process, forks, outages."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from support.records.stops import StopSigner
from support.trainings import captured
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import BusUnavailable, Partition, Record
from tocsin.emitter.hooks import on_import
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.run import Run
from tocsin.emitter.send.encoding import Address
from tocsin.emitter.send.sender import Sender
from tocsin.emitter.stop import exit_points, listener, side_group
from tocsin.emitter.stop.exception import StopTraining
from tocsin.emitter.stop.verification import CommandVerdict, Facts, SignedCommand
from tocsin.emitter.training.session import Session
from tocsin.emitter.training.user_arrays import as_array
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.runs import Heartbeat, RunEnded
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.signing import TrustedKeys
from tocsin.schemas.topics import Topics

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")


def ignore(data: Data) -> None:
    """An emitter that is not looked at."""


def test_sessions_leave_nothing_in_the_process() -> None:
    before = sys.excepthook
    for _ in range(3):
        session = Session({}, Isolation())
        assert sys.excepthook is not before
        session.end()
        assert sys.excepthook is before


def test_a_session_leaves_a_later_excepthook_of_the_user() -> None:
    before = sys.excepthook
    try:
        session = Session({}, Isolation())
        sys.excepthook = mine = lambda kind, error, traceback: None
        session.end()
        assert sys.excepthook is mine
    finally:
        sys.excepthook = before


def test_what_fails_at_the_end_does_not_keep_the_rest_of_the_end_from_happening(
    tmp_path: Path,
) -> None:
    def fail(_: float) -> None:
        raise OSError("planted")

    isolation = Isolation()
    session = Session(captured.environment(tmp_path), isolation)
    run = Run(session)
    isolation.switch_off("api", "planted")
    session.start()
    session.announce({})
    closed: list[bool] = []
    session.before_end = fail
    session.on_exit = lambda: closed.append(True)
    run.finish()
    assert closed == [True]
    assert len(captured.said(tmp_path).of(RunEnded)) == 1


def test_an_edge_that_fails_is_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    rank = exit_points.started(ORIGIN, ignore)
    try:
        rank.awake = True

        def fail(exit_point: object, step: int) -> None:
            raise OSError("planted")

        monkeypatch.setattr(rank, "at_exit_point", fail)
        exit_points.check("optimizer_step", 3)
        assert rank.step == 3
    finally:
        exit_points.finished()


def test_a_stop_comes_through_without_a_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signer = StopSigner()
    signer.key.write(tmp_path / "keys" / "actions.key")
    monkeypatch.setenv("TOCSIN_STOP_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TOCSIN_LAUNCHER", raising=False)
    monkeypatch.delenv("TOCSIN_STOP", raising=False)
    rank = exit_points.started(ORIGIN, ignore)
    try:
        rank.receive(signer.sign(signer.command("r1", "i1")))
        with open(os.devnull, "w") as closed:
            pass
        monkeypatch.setattr(sys, "stderr", closed)
        with pytest.raises(StopTraining):
            exit_points.check("optimizer_step", 0)
    finally:
        exit_points.finished()


def test_what_fails_before_a_wrapped_call_does_not_keep_it_from_being_made() -> None:
    def fail() -> None:
        raise OSError("planted")

    assert side_group._before(lambda: "made", fail)() == "made"


def test_waiting_for_torch_passes_over_finders_of_the_old_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = on_import._Waiting()
    monkeypatch.setattr(sys, "meta_path", [object(), waiting])
    assert waiting.find_spec("torch") is None


def test_a_tensor_of_a_type_that_numpy_lacks_is_recorded() -> None:
    found = as_array(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert (found.dtype, found.tolist()) == (np.dtype(np.float32), [1.5, -2.0])
    assert as_array(torch.tensor([1.5], dtype=torch.float64)).dtype == np.float64
    assert as_array(torch.tensor([True, False])).dtype == np.bool_


def sender(tmp_path: Path, **more: object) -> Sender:
    address = Address(topics=Topics(), origin=ORIGIN, source="/runs/r1", create_topics=True)
    return Sender(lambda: EmbeddedBus(tmp_path / "bus.db"), address, **more)  # type: ignore[arg-type]  # by name


def test_a_forked_child_sends_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    sending = sender(tmp_path)
    sending.start()
    sending.publish(Heartbeat(run_id="r1", incarnation="i1"))
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        sending.publish(Heartbeat(run_id="r1", incarnation="i1"))
        os._exit(int(sending.flush() or sending.close()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sending.close()
    assert len(captured.said(tmp_path).of(Heartbeat)) == 1


def test_a_heartbeat_that_fails_does_not_end_the_heartbeats(tmp_path: Path) -> None:
    calls: list[float] = []

    def beat() -> Heartbeat:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return Heartbeat(run_id="r1", incarnation="i1")

    sending = sender(tmp_path, heartbeat=beat, heartbeat_s=0.02)
    sending.start()
    wait_until(lambda: sending.records >= 1)
    assert sending.close()
    assert len(calls) >= 2


LATE = """
import asyncio, atexit, sys
from pathlib import Path
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.emitter.send.encoding import Address
from tocsin.emitter.send.sender import Sender
from tocsin.schemas.records.runs import Heartbeat
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.topics import Topics

class Remote(EmbeddedBus):
    async def __aenter__(self):
        await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        return await super().__aenter__()

origin = RecordOrigin(run_id="r1", incarnation="i1")
address = Address(topics=Topics(), origin=origin, source="/runs/r1", create_topics=True)
sending = Sender(lambda: Remote(Path(sys.argv[1])), address)
sending.start()

def end():
    sending.publish(Heartbeat(run_id="r1", incarnation="i1"))
    print(sending.close())

atexit.register(end)
"""


def test_a_bus_that_is_reached_only_at_the_exit_gets_the_last_records(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path / "bus.db")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("True\n", "")


class NoHands:
    """Has nothing to do."""

    def facts(self) -> Facts:
        return Facts("r1", "i1", TrustedKeys.read([]))

    def obey(self, signed: SignedCommand, command: StopRequested) -> None: ...
    def join(self, command: StopRequested) -> None: ...
    def missed(self, command: StopRequested, why: str) -> None: ...
    def refuse(self, verdict: CommandVerdict) -> None: ...


class Away:
    """A reader of a bus that is away for a while, comes back, and goes away again."""

    def __init__(self) -> None:
        self.polls = 0

    async def poll(self, **more: object) -> list[Record]:
        self.polls += 1
        if self.polls > 8:
            raise asyncio.CancelledError
        if self.polls == 5:
            return []
        raise BusUnavailable("no broker")

    async def ends(self, partitions: list[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, 0)

    async def close(self) -> None: ...


async def test_an_outage_of_the_bus_is_one_line_not_one_each_half_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_PAUSE_S", 0.0)
    listening = listener.Listener(Topics(), "r1", NoHands())
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await listening._read(Away(), 0)  # type: ignore[arg-type]  # the part of it that is used
    assert [each.message for each in caplog.records] == [
        "the control topic cannot be read now: no broker"
    ] * 2
