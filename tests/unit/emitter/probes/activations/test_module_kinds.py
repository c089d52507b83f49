"""What modules of each type say at a step that is due."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tocsin.emitter.hooks import torch_patches
from tocsin.emitter.plan.collections import CollectionPlan
from tocsin.emitter.probes.activations import attention as attention_readings
from tocsin.emitter.probes.activations import readings, routers
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.module_kinds import SIGMOID_LIMIT, TANH_LIMIT, output_head
from tocsin.emitter.probes.activations.samples import rows_of, spread, statistics, thinned
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.statistics.readable import is_readable
from tocsin.emitter.statistics.tables import Table
from tocsin.emitter.training.context import current
from tocsin.schemas.records.collections import MODES, Mode
from tocsin.schemas.records.frames import COUNT_COLUMNS, STATISTIC_COLUMNS


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch_patches.install()
    # Another test of this process may have compiled a model before that.
    monkeypatch.setattr(slots, "late", False)
    watched = activations.patches
    if watched.for_good and watched._functions is not None:
        original, _ = watched._functions
        monkeypatch.setattr(functional, "scaled_dot_product_attention", original)
        monkeypatch.setattr(watched, "_functions", None)
        monkeypatch.setattr(watched, "for_good", False)
    activations.reset()
    yield
    activations.reset()


def look(
    model: nn.Module,
    *inputs: torch.Tensor,
    plan: CollectionPlan | None = None,
    mode: Mode = "train",
) -> list[Table]:
    """The tables of one armed forward call."""
    activations.arm(model, plan, mode=mode)
    model(*inputs)
    pending = activations.drain()
    if pending is None:
        return []
    assert pending.ready
    return list(pending.tables())


def cells(tables: list[Table], collection: str, column: str) -> dict[str, float]:
    """One column of all tables of a collection that have it, by name."""
    return {
        name: float(table.values[i, table.columns.index(column)])
        for table in tables
        if table.collection == collection and column in table.columns
        for i, name in enumerate(table.names)
    }


def counts(tables: list[Table], collection: str, column: str) -> dict[str, int]:
    return {
        name: int(table.counts[i, table.count_columns.index(column)])
        for table in tables
        if table.collection == collection and column in table.count_columns
        for i, name in enumerate(table.names)
    }


def chosen(name: str = "activations", **selection: object) -> CollectionPlan:
    return CollectionPlan(name, "activations", dict.fromkeys(MODES), **selection)  # type: ignore[arg-type]


# -- samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_statistics_of_a_sample_are_those_of_its_values(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 5, 4000).reshape(40, 100).to(dtype)
    x[0, :7] = 0
    values, found = statistics(spread(x).numpy())
    exact = x.double().numpy()
    wanted = (
        exact.min(), exact.max(), exact.mean(), exact.std(), np.abs(exact).sum(),
        np.sqrt(np.square(exact).sum()), np.abs(exact).max(),
    )  # fmt: skip
    assert values.tolist() == pytest.approx(wanted, rel=1e-5)
    assert found.tolist() == [4000, int((exact == 0).sum()), 0, 0]


def test_nonfinite_values_are_counted_and_left_out() -> None:
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0])
    values, found = statistics(spread(x).numpy())
    assert found.tolist() == [5, 0, 1, 2]
    assert values[:3].tolist() == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    "large",
    [
        torch.arange(1_000_000.0).reshape(1000, 1000),
        torch.arange(1_000_000.0).reshape(1000, 1000).t(),
        torch.arange(960_000.0).reshape(10, 3, 100, 320).to(memory_format=torch.channels_last),
        torch.arange(2_000_000.0).reshape(2000, 1000)[:, :500],
        torch.arange(64_000.0).reshape(8, 1, 8, 1000).expand(8, 100, 8, 1000),
    ],
)
def test_a_sample_is_small_spread_and_its_own(large: torch.Tensor) -> None:
    sample = spread(large)
    assert 4_000 < sample.numel() <= 16_384
    assert sample.min() < 0.05 * large.max()
    assert sample.max() > 0.9 * large.max()
    assert sample.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
    assert sample.untyped_storage().nbytes() <= 4 * 16_384


def test_rows_are_taken_evenly() -> None:
    assert rows_of(torch.zeros(1000, 7), 100).shape == (100, 7)
    assert rows_of(torch.zeros(3, 7), 100).shape == (3, 7)
    assert rows_of(torch.zeros(50, 8, 100, 4).transpose(1, 2), 64).shape[0] <= 128
    assert thinned(torch.zeros(100, 100, 5), 100, whole=1).shape[2] == 5


# -- kinds


class Many(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.gelu, self.silu, self.prelu = nn.GELU(), nn.SiLU(), nn.PReLU()
        self.tanh, self.sigmoid = nn.Tanh(), nn.Sigmoid()
        self.hardtanh, self.relu6 = nn.Hardtanh(), nn.ReLU6()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.gelu(x) + self.silu(x) + self.prelu(x) + self.tanh(10 * x)
        return total + self.sigmoid(20 * x) + self.hardtanh(x) + self.relu6(x) + self.softmax(x)


def test_each_type_says_what_concerns_it() -> None:
    x = torch.linspace(-2, 2, 128 * 64).reshape(64, 128).requires_grad_()
    tables = look(Many(), x)
    numel = counts(tables, "activations", "numel")
    assert list(cells(tables, "activations", "dead")) == ["relu6"]
    saturated = cells(tables, "activations", "saturated")
    assert saturated["tanh"] == pytest.approx(1 - TANH_LIMIT / 20, abs=1e-3)
    assert saturated["sigmoid"] == pytest.approx(1 - SIGMOID_LIMIT / 40, abs=1e-3)
    assert saturated["hardtanh"] == pytest.approx(0.5, abs=1e-3)
    assert set(saturated) == {"tanh", "sigmoid", "hardtanh", "softmax"}
    assert cells(tables, "activations", "entropy").keys() == {"softmax"}
    assert set(numel) == {*saturated, "relu6", "gelu", "silu", "prelu"}
    assert cells(tables, "activations", "min")["gelu"] == pytest.approx(-0.17, abs=1e-2)
    order = counts(tables, "activations", "order")
    assert [order[n] for n in ("gelu", "silu", "prelu", "tanh")] == [0, 1, 2, 3]
    for table in tables:
        assert table.columns[:7] == STATISTIC_COLUMNS
        assert table.count_columns == (*COUNT_COLUMNS, "order")


def test_the_limits_are_where_the_gradient_is_the_floor() -> None:
    assert pytest.approx(8.752, abs=1e-3) == TANH_LIMIT
    assert pytest.approx(16.118, abs=1e-3) == SIGMOID_LIMIT


def test_a_softmax_that_is_sure_is_saturated() -> None:
    flat, sure = torch.zeros(50, 10), 50 * torch.eye(10).repeat(5, 1)
    entropy = cells(look(nn.Softmax(dim=-1), flat.requires_grad_()), "activations", "entropy")
    assert entropy == {"Softmax": pytest.approx(math.log(10))}
    tables = look(nn.Softmax(dim=-1), sure.requires_grad_())
    assert cells(tables, "activations", "saturated") == {"Softmax": 1.0}


def test_activations_of_libraries_are_known_by_name() -> None:
    class NewGELUActivation(nn.Module):  # type: ignore[misc]  # torch has no types here
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.gelu(x, approximate="tanh")

    model = nn.Sequential(nn.Linear(8, 8), NewGELUActivation())
    assert list(cells(look(model, torch.randn(16, 8)), "activations", "mean")) == ["1"]
    assert "__call__" not in NewGELUActivation.__dict__


def test_a_plan_says_which_modules() -> None:
    before = nn.Linear.__dict__.get("__call__")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.GELU())
    x = torch.randn(64, 8)
    by_type = look(model, x, plan=chosen(module_types=("LayerNorm",)))
    assert list(cells(by_type, "activations", "std")) == ["2"]
    by_name = look(model, x, plan=chosen(tensors=frozenset({"3", "0"})))
    assert list(cells(by_name, "activations", "std")) == ["0", "3"]
    assert nn.Linear.__dict__.get("__call__") is before


def test_only_the_mode_that_was_asked_for_counts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(64, 8)
    with torch.no_grad():
        assert not look(model, x)
        assert not look(model, x, mode="eval")
        model.eval()
        assert list(cells(look(model, x, mode="eval"), "activations", "dead")) == ["1"]
        assert not look(model, x)


# -- attention


class Attending(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, *, causal: bool, size: float = 1.0, kv_heads: int = 4) -> None:
        super().__init__()
        self.causal, self.size, self.kv_heads = causal, size, kv_heads
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.size * x.unflatten(-1, (4, -1)).transpose(1, 2)
        key = query[:, : self.kv_heads]
        self.seen = [query.detach(), key.detach()]
        return functional.scaled_dot_product_attention(
            query, key, key, is_causal=self.causal, enable_gqa=self.kv_heads < 4
        )


def exact(model: Attending) -> tuple[float, float, float]:
    """Of the first sample of all heads and queries: largest logit, entropy, its share."""
    query, key = (part[0].double() for part in model.seen)
    key = key.repeat_interleave(4 // model.kv_heads, dim=0)
    logits = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    n = logits.shape[-1]
    if model.causal:
        logits = logits.masked_fill(~torch.ones(n, n).tril().bool(), -math.inf)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    allowed = torch.isfinite(logits).sum(-1)
    some = allowed > 1
    share = entropy[some] / allowed[some].log()
    return float(logits.max()), float(entropy[some].mean()), float(share.mean())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_says_its_logits_and_how_far_it_looks(causal: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    inner = Attending(causal=causal, kv_heads=kv_heads)
    model = nn.Sequential(nn.Linear(32, 32), inner)
    tables = look(model, torch.randn(3, 24, 32))
    largest, entropy, share = exact(inner)
    assert cells(tables, "attention", "logit_max") == {"1": pytest.approx(largest, rel=1e-4)}
    assert cells(tables, "attention", "entropy")["1"] == pytest.approx(entropy, rel=1e-4)
    assert cells(tables, "attention", "entropy_share")["1"] == pytest.approx(share, rel=1e-4)
    assert cells(tables, "attention", "qk_bound")["1"] >= largest
    assert functional.scaled_dot_product_attention.__module__ != "tocsin"


def test_a_mask_closes_what_it_closes() -> None:
    closed = torch.ones(6, 6, dtype=torch.bool).tril()

    class Masked(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self, mask: torch.Tensor) -> None:
            super().__init__()
            self.mask = mask

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)

    x = torch.randn(2, 6, 8, requires_grad=True)
    least = torch.zeros(6, 6).masked_fill(~closed, torch.finfo(torch.float32).min)
    found = [cells(look(Masked(mask), x), "attention", "entropy") for mask in (closed, least)]
    assert found[0]["Masked"] == pytest.approx(found[1]["Masked"])
    free = cells(look(Masked(torch.ones_like(closed)), x), "attention", "entropy")
    assert free["Masked"] > found[0]["Masked"]


def test_collapsed_attention_has_no_entropy() -> None:
    torch.manual_seed(0)
    tables = look(Attending(causal=False, size=100.0), torch.randn(2, 32, 32, requires_grad=True))
    assert cells(tables, "attention", "entropy_share")["Attending"] < 0.05
    assert cells(tables, "attention", "logit_max")["Attending"] > 1000


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_seen_once(need_weights: bool) -> None:
    class Layer(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x, x, x, need_weights=need_weights)[0]
            return out

    torch.manual_seed(0)
    tables = look(Layer(), torch.randn(3, 20, 32))
    share = cells(tables, "attention", "entropy_share")
    assert list(share) == ["attention"]
    assert 0.9 < share["attention"] < 1


def test_a_weight_that_lies_in_parts_is_left_alone() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    assert attention_readings.read_module("a", attention, x, x) is not None
    attention.in_proj_weight.device_mesh = attention.in_proj_weight.placements = ()
    assert attention_readings.read_module("a", attention, x, x) is None


# -- routers, logits, embeddings


class Experts(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.top_k = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        return out


def test_a_router_says_how_many_tokens_each_expert_gets() -> None:
    model = nn.Sequential(Experts(), nn.Linear(8, 16))
    with torch.no_grad():
        model[0].router.weight.zero_()
        model[0].router.weight[:2, 0] = torch.tensor([9.0, 8.0])
    x = torch.ones(500, 8)
    tables = look(model, x)
    load = [counts(tables, "routers", f"expert.{i}")["0.router"] for i in range(4)]
    assert load == [500, 500, 0, 0]
    assert counts(tables, "routers", "numel") == {"0.router": 500}
    assert cells(tables, "routers", "max_over_mean") == {"0.router": 2.0}
    z = math.log(math.exp(9) + math.exp(8) + 2) ** 2
    assert cells(tables, "routers", "router_z") == {"0.router": pytest.approx(z, rel=1e-4)}


def test_a_router_of_its_own_type_says_itself_which_it_chooses() -> None:
    class OneTopKRouter(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = functional.linear(x, self.weight)
            chosen = torch.full((len(x), 1), 2)
            return logits, logits.softmax(-1), chosen

    class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.gate = OneTopKRouter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.gate(x)[1])

    tables = look(Block(), torch.randn(40, 8))
    assert [counts(tables, "routers", f"expert.{i}")["gate"] for i in range(3)] == [0, 0, 40]


def load_of(chosen: torch.Tensor, top: int = 1) -> list[int] | None:
    """What three experts get, of tokens that the logits give to 0, 0, 1 and 2."""
    logits = torch.eye(3)[[0, 0, 1, 2]]
    reading = routers.read("r", logits, chosen, experts=3, top=top)
    return None if reading is None else [int(n) for n in reading.counts[1:]]


def test_what_a_router_says_it_chooses_is_looked_at_before_it_counts() -> None:
    assert load_of(torch.tensor([[2], [2], [1], [2]])) == [0, 1, 3]
    assert load_of(torch.tensor([2, 2, 1, 2])) == [0, 1, 3]
    # Tokens that no expert gets; on a GPU such a number would end the user's program.
    assert load_of(torch.tensor([[-1], [3], [1], [2]])) == [0, 1, 1]
    # A mask of all experts, and probabilities: then the logits say it.
    assert load_of(torch.eye(3, dtype=torch.int64)[[2, 2, 2, 2]]) == [2, 1, 1]
    assert load_of(torch.tensor([[0.9], [0.8], [0.7], [0.6]])) == [2, 1, 1]
    # Of another shape: of each token two, counts of each expert.
    assert load_of(torch.zeros(4, 2, dtype=torch.int64)) is None
    assert load_of(torch.tensor([900, 50, 50])) == [2, 1, 1]
    assert load_of(torch.tensor([900, 50, 50]), top=3) is None
    assert load_of(torch.tensor([900, 50]), top=2) is None


class Language(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.inner = nn.Linear(8, 8)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.tokens(x)))
        return out


def test_the_head_says_how_large_its_logits_are_and_an_embedding_how_long_its_rows() -> None:
    model = Language(tied=True)
    with torch.no_grad():
        model.tokens.weight.fill_(0.5)
        model.tokens.weight[17] *= 3
    tokens = torch.arange(40).reshape(4, 10)
    tables = look(model, tokens)
    log_z = model(tokens).logsumexp(-1)
    assert cells(tables, "logits", "log_z") == {"head": pytest.approx(log_z.mean().item())}
    assert cells(tables, "logits", "log_z_max") == {"head": pytest.approx(log_z.max().item())}
    length = 0.5 * math.sqrt(8)
    assert cells(tables, "embeddings", "row_norm_max") == {"tokens": pytest.approx(3 * length)}
    assert cells(tables, "embeddings", "row_norm_mean")["tokens"] == pytest.approx(1.04 * length)
    assert counts(tables, "embeddings", "row_of_max") == {"tokens": 17}


def test_what_is_no_head_is_none() -> None:
    assert output_head(Language(tied=False)) is None  # the last Linear is narrower
    wide = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))
    assert output_head(wide) is wide[1]
    words = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 32), nn.Linear(32, 10))
    assert output_head(words) is words[2]
    assert output_head(words[1:]) is None
    assert output_head(nn.Sequential(nn.Linear(8, 1))) is None


# -- does no harm


def test_what_cannot_be_calculated_with_is_not_read() -> None:
    class Narrow(nn.ReLU):  # type: ignore[misc]  # torch has no types here
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float8_e4m3fn)

    x = torch.rand(64, 8)
    assert look(Narrow(), x) == []
    assert "activations" not in current.isolation.off
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert all(is_readable(x.to(dtype)) for dtype in types)


def test_nothing_is_changed_kept_or_drawn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Language(tied=True), nn.Softmax(dim=-1), Attending(causal=True))
    model[2].forward = lambda x: functional.scaled_dot_product_attention(x, x, x)
    tokens = torch.arange(40).reshape(4, 10)
    plain = model(tokens)
    random = torch.get_rng_state()
    original = functional.scaled_dot_product_attention
    activations.arm(model)
    watched = model(tokens)
    assert b"tocsin" not in pickle.dumps(model[0])
    held = pickle.dumps(functional.scaled_dot_product_attention)
    assert b"tocsin" not in held
    pending = activations.drain()
    assert pickle.loads(held) is functional.scaled_dot_product_attention is original
    assert torch.equal(plain, watched)
    assert torch.equal(random, torch.get_rng_state())
    assert pending is not None
    assert all(
        not isinstance(value, torch.Tensor) and reading.sample is None
        for reading in pending.all  # type: ignore[attr-defined]
        for value in reading.values
    )
    copy.deepcopy(model[0])


def test_what_fails_is_taken_out_and_the_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(current.isolation, "off", {})
    monkeypatch.setattr(readings, "statistics", fail)
    original = functional.scaled_dot_product_attention
    before = nn.Linear.__dict__.get("__call__")
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    plain = model(x)
    activations.arm(model)
    assert torch.equal(model(x), plain)
    assert "injected" in current.isolation.off["activations"]
    assert not activations.armed
    assert functional.scaled_dot_product_attention is original
    assert nn.Linear.__dict__.get("__call__") is before


def test_tracers_and_transforms_see_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softmax(dim=-1))
    x = torch.randn(4, 8)
    activations.arm(model)
    traced = torch.fx.symbolic_trace(model)
    assert sum(node.op == "call_module" for node in traced.graph.nodes) == 4
    torch.func.vmap(model)(x)
    torch.func.jacrev(model)(x[0])
    pending = activations.drain()
    assert pending is None
    with warnings.catch_warnings(action="ignore"):
        scripted = torch.jit.script(model)
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
    assert b"tocsin" not in buffer.getvalue()
