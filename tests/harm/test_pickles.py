"""What the user pickles in the middle of a training can be read where tocsin is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.trainings.captured import run_with_hook

BY_VALUE = """
import sys
from pathlib import Path
import cloudpickle
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 4)

    def forward(self, x):
        return self.up(x).relu()

class Head(Net):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.scale * super().forward(x)).sum()

torch.manual_seed(0)  # with some first weights all outputs are 0, and stay it
model, watched = Head(), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    watched += "__call__" in vars(Head)
    Path(f"{step}.pickle").write_bytes(cloudpickle.dumps(model))
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
print(watched)
"""

READ = """
import json, pickle, sys
import torch
found = []
for step in range(8):
    with open(f"{step}.pickle", "rb") as file:
        model = pickle.load(file)
    found.append(float(model(torch.ones(2, 3))))
    if "compile" in sys.argv:
        compiled = torch.compile(model, backend="eager")
        assert float(compiled(torch.ones(2, 3))) == found[-1]
print(json.dumps([found, [name for name in sys.modules if name.startswith("tocsin")]]))
"""


@pytest.mark.parametrize(
    "what", ["call", pytest.param("compile", marks=pytest.mark.torture)]
)  # that imports the compiler
def test_a_model_whose_class_is_pickled_by_value(tmp_path: Path, what: str) -> None:
    done = run_with_hook(tmp_path, BY_VALUE, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no class of the user's was watched when it was pickled"
    read = subprocess.run(
        [sys.executable, "-c", READ, what], cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr
    found, modules = json.loads(read.stdout)
    assert len(set(found)) > 1
    assert modules == []


KEPT = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.criterion = F.cross_entropy
        self.clip = torch.nn.utils.clip_grad_norm_

model, classes = Net(), torch.tensor([1, 2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
from tocsin.emitter import start
run = start()
for step in range(8):
    loss = model.criterion(model.up(torch.ones(2, 3)), classes)
    loss.backward()
    model.clip(model.parameters(), 1.0)
    optimizer.step()
    torch.save(model, "kept.pt")
run.finish()
print(F.mse_loss.__module__, hasattr(F.mse_loss, "__wrapped__"))
"""

READ_KEPT = """
import sys, torch
class Net(torch.nn.Module): ...
model = torch.load("kept.pt", weights_only=False)
assert model.criterion is torch.nn.functional.cross_entropy
assert not [name for name in sys.modules if name.startswith("tocsin")]
"""


@pytest.mark.torture  # it imports the compiler
def test_a_model_that_kept_a_function_of_torch_before_the_start(tmp_path: Path) -> None:
    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
            timeout=300, check=False, env={**os.environ, **more},
        )  # fmt: skip

    more = {"TOCSIN_BUS": f"embedded:{tmp_path}/bus.db", "OMP_NUM_THREADS": "1"}
    done = run(KEPT)
    assert done.returncode == 0, done.stderr
    # One that nobody has kept is watched still.
    assert done.stdout.split() == ["torch.nn.functional", "True"], done.stdout
    read = run(READ_KEPT)
    assert read.returncode == 0, read.stderr
