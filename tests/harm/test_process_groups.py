"""The group that the ranks agree on never stands in the way of a script's own groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_a_scripts_own_groups_are_as_they_would_be_without_us(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.ranks.side_groups", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.splitlines() == [
        "own_group_after_a_late_rank 0 0",
        "stops_off_on_one_rank 0 0",
        "fake_group 0 0",
    ], done.stderr
    assert "Traceback" not in done.stderr
    assert "not all ranks were there within 0.5 s" in done.stderr
