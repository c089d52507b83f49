"""What README.md tells a newcomer is done, command by command, and is true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "first-ten-minutes"


@pytest.mark.timeout(400)
def test_the_readme_is_true_in_this_environment() -> None:
    _read_it("--here", timeout_s=380)


@pytest.mark.torture
@pytest.mark.timeout(3_600)
def test_the_readme_is_true_in_a_fresh_environment() -> None:
    _read_it(timeout_s=3_500)


def _read_it(*arguments: str, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # Of a job that is well two epochs are as good as eight.
        env={**os.environ, "EPOCHS": "2"},
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is as README.md says" in done.stdout
