"""PyTorch as it is used today, where a process of its own is needed: torch.compile, loaders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.trainings.captured import run_with_hook, said
from support.trainings.compiled import STEPS
from tocsin.schemas.records.runs import RunEnded, RunStarted

TESTS = Path(__file__).parents[1]


def compiled(folder: Path, cases: tuple[str, ...]) -> dict[str, Any]:
    """What a process of its own says of them."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "support.trainings.compiled", str(folder), *cases],
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "cases",
    [
        # Another one of this kind is in test_capture_harmless.
        pytest.param(("from_the_start", "optimizer_too"), marks=pytest.mark.torture),
        pytest.param(("in_the_middle", "with_a_break_of_its_own"), marks=pytest.mark.torture),
    ],
    ids="-".join,
)
def test_a_compiled_training_has_the_same_graphs_breaks_and_losses(
    tmp_path: Path, cases: tuple[str, ...]
) -> None:
    for case, found in compiled(tmp_path, cases).items():
        breaks = found["with"].pop("breaks"), found["without"].pop("breaks")
        assert found["with"] == found["without"], case
        # Around an optimizer's step there is a break anyway, and no graph between that and ours:
        # there may be up to two breaks more, or one less.
        more = breaks[0] - breaks[1]
        assert more in (range(-1, 3) if case == "optimizer_too" else (0,)), case
        assert found["without"]["graphs"] >= 1
        own = case in ("with_a_break_of_its_own", "optimizer_too")
        assert bool(breaks[1]) == own
        # What a ReLU puts out that was compiled before capture began cannot be seen: that is said.
        assert found["off"] in ([], ["activations"]), case
        losses = found["without"]["losses"]
        if case == "from_the_start":
            del losses[STEPS]  # that of the evaluation
        assert [step for step, *_ in found["captured"]] == list(range(len(losses)))
        assert [loss for _, loss, _ in found["captured"]] == pytest.approx(losses, rel=1e-6)
        assert all(norm > 0 for *_, norm in found["captured"])


LOADERS = """
import json, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        # A worker that trains something itself, as some augmentations do.
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        threads = {thread.name for thread in threading.enumerate()}
        ours = [name for name in threads if name.startswith("tocsin")]
        return torch.ones(3), json.dumps(ours)

def collate(items):
    return torch.stack([x for x, _ in items]), [ours for _, ours in items]

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in sys.argv[1:] or METHODS:
        loader = DataLoader(
            Data(), batch_size=3, num_workers=1, multiprocessing_context=method,
            collate_fn=collate,
        )
        for x, ours in loader:
            assert ours == ["[]"] * 3, ours
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    print("done")
"""


@pytest.mark.parametrize(
    "methods",
    [
        # Forked ones are in test_capture_harmless too, spawned processes in test_capture_hook.
        pytest.param(("fork", "spawn", "forkserver"), marks=pytest.mark.torture)
    ],
    ids="-".join,
)
def test_workers_of_data_loaders_are_left_alone(tmp_path: Path, methods: tuple[str, ...]) -> None:
    done = run_with_hook(tmp_path, LOADERS.replace("METHODS", repr(methods)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(4 * len(methods)))
    assert len(found.of(RunStarted)) == len(found.of(RunEnded)) == 1
    assert len({meta.boot for meta in found.metas}) == 1
