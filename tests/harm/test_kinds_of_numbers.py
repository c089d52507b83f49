"""Whatever numbers a training computes with, no part of capture gives up on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.trainings.captured import captured, said
from tocsin.schemas.records.collections import KINDS

STEPS = 7


class Model(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Something of each kind that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.act, self.squash = nn.LayerNorm(8), nn.ReLU(), nn.Tanh()
        self.gate = nn.Softmax(dim=-1)
        self.conv, self.batch = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 20, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.attention(x, x, x, need_weights=tokens.shape[1] % 2 == 0)[0]
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) * self.gate(x)
        x = self.norm(x + self.drop(self.down(self.act(self.up(x)))))
        x = self.act(self.batch(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        out: torch.Tensor = self.head(self.squash(x))
        return out


def train(
    dtype: torch.dtype = torch.float32, *, create_graph: bool = False, scale: float = 1.0
) -> None:
    """A language model, a score for each sample, a clipped gradient, and an evaluation."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    tokens = torch.randint(0, 20, (8, 12))
    for step in range(STEPS):
        optimizer.zero_grad()
        scores = model(tokens[:, : 12 - step % 2])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, : 12 - step % 2].flatten())
        loss = loss + functional.mse_loss(scores.sum(-1), torch.zeros_like(scores.sum(-1)))
        (loss * scale).backward(create_graph=create_graph)
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if create_graph:
            for parameter in model.parameters():
                parameter.grad = None if step % 3 else parameter.grad
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    model.train()
    functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Case = tuple[Callable[[], AbstractContextManager[object]], Callable[[], None]]


def strict() -> AbstractContextManager[object]:
    return np.errstate(all="raise")


CASES: dict[str, Case] = {
    "float64": (nullcontext, lambda: train(torch.float64)),
    "default float64": (lambda: default_dtype(torch.float64), lambda: train(torch.float64)),
    "numpy raises, tiny": (strict, lambda: train(scale=1e-30)),
    "numpy raises, huge": (strict, lambda: train(torch.float64, scale=1e200)),
    "graph of gradients": (nullcontext, lambda: train(create_graph=True)),
    "float32": (nullcontext, train),
    "bfloat16": (nullcontext, lambda: train(torch.bfloat16)),
    "float16": (nullcontext, lambda: train(torch.float16)),
    "default bfloat16": (lambda: default_dtype(torch.bfloat16), lambda: train(torch.bfloat16)),
    "numpy raises": (strict, train),
    "numpy raises, infinite": (strict, lambda: train(scale=1e38)),
    "graph of float64": (nullcontext, lambda: train(torch.float64, create_graph=True)),
    "deterministic": (deterministic, train),
}


class Late(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A layer of which nothing is known before it is called, which happens `late`."""

    def __init__(self) -> None:
        super().__init__()
        # Where a test has used the compiler, a model of which no module is seen may be compiled.
        self.first = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.second = nn.LazyLinear(3)
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x) + (self.second(x) if self.late else 0)
        return out


@pytest.mark.parametrize("apart", [False, True])
def test_parameters_that_have_no_numbers_yet_keep_nothing_from_being_watched(
    tmp_path: Path, *, apart: bool
) -> None:
    model = Late()
    layers = [model.first, model.second] if apart else [model]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in layers]
    collections = {kind: {"every": 2, "modes": {"eval": {"every": 1}}} for kind in KINDS}
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps({"collections": collections})) as hooks:
        for step in range(12):
            model.late = step > 5
            model.zero_grad()
            functional.cross_entropy(model(torch.ones(8, 4)), torch.arange(8) % 3).backward()
            for optimizer in optimizers[: 1 + model.late]:
                optimizer.step()
        assert hooks.isolation.off == {}
        assert hooks.isolation.came_back == {}
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(12))
    assert {len(f.rows) for f in found.frames if f.collection == "gradients"} == {2, 4}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_part_of_capture_takes_them(tmp_path: Path, case: Case) -> None:
    surroundings, training = case
    collections = {kind: {"every": 2, "modes": {"eval": {"every": 1}}} for kind in KINDS}
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps({"collections": collections})) as hooks:
        with surroundings():
            training()
        assert hooks.isolation.off == {}
        assert hooks.isolation.came_back == {}
    found = {frame.collection for frame in said(tmp_path).frames}
    wanted = {"gradients", "weights", "updates", "optimizer_state", "activations", "attention"}
    assert wanted | {"embeddings", "logits", "confusion"} <= found
