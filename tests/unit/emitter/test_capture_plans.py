"""What the section `capture` says is what a training sends."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from support.captured import captured, said
from tocsin.schemas.runs import RunStarted

SECTION = {
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


def test_a_loss_that_is_not_finite_is_said_whatever_the_plan(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE='{"collections": {"losses": "off"}}'):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            (weight.sum() * (float("nan") if step == 2 else 1.0)).backward()
            optimizer.step()
    assert [step for step, row in said(tmp_path).steps().items() if "loss" in row] == [2, 3]
