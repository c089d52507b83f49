"""The rules on large models, on made series: each branch, and what must stay quiet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from support.records.counted import add
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.signals.layer_history import LayerHistory
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

ATTENTION = only("attention_logit_growth")
LOGITS = only("logit_drift")
EXPERTS = only("moe_imbalance")
EMBEDDINGS = only("embedding_norm_growth")
LAYERS = ("blocks.0", "blocks.1")
Level = float | Sequence[float]


def attention(
    levels: Sequence[Level], *, shares: Sequence[Level] | None = None, every: int = 100
) -> RunBuilder:
    """Largest logits and shares of the entropy, of two layers, at each summary."""
    run = RunBuilder()
    run.started()
    for i, level in enumerate(levels):
        step = 1 + every * i
        run.steps([step], loss=1.0)
        top = np.broadcast_to(np.asarray(level, float), (2,))
        share = np.broadcast_to(np.asarray(0.5 if shares is None else shares[i], float), (2,))
        add(
            run,
            step,
            "attention",
            LAYERS,
            {"qk_bound": 3 * top, "logit_max": top, "entropy": 3 * share, "entropy_share": share},
            {"numel": [4096, 4096]},
        )
    return run


def said(run: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[tuple[str, str, str]]:
    return [(i.branch, i.severity, i.state) for i in issues_of(run.records, specs=specs)]


# -- attention_logit_growth -----------------------------------------------------------------


def test_logits_above_the_limit_in_two_summaries() -> None:
    run = attention([4.0, 20.0, (8.0, 130.0), (9.0, 150.0), 20.0])
    firing, resolved = (i for i in issues_of(run.records, specs=ATTENTION) if i.branch == "limit")
    assert (firing.severity, firing.stop_worthy, firing.step) == ("warning", False, 301)
    assert (firing.subject.name, firing.first_step) == ("blocks.1", 201)
    assert resolved.state == "resolved"


def test_the_first_step_is_that_of_the_layer_that_is_named() -> None:
    run = attention([4.0, (130.0, 4.0), (140.0, 4.0), (4.0, 160.0), (4.0, 170.0)])
    found = [i for i in issues_of(run.records, specs=ATTENTION) if i.branch == "limit"]
    assert [(i.subject.name, i.state, i.first_step) for i in found] == [
        ("blocks.0", "firing", 101),
        ("blocks.0", "resolved", 101),
        ("blocks.1", "firing", 301),
    ]


def test_logits_far_above_it_at_once() -> None:
    found = said(attention([4.0, (900.0, 4.0)]), ATTENTION)
    assert found == [("limit", "warning", "firing")]


def test_logits_on_their_way_to_the_limit() -> None:
    run = attention([10.0, 20.0, 30.0, 45.0, 70.0, 72.0, 60.0])
    issues = issues_of(run.records, specs=ATTENTION)
    assert [(i.branch, i.severity, i.state) for i in issues] == [
        ("growth", "info", "firing"),
        ("growth", "info", "resolved"),
    ]
    assert "from 10 to 70" in issues[0].reason


def test_attention_that_collapses() -> None:
    run = attention([9.0] * 4, shares=[0.9, 0.4, (0.4, 0.004), (0.4, 0.003)])
    issue = assert_fires(run.records, "attention_logit_growth", specs=ATTENTION)
    assert (issue.branch, issue.severity, issue.subject.name) == (
        "entropy_collapse",
        "info",
        "blocks.1",
    )
    assert issue.first_step == 201


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(attention([0.1, 2.0, 8.0, 15.0, 20.0, 22.0]), id="from small to usual"),
        pytest.param(attention([90.0] * 10), id="high, but steady"),
        pytest.param(attention([4.0, 150.0, 4.0, 150.0, 4.0]), id="single summaries"),
        pytest.param(attention([30.0, 40.0, 50.0, 60.0, 70.0], every=1000), id="slow"),
        pytest.param(attention([-3.0] * 5), id="negative"),
        pytest.param(attention([5.0] * 6, shares=[0.05, *[0.008] * 5]), id="sharp from the start"),
        pytest.param(attention([50.0]), id="one summary"),
    ],
)
def test_attention_left_alone(run: RunBuilder) -> None:
    assert said(run, ATTENTION) == []


# -- logit_drift ----------------------------------------------------------------------------


def logits(levels: Sequence[float], *, every: int = 100, labels: bool = True) -> RunBuilder:
    """The mean log Z at each summary."""
    run = RunBuilder()
    run.started()
    if labels:
        add(run, 0, "labels", ["0", "1"], counts={"labels": [5, 5]})
    for i, level in enumerate(levels):
        run.steps([every * i], loss=1.0)
        numbers = {"log_z": [level], "log_z_max": [level + 1]}
        add(run, every * i, "logits", ["head"], numbers, {"numel": [256]})
    return run


def test_a_level_that_is_far_from_where_it_began() -> None:
    issues = issues_of(logits([-31.0, -40.0, -53.0, -54.0, -33.0]).records, specs=LOGITS)
    assert [(i.branch, i.severity, i.state) for i in issues] == [
        ("limit", "info", "firing"),
        ("limit", "info", "resolved"),
    ]
    assert "from -31 to -54" in issues[0].reason
    assert issues[0].first_step == 200


def test_a_level_that_is_out_of_all_bounds_is_a_warning() -> None:
    assert said(logits([4.0, 300.0, 400.0]), LOGITS) == [("limit", "warning", "firing")]


def test_a_level_that_moves_steadily() -> None:
    run = logits([4.0 + 0.8 * i for i in range(20)])
    issue = assert_fires(run.records, "logit_drift", specs=LOGITS)
    assert issue.branch == "slope"
    assert "by +8 per 1,000 steps" in issue.reason


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(logits([-31.0 + (-1) ** i for i in range(20)]), id="a fine-tuned model"),
        pytest.param(logits([4.8, *[13.0] * 20]), id="a classifier that has grown certain"),
        pytest.param(logits([4.8 + 2 * np.log1p(i) for i in range(20)]), id="and goes on to"),
        pytest.param(logits([5.0, 400.0, 5.0, 5.0]), id="one summary"),
        pytest.param(logits([100.0 * i for i in range(20)], labels=False), id="no cross-entropy"),
        pytest.param(logits([5.0]), id="the first summary"),
    ],
)
def test_levels_left_alone(run: RunBuilder) -> None:
    assert said(run, LOGITS) == []


# -- moe_imbalance --------------------------------------------------------------------------


def experts(loads: Sequence[Sequence[float]], *, top: int = 2) -> RunBuilder:
    """How many tokens each expert has in each summary."""
    run = RunBuilder()
    run.started()
    for i, load in enumerate(loads):
        run.steps([1 + 100 * i], loss=1.0)
        counts = np.asarray(load, float)
        columns = {f"expert.{j}": [n] for j, n in enumerate(counts)}
        add(
            run,
            1 + 100 * i,
            "routers",
            ["blocks.0.router"],
            {"max_over_mean": [counts.max() / max(1.0, counts.mean())], "router_z": [1.0]},
            {"numel": [counts.sum() / top], **columns},
        )
    return run


EVEN = [100.0] * 8


@pytest.mark.parametrize(
    ("loads", "top"),
    [
        pytest.param([[700.0] + [14.0] * 7] * 3, 1, id="seven times the mean of eight"),
        pytest.param([[396.0, *[58.0] * 6, 56.0]] * 3, 2, id="nearly each token, of two choices"),
        pytest.param([[950.0, 50.0]] * 3, 1, id="of two experts"),
    ],
)
def test_an_expert_with_too_much(loads: list[list[float]], top: int) -> None:
    issue = assert_fires(experts(loads, top=top).records, "moe_imbalance", specs=EXPERTS)
    assert (issue.branch, issue.severity, issue.first_step) == ("overload", "warning", 1)
    assert issue.reason.startswith("expert 0 of blocks.0.router has")


def test_an_expert_without_tokens() -> None:
    one = [[0.0, *[200.0] * 7]] * 6
    run = experts([EVEN, *one, EVEN])
    issues = issues_of(run.records, specs=EXPERTS)
    assert [(i.branch, i.severity, i.state) for i in issues] == [
        ("dead_expert", "info", "firing"),
        ("dead_expert", "info", "resolved"),
    ]
    assert (issues[0].step, issues[0].first_step) == (301, 101)
    half = experts([[0.0] * 4 + [200.0] * 4] * 6)
    assert said(half, EXPERTS) == [("dead_expert", "warning", "firing")]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(experts([EVEN] * 8), id="even"),
        pytest.param(experts([[790.0, *[1.0] * 7], *[EVEN] * 5], top=1), id="in the beginning"),
        pytest.param(experts([EVEN, [700.0, *[14.0] * 7], EVEN] * 3, top=1), id="now and then"),
        pytest.param(experts([[600.0, 400.0]] * 6, top=1), id="sixty of a hundred"),
        pytest.param(experts([[0.0, 4.0, 4.0, 4.0]] * 8), id="few tokens"),
        pytest.param(experts([[0.0] * 8] * 8), id="none at all"),
    ],
)
def test_experts_left_alone(run: RunBuilder) -> None:
    assert said(run, EXPERTS) == []


def test_routers_of_several_sizes() -> None:
    run = RunBuilder()
    run.started()
    for step in range(0, 500, 100):
        for name, counts in (("a", [960, 20, 10, 10]), ("b", [96, 4])):
            columns = {f"expert.{j}": [n] for j, n in enumerate(counts)}
            numbers = {"max_over_mean": [1.0], "router_z": [1.0]}
            add(run, step, "routers", [name], numbers, {"numel": [sum(counts)], **columns})
    assert {i.subject.name for i in issues_of(run.records, specs=EXPERTS)} == {"a", "b"}


# -- embedding_norm_growth ------------------------------------------------------------------


def embeddings(
    means: Sequence[float], ratios: Sequence[float] | float = 2.0, *, start: int = 1
) -> RunBuilder:
    """The mean length of the rows, and how much longer the longest one is."""
    run = RunBuilder()
    run.started()
    longer = np.broadcast_to(np.asarray(ratios, float), (len(means),))
    for i, (mean, ratio) in enumerate(zip(means, longer, strict=True)):
        step = start + 100 * i
        run.steps([step], loss=1.0)
        numbers = {"row_norm_mean": [mean], "row_norm_max": [mean * ratio]}
        add(run, step, "embeddings", ["table"], numbers, {"numel": [500], "row_of_max": [17]})
    return run


def test_a_row_that_outgrows_all_others() -> None:
    issues = issues_of(embeddings([1.0] * 4, [3, 80, 90, 4]).records, specs=EMBEDDINGS)
    assert [(i.branch, i.severity, i.state) for i in issues] == [
        ("ratio", "info", "firing"),
        ("ratio", "info", "resolved"),
    ]
    assert "the longest row (17) of table is 90 times" in issues[0].reason
    assert issues[0].first_step == 101


@pytest.mark.parametrize("start", [1, 50_001])
def test_a_table_that_grows_faster_than_the_steps(start: int) -> None:
    run = embeddings([1.02 ** (5 * i) for i in range(40)], start=start)
    issue = assert_fires(run.records, "embedding_norm_growth", specs=EMBEDDINGS)
    assert issue.branch == "growth"


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(embeddings([0.02 + 0.1 * i for i in range(30)]), id="even steps"),
        pytest.param(embeddings([0.02 + 0.1 * i**0.5 for i in range(30)]), id="random steps"),
        pytest.param(embeddings([0.02, *[4.0] * 30]), id="a quick beginning"),
        pytest.param(embeddings([0.1 * i for i in range(1, 60, 7)]), id="few summaries"),
        pytest.param(embeddings([1.0] * 3, [1, 80, 1]), id="one summary"),
        pytest.param(embeddings([0.0] * 6), id="a table of zeros"),
        pytest.param(embeddings([1e30, 1.0, 1e-30]), id="decay"),
    ],
)
def test_embeddings_left_alone(run: RunBuilder) -> None:
    assert said(run, EMBEDDINGS) == []


# -- all ------------------------------------------------------------------------------------

RUNS = {
    "attention": (ATTENTION, attention([10, 20, 30, 45, 70, (90, 110), 150, 400, 20, 20])),
    "logits": (LOGITS, logits([float(i * i) for i in range(12)])),
    "experts": (EXPERTS, experts([[700.0, *[14.0] * 6, 0.0]] * 8, top=1)),
    "embeddings": (EMBEDDINGS, embeddings([1.1**i for i in range(30)])),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_restart_in_the_middle_changes_nothing(name: str) -> None:
    specs, run = RUNS[name]
    cut = len(run.records) // 2
    first = PartitionEngine(specs)
    told = replay(run.records[:cut], engine=first)
    ((number, state, engine),) = first.runs()
    saved = engine.snapshots(next_offset=state.next_offset, clock_ms=state.clock_ms, software="")
    second = PartitionEngine(specs)
    second.adopt(number, run.run_id, {s.rule: s for s in saved}, next_offset=state.next_offset)
    found: list[IssueFiring] = [one.issue for one in told]
    found += [one.issue for one in replay(run.records[cut:], engine=second)]
    assert found == issues_of(run.records, specs=specs)
    assert found


def test_layers_that_come_and_go() -> None:
    run = RunBuilder(world_size=2)
    run.started()
    for step, rows in ((0, ["a"]), (100, ["b", "a"]), (100, ["b", "a"]), (300, ["a"])):
        for rank in (0, 1):
            level = [500.0 if name == "a" and step else 1.0 for name in rows]
            columns = {"qk_bound": level, "logit_max": level}
            add(run, step, "attention", rows, columns, {"numel": [1] * len(rows)}, rank=rank)
    (issue,) = issues_of(run.records, specs=ATTENTION)
    assert (issue.subject.name, issue.first_rank, issue.first_step) == ("a", 0, 100)


def test_of_many_layers_few_summaries_are_remembered() -> None:
    history = LayerHistory()
    rows = [f"blocks.{i}" for i in range(5000)]
    for step in range(40):
        history.add(step, rows, np.full(5000, float(step)))
    assert history.steps == list(range(24, 40))
    assert history.values.shape == (16, 5000)
    history.add(40, ["blocks.7"], np.ones(1))
    series = history.series(0, "load")
    assert series.steps == tuple(range(24, 41))
    assert series.values == (*map(float, range(24, 40)), 1.0)


def test_numbers_that_are_none_are_left_alone() -> None:
    nan = float("nan")
    assert said(attention([nan] * 5, shares=[nan] * 5), ATTENTION) == []
    assert said(logits([nan] * 12), LOGITS) == []
    assert said(embeddings([nan] * 8), EMBEDDINGS) == []
