"""PyTorch as it is used today, on two ranks: torchrun, DDP, FSDP2. One launch for all of them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.ranks.matrix import EVERY_STEP, STEPS
from support.trainings.captured import HOOK, Said, environment, said
from support.trainings.watched import records
from tocsin.schemas.records.runs import CaptureDegraded, RunEnded, RunStarted
from tocsin.stream_rules.testing import issues_of

TESTS = Path(__file__).parents[1]


class Launch:
    """What two ranks saw themselves, and what was captured of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sharded").mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
        paths = [str(HOOK), str(TESTS), *filter(None, [kept.pop("PYTHONPATH", "")])]
        self.done = subprocess.run(
            [sys.executable, str(TESTS / "support" / "ranks" / "matrix.py"), str(folder)],
            env={
                **kept,
                **environment(folder, TOCSIN_CAPTURE=EVERY_STEP, OMP_NUM_THREADS="1"),
                "PYTHONPATH": os.pathsep.join(paths),
            },
            cwd=folder, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert self.done.returncode == 0, self.done.stderr
        self.ranks: list[dict[str, Any]] = [
            json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)
        ]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch(tmp_path_factory.mktemp("ranks"))


def rows_of(found: Said, rank: int) -> dict[int, dict[str, float]]:
    """The scalars of one rank's steps."""
    cells: dict[int, dict[str, float]] = {}
    for at, step, values in found.by_rank:
        if at == rank:
            cells.setdefault(step, {}).update(values)
    return cells


def column(found: Said, rank: int, name: str) -> list[float]:
    return [cells[name] for _, cells in sorted(rows_of(found, rank).items())]


def test_ddp_under_torchrun(launch: Launch) -> None:
    found = said(launch.folder)
    assert sorted(s.rank for s in found.of(RunStarted)) == [0, 1]
    assert len({s.incarnation for s in found.of(RunStarted)}) == 1
    assert {e.outcome for e in found.of(RunEnded)} == {"completed"}
    assert found.of(CaptureDegraded) == []
    for rank, own in enumerate(launch.ranks):
        plain, watched = own["ddp"]["plain"], own["ddp"]["watched"]
        np.testing.assert_array_equal(plain["losses"], watched["losses"])
        np.testing.assert_array_equal(plain["norms"], watched["norms"])
        assert sorted(rows_of(found, rank)) == list(range(STEPS))
        np.testing.assert_allclose(column(found, rank, "loss"), watched["losses"], rtol=1e-5)
        finite = column(found, rank, "gradient_norm")[:-1]
        np.testing.assert_allclose(finite, watched["norms"][:-1], rtol=1e-4)
        assert rows_of(found, rank)[1]["micro_batches"] == 2
    # After the reduce all gradients are NaN on both ranks: whose they were was seen before it.
    local = [f for f in found.frames if f.collection == "local_gradients"]
    assert {(f.origin.rank, f.step) for f in local} == {(1, STEPS - 1)}
    (issue,) = [i for i in issues_of(records(launch.folder), "nonfinite") if i.state == "firing"]
    assert issue.first_step == STEPS - 1


def test_fsdp2(launch: Launch) -> None:
    if any("no fsdp" in own for own in launch.ranks):
        because = launch.ranks[0]["no fsdp"]["because"]
        assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), because
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on a CPU: {because}")
    found = said(launch.folder / "sharded")
    assert found.of(CaptureDegraded) == []
    norms = []
    for rank, own in enumerate(launch.ranks):
        plain, watched = own["fsdp"]["plain"], own["fsdp"]["watched"]
        assert plain == watched
        assert sorted(rows_of(found, rank)) == list(range(STEPS))
        np.testing.assert_allclose(column(found, rank, "loss"), watched["losses"], rtol=1e-5)
        norms.append(column(found, rank, "gradient_norm_local_part"))
    # Each rank says what the part that it holds adds.
    whole = [math.hypot(*parts) for parts in zip(*norms, strict=True)]
    np.testing.assert_allclose(whole, launch.ranks[0]["fsdp"]["watched"]["norms"], rtol=1e-4)
    (one, other) = (f for f in found.frames if (f.collection, f.step) == ("gradients", 2))
    for frame in (one, other):
        names = ("2.bias", "2.weight", "0.bias", "0.weight")
        assert frame.rows == tuple(f"{name}@shard{frame.origin.rank}" for name in names)
    counts = one.count("numel"), other.count("numel")
    assert counts[0] is not None
    assert counts[1] is not None
    assert (counts[0] + counts[1]).tolist() == [4, 32, 8, 48]
    assert issues_of(records(launch.folder / "sharded")) == []
