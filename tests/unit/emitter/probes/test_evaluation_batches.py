"""Activations and inputs of evaluations and predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.trainings.captured import Said, captured, said
from tocsin.emitter.hooks.training_hooks import Hooks
from tocsin.emitter.plan.collections import DEFAULT_PLANS, Schedule

SECTION: Any = {
    "budget": "100%",
    "collections": {
        "activations": {"every": 3, "modes": {"eval": {"every": 3}, "predict": {"steps": [1]}}},
        "linears": {
            **{"of": "activations", "module_types": "Linear", "columns": ["max"]},
            "modes": {"train": "off", "eval": {"start": 4, "end": 5, "every": 1}},
        },
        "inputs": {"steps": [2], "modes": {"eval": {"every": 2}, "predict": {"every": 2}}},
    },
}


class Loop:
    """A training and what it does between its steps; a batch says its number everywhere."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.model = nn.Sequential(
            nn.Linear(1, 1), nn.LeakyReLU(), nn.Embedding(2, 2), nn.Dropout()
        )
        first = self.model[0]
        assert isinstance(first, nn.Linear)
        nn.init.ones_(first.weight)
        nn.init.zeros_(first.bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.seen = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model[1](self.model[0](x))
        return out

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self(torch.full((2, 1), -9.0)), torch.zeros(2, 1)).backward()
        self.optimizer.step()

    def evaluate(
        self, batches: int, use: Callable[[torch.Tensor], object], *, loader: bool
    ) -> None:
        data = [torch.full((1,), 1.0 + self.seen + i // 2) for i in range(2 * batches)]
        self.seen += batches
        given: Iterable[torch.Tensor] = torch.stack(data).view(batches, 2, 1)
        self.model.eval()
        with torch.inference_mode():
            for batch in torch.utils.data.DataLoader(data, batch_size=2) if loader else given:
                use(batch)
        self.model.train()

    def loss(self, batch: torch.Tensor) -> None:
        nn.functional.mse_loss(self(batch), torch.zeros(2, 1))


def numbers(found: Said, collection: str, mode: str, row: str) -> list[tuple[int, float]]:
    """(step, greatest value) of each frame; a batch that is full of n has the number n - 1."""
    return [
        (frame.step, float(frame.values[frame.rows.index(row), frame.columns.index("max")]) - 1)
        for frame in found.frames
        if (frame.collection, frame.mode) == (collection, mode)
    ]


def test_batches_of_evaluations_are_looked_at_by_their_number(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps(SECTION)) as hooks:
        loop = Loop(hooks)
        for step in range(12):
            loop.step()
            if step in (1, 2):
                loop.evaluate(4, loop, loader=True)
            if step == 5:
                assert hooks.capture is not None
                loop.seen = 0
                hooks.capture.training.phase("predict", "begin")
                loop.evaluate(3, loop, loader=True)
                hooks.capture.training.phase("predict", "end")
    found = said(tmp_path)

    assert numbers(found, "activations", "eval", "1") == [(1, 0), (1, 3), (2, 6)]
    assert numbers(found, "linears", "eval", "0") == [(2, 4)]
    assert numbers(found, "inputs", "eval", "batch") == [(1, 0), (1, 2), (2, 4), (2, 6)]
    assert numbers(found, "activations", "predict", "1") == [(5, 1)]
    assert numbers(found, "inputs", "predict", "batch") == [(5, 0), (5, 2)]
    # The evaluation in front of step 3, and the prediction in front of 6, have not taken its place.
    assert [step for step, _ in numbers(found, "activations", "train", "1")] == [1, 3, 6, 9]
    every = {(f.collection, f.mode): f.every for f in found.frames}
    assert (every["activations", "eval"], every["inputs", "eval"]) == (3, 2)
    assert {f.mode for f in found.frames if f.collection == "embeddings"} == {"train"}


def test_without_a_data_loader_losses_end_batches(tmp_path: Path) -> None:
    section = {"activations": {"every": 3, "modes": {"eval": {"every": 3}}}}
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps({"collections": section})) as hooks:
        loop = Loop(hooks)
        for step in range(8):
            loop.step()
            if step in (2, 4):
                loop.evaluate(3, loop.loss, loader=False)
    found = said(tmp_path)

    # 0 and 3 are the first of their evaluations, of which the begin is not seen.
    assert numbers(found, "activations", "eval", "1") == [(2, 1), (4, 4)]
    # Step 3 was begun before anything said that the evaluation was over.
    assert [step for step, _ in numbers(found, "activations", "train", "1")] == [1, 4, 6]


def test_nothing_is_looked_at_where_no_mode_asks_for_it(tmp_path: Path) -> None:
    assert DEFAULT_PLANS["activations"].schedule("eval") is None
    with captured(tmp_path) as hooks:
        loop = Loop(hooks)
        for _ in range(3):
            loop.step()
            loop.evaluate(2, loop, loader=True)
        assert hooks.capture is not None
        assert hooks.capture.probes.on_evaluation_batch == ()
        assert hooks.capture.probes.next_read > hooks.capture.training.next_step
    assert {frame.mode for frame in said(tmp_path).frames} == {"train"}


def test_an_interval_that_is_left_to_the_budget_is_that_of_batches(tmp_path: Path) -> None:
    section = {"activations": {"modes": {"train": "off", "eval": {}}}}
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps({"collections": section})) as hooks:
        loop = Loop(hooks)
        loop.step()
        for _ in range(3):
            loop.evaluate(50, loop, loader=True)
            loop.step()
        assert hooks.capture is not None
        assert hooks.capture.training.settings.plans["activations"].schedule("eval") == Schedule()
    found = said(tmp_path)
    eval_frames = [frame for frame in found.frames if frame.mode == "eval"]
    assert [number for _, number in numbers(found, "activations", "eval", "1")] == [0, 100]
    assert [frame.every for frame in eval_frames] == [100, 100]
