"""The helper as a fork of the launcher, and when it is rather a Python started anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SERVING = """
import asyncio, os, sys
from pathlib import Path
from tocsin.emitter.launch.helper import HelperProcess, helper_environment
from tocsin.emitter.process.process_group import Reaper

def serve():
    print("session", os.getsid(0) == os.getpid(), "nice", os.nice(0))
    print("open", sorted(os.listdir("/proc/self/fd"))[:3], os.environ["OMP_NUM_THREADS"])
    print("said", sys.stdin.read().split())
    return 3

async def main(helper, reaper):
    helper.drain(1)
    closing = asyncio.create_task(helper.close(20))
    while not closing.done():
        reaper.reap()
        await asyncio.sleep(0.01)

reaper = Reaper()
log = Path("logs") / "helper.log"
helper = HelperProcess(["false"], helper_environment(os.environ), reaper, log, print)
helper.fork(serve)
asyncio.run(main(helper, reaper))
print(helper.returncode, oct(log.parent.stat().st_mode)[-3:])
"""


def run(code: str, folder: Path) -> str:
    """What that code prints, in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_a_forked_helper_is_as_one_that_was_started(tmp_path: Path) -> None:
    assert run(SERVING, tmp_path) == "3 700\n"
    assert (tmp_path / "logs" / "helper.log").read_text().splitlines() == [
        "session True nice 3",
        "open ['0', '1', '2'] 1",
        "said ['drain', '1.0']",
    ]


def test_what_a_fork_raises_is_in_its_log_and_never_in_the_launcher(tmp_path: Path) -> None:
    code = SERVING.replace("return 3", "raise ValueError('no rule')")
    assert run(code, tmp_path) == "1 700\n"
    assert "ValueError: no rule" in (tmp_path / "logs" / "helper.log").read_text()


def test_a_process_with_threads_or_modules_of_the_user_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("mean = None\n")
    code = "from tocsin.emitter.launch.forked import can_fork\n{}\nprint(can_fork())"
    assert run(code.format(""), tmp_path) == "True\n"
    assert run(code.format("import statistics"), tmp_path) == "False\n"
    assert run(code.format("import os; os.close(0)"), tmp_path) == "False\n"
    thread = "import threading, time; threading.Thread(target=time.sleep, args=[9], daemon=True)"
    assert run(code.format(f"{thread}.start()"), tmp_path) == "False\n"


def test_numpy_starts_no_threads_where_a_fork_follows(tmp_path: Path) -> None:
    code = (
        "from tocsin.emitter.launch.forked import can_fork, importing\n"
        "import os\n"
        "with importing():\n"
        "    import gc, numpy; assert not gc.isenabled()\n"
        "print(can_fork(), gc.isenabled(), 'OPENBLAS_NUM_THREADS' in os.environ)\n"
        "print(gc.get_freeze_count() > 0)"
    )
    assert run(code, tmp_path) == "True True False\nTrue\n"
