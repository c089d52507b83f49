"""What a test that fails leaves to the next one: `support/plugins/failed_tests.py`."""

from __future__ import annotations

from pathlib import Path

from support.plugins.inner_pytest import outcomes

CONFTEST = """
from support.plugins import failed_tests

def pytest_configure(config):
    config.pluginmanager.register(failed_tests)
"""

CASES = """
import pathlib, subprocess, sys, threading
from support.processes.forking import Forked

SLEEPS = "import time; time.sleep(2)"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"

readers = []

def read(process):
    with process.stdout:
        process.stdout.read()

def test_it_fails():
    process = Forked([sys.executable, "-c", STARTS], stdout=subprocess.PIPE)
    readers.append(threading.Thread(target=read, args=(process,)))
    readers[0].start()
    child = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not child.read_text():
        pass
    pathlib.Path("started").write_text(f"{process.pid} {child.read_text()}")
    raise AssertionError("on purpose")

def test_the_next_one():
    files = [pathlib.Path(f"/proc/{pid}/cmdline")
             for pid in pathlib.Path("started").read_text().split()]
    alive = [file for file in files if file.exists() and file.read_bytes()]
    readers.pop().join()
    assert alive == []
"""


def test_a_failure_stays_one_failure_and_ends_its_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    found, printed = outcomes(tmp_path, "-p", "no:asyncio", "-W", "error")
    assert found == {
        "test_it_fails": "FAILED",
        "test_the_next_one": "PASSED",
    }, printed
