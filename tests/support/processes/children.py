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
