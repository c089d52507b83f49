"""The guard of the unit tests' processor time: `support/plugins/cpu_times.py`."""

from __future__ import annotations

from pathlib import Path

from support.plugins.inner_pytest import outcomes

CONFTEST = """
from support.plugins import cpu_times
cpu_times.UNIT_S = 0.05

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")
    config.pluginmanager.register(cpu_times)
"""

CASES = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.3: pass"

def test_quick():
    time.sleep(0.3)

def test_itself():
    exec("import time\\nend = time.process_time() + 0.3\\nwhile time.process_time() < end: pass")

def test_its_child():
    subprocess.run([sys.executable, "-c", BUSY], check=True)

@pytest.mark.slow
def test_that_says_so():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


def test_a_unit_test_that_takes_long_fails_unless_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "unit" / "test_cases.py").write_text(CASES)
    found, printed = outcomes(tmp_path)
    assert found == {
        "test_quick": "PASSED",
        "test_itself": "FAILED",
        "test_its_child": "FAILED",
        "test_that_says_so": "PASSED",
    }, printed
    assert "CPU seconds" in printed
