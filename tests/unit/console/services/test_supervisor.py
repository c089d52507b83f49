"""`tocsin rules --workers`: processes that are started again, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from support.waiting import until
from tocsin.console.services import supervisor
from tocsin.console.services.supervisor import Restarts, Supervisor, worker_commands
from tocsin.schemas.process.own_python import python_command

LIVES = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LIVES


def test_pauses_grow_and_begin_anew_after_a_sound_run() -> None:
    restarts = Restarts()
    assert [restarts.ended(1, 0.1) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.ended(-9, 3600.0) == 1
    assert Restarts().ended(2, 0.1) is None, "a wrong configuration stays wrong"
    assert restarts.ended(2, 0.1) == 2, "unless it worked before: then the file has changed"


def test_each_worker_has_a_port_and_a_name_of_its_own() -> None:
    words = ["rules", "--bus", "kafka://b:9092"]
    found = worker_commands(words, workers=2, parent=7, http=("::1", 9464), member="node-1")
    python = list(python_command("tocsin.console"))
    assert found == [
        [*python, *words, "--parent", "7", "--http", "[::1]:9464", "--member", "node-1-0"],
        [*python, *words, "--parent", "7", "--http", "[::1]:9465", "--member", "node-1-1"],
    ]
    (alone,) = worker_commands(words, workers=1, parent=7, http=None, member=None)
    assert alone == [*python, *words, "--parent", "7"]


def pids(*files: Path) -> list[list[int]]:
    return [[int(pid) for pid in f.read_text().split()] if f.exists() else [] for f in files]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("program", "code"), [(LIVES, 0), (DEAF, 1)], ids=["willing", "deaf"])
async def test_one_that_is_killed_is_started_again_and_all_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(Restarts, "ended", lambda self, code, ran_s: 0.01)
    files = (tmp_path / "a", tmp_path / "b")
    commands = [[sys.executable, "-S", "-c", program, str(file)] for file in files]
    task = asyncio.create_task(Supervisor(commands, end_s=0.3).run())
    await until(lambda: all(pids(*files)))
    (first,), (second,) = pids(*files)

    os.kill(first, signal.SIGKILL)
    await until(lambda: len(pids(*files)[0]) == 2)
    again = pids(*files)[0][1]
    assert pids(*files)[1] == [second], "the other one is left alone"
    os.kill(os.getpid(), signal.SIGTERM)

    assert await task == code
    assert not any(map(alive, (first, second, again)))


async def test_a_wrong_command_line_ends_all(tmp_path: Path) -> None:
    file = tmp_path / "a"
    wrong = [sys.executable, "-S", "-c", "raise SystemExit(2)"]
    good = [sys.executable, "-S", "-c", LIVES, str(file)]
    assert await Supervisor([good, wrong], end_s=5).run() == 2
    assert not any(alive(pid) for row in pids(file) for pid in row)
