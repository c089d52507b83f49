"""Locks and registrations of a node: dead processes, forks, files that were taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from support.waiting import wait_until
from tocsin.emitter.node.lock import NodeLock
from tocsin.emitter.node.registry import NODE_FOLDER, NodeFolder, Registration, job_pids, started_at

RUN = Registration(run_id="r1", incarnation="i1", bus="embedded:/x/bus.db", prefix="tocsin")

HOLDS = """
import sys, time
from pathlib import Path
from tocsin.emitter.node.lock import NodeLock
lock = NodeLock(Path(sys.argv[1]))
assert lock.acquire()
print("taken", flush=True)
time.sleep(60)
"""


def test_one_has_it_and_the_next_takes_it(tmp_path: Path) -> None:
    one, two = NodeLock(tmp_path / "a.lock"), NodeLock(tmp_path / "a.lock")
    assert not two.is_taken()
    assert [one.acquire(), one.acquire(), one.held] == [True] * 3
    assert [two.acquire(), two.is_taken(), one.is_taken()] == [False, True, True]
    one.release()
    one.release()
    assert not (tmp_path / "a.lock").exists()
    assert [two.acquire(), one.acquire()] == [True, False]
    two.release()


def test_a_lock_of_a_file_that_has_no_name_any_more_does_not_count(tmp_path: Path) -> None:
    one, two = NodeLock(tmp_path / "a.lock"), NodeLock(tmp_path / "a.lock")
    assert one.acquire()
    (tmp_path / "a.lock").unlink()
    assert two.acquire()
    two.release()
    one.release()


def test_a_folder_that_has_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NodeLock(tmp_path / "none/a.lock").acquire()


def test_the_lock_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    lock = NodeLock(path)
    with subprocess.Popen([sys.executable, "-c", HOLDS, path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"taken\n"
        assert not lock.acquire()
        other.send_signal(signal.SIGKILL)
        wait_until(lock.acquire)
    lock.release()


def test_a_forked_child_neither_holds_nor_ends_the_lock(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path / "a.lock")
    assert lock.acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lock.release()
        os.write(write, b"held" if lock.held else b"free")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    assert os.read(read, 4) == b"free"
    other = NodeLock(tmp_path / "a.lock")
    assert not other.acquire()
    lock.release()
    assert other.acquire()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    other.release()


def test_the_key_is_the_run_and_where_its_records_go() -> None:
    assert RUN.key == replace(RUN, incarnation="i2", job_pid=5).key
    assert RUN.key != replace(RUN, run_id="r2").key
    assert RUN.key != replace(RUN, bus="embedded:/y/bus.db").key
    kafka = replace(RUN, bus="kafka://a:1,b:1")
    assert kafka.key == replace(RUN, bus="kafka://b:1,a:1").key
    assert kafka.key != replace(kafka, prefix="vision").key


def test_registrations_are_those_of_living_processes(tmp_path: Path) -> None:
    folder = NodeFolder.from_environ({NODE_FOLDER: str(tmp_path / "node")})
    entry = folder.leave(replace(RUN, at_ms=2))
    older = folder.leave(replace(RUN, run_id="r0", at_ms=1))
    assert [found.run_id for found in folder.registrations()] == ["r0", "r1"]
    entry.job_is(77)
    assert job_pids(folder.registrations()) == {77}
    assert folder.registrations()[1] == entry.registration
    # The number of a process that has ended is another's now.
    entry.write(replace(entry.registration, started=1))
    assert [found.run_id for found in folder.registrations()] == ["r0"]
    assert not entry.path.exists()
    older.remove()
    older.remove()
    assert folder.registrations() == []


def test_lock_files_of_the_killed_are_taken_away(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    held, agent = folder.sampling("held"), folder.agent("held")
    assert held.acquire()
    assert agent.acquire()
    (tmp_path / "left.lock").touch()
    (tmp_path / "left.agent").touch()
    entry = folder.leave(RUN)
    assert {path.name for path in tmp_path.iterdir()} == {
        "held.lock", "held.agent", entry.path.name,
    }  # fmt: skip
    assert held.is_taken()
    held.release()
    agent.release()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_id": 5}', '{"x": "y"}', '{"run_id": "r"}'])
def test_files_that_are_no_registrations_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.run").write_text(text)
    (tmp_path / "other").write_text("x")
    assert NodeFolder(tmp_path).registrations() == []


def test_when_a_process_started() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid())
    assert started_at(2**22 + 1) is None


def test_without_a_variable_the_folder_is_the_user_s() -> None:
    # A path of pytest's own may be too long for a socket.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = NodeFolder.from_environ({"XDG_RUNTIME_DIR": short})
        assert folder.path == Path(short) / f"tocsin-{os.getuid()}/node"
        assert folder.path.parent.stat().st_mode & 0o077 == 0
