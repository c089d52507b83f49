"""Tests of the tests' own plugins: pytest on a folder of its own, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.processes.children import python_path

TESTS = Path(__file__).parents[2]


def outcomes(folder: Path, *options: str) -> tuple[dict[str, str], str]:
    """PASSED or FAILED for each test of the folder by name, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir=.",
         *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    found = {
        line.rpartition("::")[2].split()[0]: line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED"))
    }
    return found, done.stdout
