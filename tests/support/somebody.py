"""Another user of this machine, for what only root can try."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

SOMEBODY: Final = 54_321


def give_away(path: Path) -> None:
    """Make it somebody else's, the link itself if it is one; skip the test if we may not."""
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.lchown(path, SOMEBODY, SOMEBODY)
