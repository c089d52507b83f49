"""What torch.compile makes of a training is the same with us and without."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.trainings.captured import captured

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

STEPS = 6


class Graphs:
    """A compiler's back end that only counts: graphs, and the operations in them."""

    def __init__(self) -> None:
        self.made: list[Counter[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        called = [node for node in graph.graph.nodes if node.op.startswith("call")]
        self.made.append(Counter(str(node.target) for node in called))
        return graph.forward


class Training:
    """A small one, to be compiled in one way or another."""

    def __init__(self, graphs: Graphs) -> None:
        torch.manual_seed(0)
        self.graphs = graphs
        self.model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x, self.y = torch.randn(12, 4), torch.randint(0, 3, (12,))

    def loss(self, model: Callable[..., Any], n: int = 12) -> torch.Tensor:
        found: torch.Tensor = nn.functional.cross_entropy(model(self.x[:n]), self.y[:n])
        return found

    def step(self, model: Callable[..., Any], n: int = 12) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(model, n)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def model_alone(self) -> None:
        model = torch.compile(self.model, backend=self.graphs, fullgraph=True)
        for _ in range(STEPS):
            self.step(model)

    def of_each_length(self) -> None:
        model = torch.compile(self.model, backend=self.graphs, dynamic=True)
        for i in range(STEPS):
            self.step(model, 6 + i)

    def layer_by_layer(self) -> None:
        for layer in self.model:
            layer.compile(backend=self.graphs)
        for _ in range(STEPS):
            self.step(self.model)

    def whole_step(self) -> None:
        step = torch.compile(self.step, backend=self.graphs)
        for _ in range(STEPS):
            step(self.model)

    def optimizer_alone(self) -> None:
        step = torch.compile(self.optimizer.step, backend=self.graphs)
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.loss(self.model).backward()
            step()

    def backward_too(self) -> None:
        compiler = torch.compile(backend=self.graphs)
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss = self.loss(self.model)
            with torch._dynamo.compiled_autograd._enable(compiler):
                loss.backward()
            self.optimizer.step()


WAYS = [Training.model_alone, Training.layer_by_layer, Training.whole_step]
LATER = [Training.of_each_length, Training.optimizer_alone, Training.backward_too]


def made(
    way: Callable[[Training], None], around: AbstractContextManager[object]
) -> tuple[list[Counter[str]], dict[str, int], int, list[str]]:
    """Graphs with their operations, counts of captured calls, breaks, and what was warned of."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = Graphs()
    with around, warnings.catch_warnings(record=True) as warned:
        way(Training(graphs))
    stats = {name: counters["stats"][name] for name in ("calls_captured", "unique_graphs")}
    broken = sum(counters["graph_break"].values())
    said = [str(warning.message) for warning in warned]
    return graphs.made, stats, broken, said


@pytest.mark.parametrize(
    "way",
    [*WAYS, *(pytest.param(way, marks=pytest.mark.torture) for way in LATER)],
    ids=lambda way: way.__name__,
)
def test_nothing_of_ours_is_compiled(
    tmp_path: Path, way: Callable[[Training], None], caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    plain = made(way, nullcontext())
    caplog.clear()
    watched = made(way, captured(tmp_path))
    assert watched[0] == plain[0]
    assert watched[1] == plain[1]
    assert watched[2] <= plain[2]
    assert watched[3] == plain[3]
    assert not [record for record in caplog.records if "tocsin" in record.getMessage()]
