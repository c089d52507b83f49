"""Where the processes that tests start find their modules."""

from __future__ import annotations

import os
from pathlib import Path

STARTUP = Path(__file__).parent / "startup"
"""Has the compiler of PyTorch imported late: see the module there."""


def python_path(*folders: Path) -> str:
    """A PYTHONPATH of these, before that of the tests' own process."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def startup_environ() -> dict[str, str]:
    """For a training whose `sitecustomize` is its user's own: where it finds that one, to run it.
    Nothing in `make torture`, where none has it."""
    if os.environ.get("TOCSIN_TORTURE") == "1":
        return {}
    return {"STARTUP_OF_TESTS": str(STARTUP / "sitecustomize.py")}
