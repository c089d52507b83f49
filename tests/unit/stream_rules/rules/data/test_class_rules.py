"""`class_imbalance` and `confusion` on made counts: each branch, and what must stay quiet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from support.records.counted import add, as_sagemaker, classes
from tocsin.schemas.records.frames import Mode
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

IMBALANCE = only("class_imbalance")
CONFUSION = only("confusion")
REFERENCE = {name: as_sagemaker(name) for name in ("class_imbalance", "confusion")}
Counts = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]
WEIGHTS = ("0.weight", "0.bias", "2.weight", "2.bias")


def table(rows: Shares, labels: float) -> Counts:
    """A confusion table of so many labels, its rows as shares of all."""
    return np.round(rows * labels).astype(np.int64)


def good(classes: int, right: float = 0.9) -> Shares:
    """Shares of a classifier that is right this often, whatever the class."""
    wrong = (1 - right) / (classes - 1)
    return np.where(np.eye(classes, dtype=bool), right, wrong) / classes


def run_of(
    tables: Sequence[Counts],
    *,
    width: int | None = None,
    rows: int | None = None,
    optimizers: int = 1,
    mode: Mode = "train",
) -> RunBuilder:
    """A run with such tables each 100 steps; `width` is that of the last layer, `rows` those of an
    embedding."""
    run = RunBuilder()
    run.started(optimizers=optimizers)
    width = len(tables[0]) if width is None else width
    add(run, 1, "weights", WEIGHTS, counts={"numel": [640, 64, 64 * width, width]})
    if rows is not None:
        add(run, 1, "embeddings", ["table"], counts={"numel": [rows]})
    for i, counted in enumerate(tables, 1):
        run.steps([100 * i], loss=1.0)
        classes(run, 100 * i, counted, mode=mode)
    return run


def said(run: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[tuple[str, str, str]]:
    return [(i.branch, i.severity, i.state) for i in issues_of(run.records, specs=specs)]


ONE = np.diag([0, 0, 0, 120, 0, 0, 0, 0, 0, 0])


# -- one class ------------------------------------------------------------------------------


def test_labels_of_one_class_are_told_at_the_first_summary() -> None:
    issue = assert_fires(run_of([ONE]).records, "class_imbalance", first_step=0, specs=IMBALANCE)
    assert (issue.branch, issue.severity, issue.stop_worthy) == ("one_class", "warning", False)
    assert issue.reason == "all of the 120 labels so far are class 3, of 10 classes"


def test_sorted_data_is_over_when_the_next_class_comes() -> None:
    mixed = ONE + np.diag([0] * 9 + [30])
    assert said(run_of([ONE, mixed]), IMBALANCE) == [
        ("one_class", "warning", "firing"),
        ("one_class", "warning", "resolved"),
    ]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        pytest.param(run_of([ONE // 2]), [], id="60 labels"),
        pytest.param(run_of([table(good(10), 500)]), [], id="ten classes"),
        pytest.param(run_of([ONE], width=7), ["info"], id="places in a batch"),
        pytest.param(run_of([ONE], width=40), ["info"], id="candidates of a ranking"),
        pytest.param(run_of([ONE], optimizers=2), ["info"], id="a GAN"),
        pytest.param(run_of([200 * ONE] * 2), ["info"], id="images without an object"),
        pytest.param(run_of([200 * ONE] * 5), ["info", "warning"], id="but not so many"),
        pytest.param(run_of([np.diag([1000, 0])]), ["info"], id="one of two may be rare"),
        pytest.param(
            run_of([np.diag([1000, 0])] * 5), ["info", "warning"], id="but not as rare as that"
        ),
        pytest.param(run_of([ONE], mode="eval"), [], id="an evaluation by class"),
    ],
)
def test_who_may_have_one_class(run: RunBuilder, expected: list[str]) -> None:
    assert [severity for _, severity, _ in said(run, IMBALANCE)] == expected


# -- unequal classes ------------------------------------------------------------------------

RARE = np.diag([980, 20])


def test_a_class_of_very_few_labels() -> None:
    issue = assert_fires(run_of([RARE]).records, "class_imbalance", specs=IMBALANCE)
    assert (issue.branch, issue.severity, issue.subject.name) == ("imbalance", "info", "class 1")
    assert issue.evidence.facts[0].value == pytest.approx(49)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_of([RARE // 4]), id="few labels so far"),
        pytest.param(run_of([np.diag([500, 42])]), id="twelvefold, of which a sample is not sure"),
        pytest.param(run_of([np.diag([4000, 600])]), id="sevenfold"),
        pytest.param(run_of([RARE], rows=2), id="tokens of the model's own"),
        pytest.param(run_of([np.diag([500, 500, 0])]), id="a place that no class has"),
    ],
)
def test_what_is_no_imbalance(run: RunBuilder) -> None:
    assert said(run, IMBALANCE) == []


def test_the_reference_takes_the_ratio_as_it_is() -> None:
    run = run_of([np.diag([990, 10])])
    assert [b for b, _, _ in said(run, REFERENCE["class_imbalance"])] == ["imbalance"]
    assert [b for b, *_ in said(run_of([np.diag([500, 42])]), REFERENCE["class_imbalance"])] == [
        "imbalance"
    ]
    assert said(run_of([np.diag([909, 91])]), REFERENCE["class_imbalance"]) == []


# -- a class left behind --------------------------------------------------------------------

LEFT = good(4)
LEFT[2] = [0.2, 0.02, 0.01, 0.02]


def test_a_class_that_the_others_leave_behind() -> None:
    run = run_of([table(good(4, 0.3), 600)] * 3 + [table(LEFT, 600)] * 4)
    issue = assert_fires(run.records, "class_imbalance", first_step=400, specs=IMBALANCE)
    assert (issue.branch, issue.severity) == ("misprediction", "info")
    assert issue.reason.startswith("96 % of class 2 are predicted wrongly")


def test_evaluations_are_judged_for_themselves() -> None:
    run = run_of([table(LEFT, 600)] * 4, mode="eval")
    (issue,) = [i for i in issues_of(run.records, specs=IMBALANCE) if i.state == "firing"]
    assert "wrongly in eval" in issue.reason


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param([table(good(10, 0.1), 600)] * 10, id="nothing learned"),
        pytest.param([table(good(10, 0.5), 600)] * 10, id="a hard task"),
        pytest.param([table(LEFT, 600)] * 2 + [table(good(4), 600)] * 5, id="for two summaries"),
        pytest.param([table(LEFT, 40)] * 5, id="few labels"),
    ],
)
def test_mispredictions_that_are_no_news(tables: list[Counts]) -> None:
    assert said(run_of(tables), IMBALANCE) == []


# -- confusion ------------------------------------------------------------------------------

TAKEN = good(4)
TAKEN[1] = [0.01, 0.03, 0.2, 0.01]


def test_a_class_taken_for_another() -> None:
    run = run_of([table(TAKEN, 800)] * 3 + [table(good(4), 800)] * 2)
    issues = issues_of(run.records, specs=CONFUSION)
    assert [i.state for i in issues] == ["firing", "resolved"]
    issue = issues[0]
    assert (issue.branch, issue.severity, issue.first_step) == ("off_diagonal", "info", 100)
    assert issue.reason.startswith("80 % of class 1 are predicted as class 2")
    assert [f.value for f in issue.evidence.facts[1:3]] == [1.0, 2.0]


def test_summaries_of_few_labels_each_are_added_up_until_they_are_enough() -> None:
    one = np.diag([1, 0, 1, 1])
    one[1, 2] = 1
    issue = issues_of(run_of([one] * 150).records, specs=CONFUSION)[0]
    assert issue.reason.startswith("100 % of class 1 are predicted as class 2")


def test_a_class_taken_for_many_others() -> None:
    spread = good(6, 0.95)
    spread[4] = np.array([0.2, 0.2, 0.2, 0.2, 0.0, 0.2]) / 6
    issue = assert_fires(run_of([table(spread, 900)] * 3).records, "confusion", specs=CONFUSION)
    assert (issue.branch, issue.subject.name) == ("diagonal", "class 4")


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_of([table(TAKEN, 800)] * 2), id="two summaries"),
        pytest.param(run_of([table(TAKEN, 80)] * 4), id="few labels"),
        pytest.param(run_of([table(good(4, 0.7), 800)] * 9), id="a mediocre classifier"),
        pytest.param(run_of([table(good(10, 0.1), 800)] * 9), id="an untrained one"),
        pytest.param(run_of([table(TAKEN, 800)] * 9, rows=4), id="tokens of the model's own"),
    ],
)
def test_what_is_no_confusion(run: RunBuilder) -> None:
    assert said(run, CONFUSION) == []


def test_the_reference_wants_nearly_perfect_classes() -> None:
    assert said(run_of([table(good(4, 0.85), 800)]), REFERENCE["confusion"]) == [
        ("diagonal", "info", "firing")
    ]
    assert said(run_of([table(good(4, 0.95), 800)]), REFERENCE["confusion"]) == []
    assert said(run_of([table(TAKEN, 800)]), REFERENCE["confusion"])[0][0] == "off_diagonal"


def test_more_classes_than_are_judged() -> None:
    specs = only("confusion", category_no=2)
    assert said(run_of([table(TAKEN, 800)] * 4), specs) == []


# -- both -----------------------------------------------------------------------------------


def half_way(run: RunBuilder, specs: tuple[RuleSpec, ...]) -> list[IssueFiring]:
    """What is found if another worker goes on from the states in the middle of the run."""
    cut = len(run.records) // 2
    first = PartitionEngine(specs)
    told = replay(run.records[:cut], engine=first)
    ((number, state, engine),) = first.runs()
    saved = engine.snapshots(next_offset=state.next_offset, clock_ms=state.clock_ms, software="")
    second = PartitionEngine(specs)
    second.adopt(number, run.run_id, {s.rule: s for s in saved}, next_offset=state.next_offset)
    return [one.issue for one in (*told, *replay(run.records[cut:], engine=second))]


@pytest.mark.parametrize("specs", [IMBALANCE, CONFUSION], ids=["class_imbalance", "confusion"])
def test_a_restart_in_the_middle_changes_nothing(specs: tuple[RuleSpec, ...]) -> None:
    run = run_of([table(TAKEN, 600)] * 6 + [table(good(5), 600)] * 2)
    assert half_way(run, specs) == issues_of(run.records, specs=specs)
    assert half_way(run, specs)


@pytest.mark.parametrize("specs", [IMBALANCE, CONFUSION], ids=["class_imbalance", "confusion"])
def test_repeats_gaps_and_other_ranks_add_nothing(specs: tuple[RuleSpec, ...]) -> None:
    run = RunBuilder(world_size=2)
    run.started()
    for step in (0, 100, 100, 700, 800, 900):
        classes(run, step, table(TAKEN, 450), rank=0)
        classes(run, step, table(good(4), 100_000), rank=1)
    found = issues_of(run.records, specs=specs)
    assert [i.first_rank for i in found] == [0]
