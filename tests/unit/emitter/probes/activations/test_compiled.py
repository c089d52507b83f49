"""Activations of models that torch.compile has made graphs of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tocsin.emitter.hooks import torch_patches
from tocsin.emitter.model import discovery
from tocsin.emitter.probes.activations import compiled as compiled_modules
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.process.environment import RUN_ID
from tocsin.emitter.statistics.tables import Table

# When tests are collected, so before any of them compiles a model: then the hooks would be late.
torch_patches.install()

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert not slots.late
    monkeypatch.setattr(torch_patches.hooks, "asleep", True)
    monkeypatch.setattr(slots, "cuda_graphs", False)
    monkeypatch.setenv(RUN_ID, "r1")
    activations.reset()
    torch._dynamo.reset()
    yield
    activations.reset()
    torch._dynamo.reset()


class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.gate = nn.GELU(), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.gate(self.down(self.act(self.up(x))))


class Model(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, blocks: int = 2, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.squash = nn.Tanh()
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: torch.Tensor = self.head(self.squash(x))
        return out


def train(
    model: nn.Module, step: nn.Module, *, watched: bool, lengths: tuple[int, ...] = (12,) * 4
) -> tuple[list[float], list[list[Table]], int]:
    """Losses, the tables of each step, and how many graphs were made."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    said: list[list[Table]] = []
    for i, length in enumerate(lengths):
        if watched and i >= 1:
            activations.arm(model)
        tokens = torch.arange(8 * length).reshape(8, length) % 50
        loss = functional.cross_entropy(step(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        activations.due = False
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        pending = activations.drain()
        said.append([] if pending is None else list(pending.tables()))
    assert not counters["graph_break"]
    return losses, said, counters["stats"]["unique_graphs"]


def names(tables: list[Table], collection: str) -> set[str]:
    return {name for table in tables if table.collection == collection for name in table.names}


def everything(blocks: int = 2) -> dict[str, set[str]]:
    of_blocks = {f"blocks.{i}.{part}" for i in range(blocks) for part in ("act", "gate")}
    return {
        "activations": {*of_blocks, "squash"},
        "attention": {f"blocks.{i}" for i in range(blocks)},
        "logits": {"head"},
        "embeddings": {"tokens"},
    }


def all_names(tables: list[Table]) -> dict[str, set[str]]:
    return {collection: names(tables, collection) for collection in everything()}


def both(
    monkeypatch: pytest.MonkeyPatch,
    compiled: Callable[[Model], nn.Module],
    *,
    blocks: int = 2,
    checkpointed: bool = False,
    lengths: tuple[int, ...] = (12,) * 4,
) -> list[list[Table]]:
    """Train without us and with us; losses and graphs are the same. What was said, by step."""
    with monkeypatch.context() as patch:
        patch.delenv(RUN_ID)
        torch.manual_seed(0)
        plain = Model(blocks, checkpointed=checkpointed)
        without = train(plain, compiled(plain), watched=False, lengths=lengths)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(blocks, checkpointed=checkpointed)
    found = train(model, compiled(model), watched=True, lengths=lengths)
    assert (found[0], found[2]) == (without[0], without[2])
    assert not found[1][0]
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_a_compiled_model_says_what_another_says(
    monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    said = both(
        monkeypatch,
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        checkpointed=checkpointed,
    )
    torch.manual_seed(0)
    model = Model()
    _, eager, _ = train(model, model, watched=True)
    for tables in said[1:]:
        assert all_names(tables) == everything()
    for mine, theirs in zip(said[1], eager[1], strict=True):
        assert (mine.collection, mine.names, mine.columns) == (
            theirs.collection, theirs.names, theirs.columns,
        )  # fmt: skip
        assert mine.values == pytest.approx(theirs.values, rel=1e-3, abs=1e-5)
        assert (mine.counts == theirs.counts).all()


@pytest.mark.slow
def test_other_lengths_make_no_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (12, 14, 20, 12)
    said = both(
        monkeypatch,
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        lengths=lengths,
    )
    for tables in said[1:]:
        assert all_names(tables) == everything()


@pytest.mark.slow
def test_blocks_that_share_a_graph_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_block(model: Model) -> nn.Module:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        return model

    said = both(monkeypatch, by_block, blocks=4)
    assert all_names(said[2]) == everything(4)


class Attending(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Its attention returns its weights, as is torch's default: no attention function is called."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        out: torch.Tensor = self.head(x + self.attention(x, x.flip(1), x)[0])
        return out


@pytest.mark.slow
def test_attention_that_returns_its_weights_is_read_as_without_a_graph() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Attending()
        step = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        _, tables, _ = train(model, step, watched=True)
        found.append([table for table in tables[2] if table.collection == "attention"])
    ((eager,), (compiled,)) = found
    assert (compiled.names, compiled.columns) == (eager.names, eager.columns)
    assert compiled.values == pytest.approx(eager.values, rel=1e-3, abs=1e-5)


@pytest.mark.torture
def test_a_compiler_that_makes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch.compile's inductor needs a C++ compiler on the CPU")
    said = both(monkeypatch, lambda model: torch.compile(model, fullgraph=True), blocks=1)
    assert all_names(said[2]) == everything(1)


def test_nothing_is_in_the_graph_of_a_process_that_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = Model()
    monkeypatch.delenv(RUN_ID)
    torch.compile(model, backend=keep, fullgraph=True)(torch.zeros(2, 5, dtype=torch.int64))
    exported = torch.export.export(model, (torch.zeros(2, 5, dtype=torch.int64),))
    monkeypatch.setenv(RUN_ID, "r1")
    again = torch.export.export(model, (torch.zeros(2, 5, dtype=torch.int64),), strict=True)
    for graph in (*graphs, exported, again):
        assert not any("tocsin" in str(node.target) for node in graph.graph.nodes)


def test_a_model_compiled_but_not_called_yet_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with monkeypatch.context() as patch:
        patch.delenv(RUN_ID)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert model.head not in slots.wanted
    compiled_modules.catch_up(activations.patches.keep)
    _, said, graphs = train(model, compiled, watched=True)
    assert graphs == 1
    assert all_names(said[3]) == everything()


WITH_A_COMPILER = """
import sys, torch
from torch import nn
from tocsin.emitter.probes.activations import compiled

kept = []
layer = nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
import torch._dynamo  # older releases import it later
compiled.catch_up(kept.append)
print(kept)
step = torch.compile(lambda x: layer(x), backend="eager")
compiled.catch_up(kept.append)
print(kept)
"""


def test_a_function_that_is_never_compiled_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would switch off what watches calls for a moment, as in a notebook's second training."""
    monkeypatch.setattr(discovery, "find", lambda: discovery.Found((), (), ()))
    for backends, expected in (({}, []), ({1: None}, []), ({1: None, 2: "eager"}, [[]])):
        monkeypatch.setattr(torch._dynamo.eval_frame, "cached_backends", backends)
        kept: list[object] = []
        compiled_modules.catch_up(kept.append)
        assert kept == expected


@pytest.mark.torture  # a process that imports PyTorch and its compiler
def test_a_compiler_that_is_imported_and_not_used_keeps_no_calls_watched() -> None:
    """The same of a compiler that has only been imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_COMPILER], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[[]]"]


def test_cuda_graphs_are_left_alone_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    torch.compile(model, mode="reduce-overhead")
    assert slots.cuda_graphs
    monkeypatch.undo()
    monkeypatch.setenv(RUN_ID, "r1")
    monkeypatch.setattr(slots, "cuda_graphs", True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    activations.arm(compiled)
    compiled(torch.randn(64, 8))
    activations.drain()
    assert activations.blind
    assert "CUDA graphs" in activations.reason


def test_too_late_is_said_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager")
    model(torch.randn(2, 8))
    assert compiled_modules.is_late()
    monkeypatch.setattr(slots, "late", True)
    activations.arm(model)
    assert activations.blind
    assert activations.armed
    assert activations.drain() is None
    assert "start()" in activations.reason
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "tocsin.emitter.start()" in line
