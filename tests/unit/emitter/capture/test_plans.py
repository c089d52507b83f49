"""What the section `capture` says is what a training sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.trainings.captured import captured, said
from tocsin.schemas.records.runs import RunStarted

SECTION: Any = {
    "budget": "100%",
    "collections": {
        "losses": {"every": 3, "modes": {"eval": {"start": 5}}},
        "gradients": {"every": 4, "start": 2, "end": 9, "columns": ["l2", "absmax"]},
        "weights": "off",
        "activations": "off",
        "optimizer_state": "off",
        "biases": {"every": 5},
        "heads": {"of": "weights", "match": "head", "every": 6},
        "norms": {"of": "gradients", "module_types": "LayerNorm", "steps": [1, 7]},
    },
}


class Net(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.body(x)))
        return out


def test_each_collection_comes_at_its_steps_with_its_tensors_and_columns(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps(SECTION)) as hooks:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(10):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1)).backward()
            optimizer.step()
            if step in (2, 7, 8):
                model.eval()
                if step == 8:
                    assert hooks.capture is not None
                    hooks.capture.training.phase("predict", "begin")
                with torch.no_grad():
                    nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1))
                model.train()
    found = said(tmp_path)

    (started,) = found.of(RunStarted)
    assert started.collections == ("losses", "gradients", "biases", "heads", "norms")
    steps: dict[str, list[int]] = {}
    for frame in found.frames:
        steps.setdefault(frame.collection, []).append(frame.step)
    assert steps.pop("updates") == steps["heads"]
    assert steps == {"gradients": [2, 6], "biases": [0, 5], "heads": [0, 6], "norms": [1, 7]}
    assert set(found.frame("gradients", 2).columns) == {"l2", "absmax"}
    assert found.frame("gradients", 2).every == 4
    assert len(found.frame("gradients", 2).rows) == 6
    assert found.frame("biases", 0).rows == ("body.bias", "norm.bias", "head.bias")
    assert found.frame("heads", 0).rows == ("head.weight", "head.bias")
    assert set(found.frame("norms", 1).rows) == {"norm.weight", "norm.bias"}
    assert [step for step, row in sorted(found.steps().items()) if "loss" in row] == [0, 3, 6, 9]
    assert len(found.steps()) == 10
    assert list(found.steps("eval")) == [7]
    assert list(found.steps("predict")) == [8]


INSIDE: Any = {
    "budget": "100%",
    "collections": {
        "activations": {"every": 4, "columns": ["mean"]},
        "linears": {"of": "activations", "module_types": "Linear", "every": 4, "start": 2},
        "inputs": {"every": 3},
        "pictures": {"of": "inputs", "tensors": "image", "steps": [3], "columns": ["max"]},
    },
}


def test_activations_and_inputs_come_as_they_are_picked(tmp_path: Path) -> None:
    data = [{"image": torch.full((4,), float(i)), "label": i} for i in range(24)]
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps(INSIDE)):
        model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in torch.utils.data.DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            for _ in range(2):
                model(batch["image"].repeat(32, 1)).square().mean().backward()
            optimizer.step()
    found = said(tmp_path)

    steps: dict[str, list[int]] = {}
    for frame in found.frames:
        steps.setdefault(frame.collection, []).append(frame.step)
    assert {name: set(steps[name]) for name in INSIDE["collections"]} == {
        # The first batch is fetched before the training begins, which is with its first step.
        "activations": {1, 4},
        "linears": {2},
        "inputs": {3},
        "pictures": {3},
    }
    assert found.frame("activations", 4).rows == ("1",)
    assert found.frame("activations", 4).columns == ("mean",)
    assert found.frame("linears", 2).rows == ("0", "2")
    assert found.frame("linears", 2).every == 4
    inputs = found.frame("inputs", 3)
    assert inputs.rows == ("image", "label")
    means = inputs.column("mean")
    assert means is not None
    assert means.tolist() == [13.5, 13.5]
    assert found.frame("pictures", 3).values.tolist() == [[15.0]]


def test_what_is_off_says_nothing(tmp_path: Path) -> None:
    section = '{"collections": {"activations": "off", "gradients": "off", "losses": {"every": 2}}}'
    with captured(tmp_path, TOCSIN_CAPTURE=section):
        model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(64, 4)).square().mean().backward()
            optimizer.step()
    found = said(tmp_path)
    assert {frame.collection for frame in found.frames} <= {"weights", "updates"}
    assert [s for s, row in sorted(found.steps().items()) if "loss" in row] == [*range(0, 40, 2)]


def test_a_loss_that_is_not_finite_is_said_whatever_the_plan(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE='{"collections": {"losses": "off"}}'):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            (weight.sum() * (float("nan") if step == 2 else 1.0)).backward()
            optimizer.step()
    found = said(tmp_path)
    assert [s for s, row in sorted(found.steps().items()) if "loss" in row] == [2, 3], found
