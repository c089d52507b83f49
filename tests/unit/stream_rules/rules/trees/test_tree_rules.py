"""`tree_depth` and `feature_importance_overweight` on made records."""

from __future__ import annotations

import numpy as np
import pytest

from support.rules.restarts import told_with_restarts
from tocsin.schemas.records.frames import TensorFrame
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

DEPTH = only("TreeDepth")
OVERWEIGHT = only("FeatureImportanceOverweight")
FEATURES = [f"f{i}" for i in range(20)]


def tree(run: RunBuilder, step: int, depths: list[int], *, rank: int = 0) -> None:
    run.now_ms += run.step_ms
    run.add(
        TensorFrame(
            origin=run.origin(rank),
            step=step,
            collection="trees",
            rows=tuple(f"{step}.{i}" for i in range(len(depths))),
            columns=(),
            values=np.zeros((len(depths), 0), np.float32),
            count_columns=("depth",),
            counts=np.array(depths, np.uint64)[:, None],
        ),
        rank=rank,
    )


def importance(run: RunBuilder, step: int, values: list[float]) -> None:
    run.now_ms += run.step_ms
    names = FEATURES[: len(values)]
    run.tensors(step, "feature_importance", names, columns={"importance": values})


def test_the_deepest_new_tree_is_named_until_they_are_shallow_again() -> None:
    run = RunBuilder()
    for step in range(30):
        tree(run, step, [3, 9, 7] if 5 <= step < 10 else [3, 6, 2])
    issues = issues_of(run.records, specs=DEPTH)
    assert [(i.state, i.severity) for i in issues] == [
        ("firing", "warning"),
        ("resolved", "warning"),
    ]
    assert (issues[0].first_step, issues[0].subject.name) == (5, "5.1")
    assert issues[0].evidence.also == ("5.2",)
    told = [one.issue.model_dump_json() for one in replay(run.records, DEPTH)]
    assert told_with_restarts(run.records, DEPTH, every=3) == told


def test_a_logged_depth_will_do() -> None:
    run = RunBuilder()
    run.steps(range(10), columns={"log.tree_depth": [5.0] * 7 + [float("nan"), 12.0, 5.0]})
    assert assert_fires(run.records, "tree_depth", first_step=8, specs=DEPTH)


def test_it_runs_only_where_it_is_named() -> None:
    run = RunBuilder()
    for step in range(20):
        tree(run, step, [30])
    assert issues_of(run.records, "tree_depth") == []
    assert issues_of(run.records, specs=only("tree_depth", depth=30)) == []


def test_trees_that_are_no_trees_are_passed_over() -> None:
    run = RunBuilder()
    tree(run, 0, [])
    run.tensors(1, "trees", ["a"])
    tree(run, 2, [0, 1])
    tree(run, 3, [99], rank=1)
    assert issues_of(run.records, specs=DEPTH) == []


def test_three_features_with_nearly_all_importance() -> None:
    run = RunBuilder()
    even = [1.0] * 20
    for step in range(40):
        importance(run, step, [60.0, 30.0, 20.0, *even[3:]] if step >= 15 else even)
    (issue,) = issues_of(run.records, specs=OVERWEIGHT)
    assert (issue.severity, issue.first_step, issue.subject.name) == ("info", 15, "f0")
    assert "f0 47 %" in issue.reason
    told = [one.issue.model_dump_json() for one in replay(run.records, OVERWEIGHT)]
    assert told_with_restarts(run.records, OVERWEIGHT, every=3) == told


def test_logged_importances_will_do_and_it_is_over_in_time() -> None:
    run = RunBuilder()
    for step in range(40):
        high = 100.0 if 10 <= step < 20 else 1.0
        columns = {f"log.feature_importance.{name}": 1.0 for name in FEATURES}
        run.steps([step], columns={**columns, "log.feature_importance.f7": high})
    issues = issues_of(run.records, specs=OVERWEIGHT)
    assert [(i.state, i.subject.name) for i in issues] == [("firing", "f7"), ("resolved", "f7")]


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 20,
        [9.0, 9.0, 9.0, 1.0],
        [0.0] * 20,
        [float("nan")] * 20,
        [-5.0] * 20,
        [5.0],
        [50.0, 1.0, 1.0, *[5.0] * 17],
    ],
    ids=["even", "four features", "none", "no numbers", "negative", "one", "one large"],
)
def test_importances_that_are_well(values: list[float]) -> None:
    run = RunBuilder()
    for step in range(30):
        importance(run, step, values)
    assert issues_of(run.records, specs=OVERWEIGHT) == []


def test_the_first_trees_are_not_judged() -> None:
    run = RunBuilder()
    for step in range(12):
        importance(run, step, [1.0] + [0.0] * 19)
    assert issues_of(run.records, specs=OVERWEIGHT) == []
    specs = only("feature_importance_overweight", least_features=1, start_step=0, for_steps=1)
    assert_fires(run.records, "feature_importance_overweight", first_step=0, specs=specs)
