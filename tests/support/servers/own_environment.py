"""An environment for a large Python program of others, made once, in `~/.cache/tocsin`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import pytest


def interpreter(name: str, version: str, requirement: str, variable: str) -> Path:
    """The Python that has the program; it is fetched from the package index if need be.

    The environment's `variable` names one that is there. Without either, the test is skipped and
    says why.
    """
    if given := os.environ.get(variable):
        return Path(given)
    return _made(name, version, [[f"{requirement}=={version}"]])


def interpreter_beside(
    name: str, requirements: Sequence[str], alone: Sequence[str], variable: str
) -> Path:
    """As `interpreter`, of a Python that has all that this one has, too, in the same versions.

    So there is one torch for both. `alone` are installed without what they depend on: whatever they
    need and the others do not bring must be among `requirements`.
    """
    if given := os.environ.get(variable):
        return Path(given)
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    here = sorted(f"{one.name}=={one.version}" for one in metadata.distributions(path=folders))
    contents = "\n".join((*requirements, *alone, *here, *folders))
    version = hashlib.sha256(contents.encode()).hexdigest()[:12]
    # What is here from a folder, such as tocsin, is no requirement of theirs.
    kept = [line for line in here if not line.startswith(("tocsin==", "pip==", "setuptools=="))]
    return _made(
        name, version, [requirements, ["--no-deps", *alone]], folders=folders, constraints=kept
    )


def _made(
    name: str,
    version: str,
    installs: Iterable[Sequence[str]],
    *,
    folders: Sequence[str] = (),
    constraints: Sequence[str] = (),
) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tocsin"
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"{name}-{version}-{python_version}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run(name, version, [sys.executable, "-m", "venv", str(folder)])
            # With `.pth` files of theirs, which a plain line would leave out.
            lines = [f"import site; site.addsitedir({path!r})\n" for path in folders]
            beside = folder / "lib" / f"python{python_version}" / "site-packages" / "beside.pth"
            beside.write_text("".join(lines))
            (folder / "constraints.txt").write_text("\n".join(constraints))
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
            for words in installs:
                held = ["--constraint", str(folder / "constraints.txt")]
                _run(name, version, [*pip, *held, *words])
            (folder / "complete").touch()
    return folder / "bin/python"


def _run(name: str, version: str, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode != 0:
        pytest.skip(f"{name} {version} cannot be installed: {done.stderr.strip()[-300:]}")
