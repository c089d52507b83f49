"""An environment for a large Python program of others, made once, in `~/.cache/tocsin`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def interpreter(name: str, version: str, requirement: str, variable: str) -> Path:
    """The Python that has the program; it is fetched from the package index if need be.

    The environment's `variable` names one that is there. Without either, the test is skipped and
    says why.
    """
    if given := os.environ.get(variable):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tocsin"
    folder = cache / f"{name}-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            python = str(folder / "bin/python")
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [python, "-m", "pip", "install", "--quiet", f"{requirement}=={version}"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=500)
                if done.returncode != 0:
                    why = done.stderr.strip()[-300:]
                    pytest.skip(f"{name} {version} cannot be installed: {why}")
            (folder / "complete").touch()
    return folder / "bin/python"
