"""Numbers that are none, ranks that go, and states of many ranks and classes."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from support.records.counted import add
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.outcomes import Finding, Moment
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.rules.system.straggler_rank import StragglerRank, StragglerRankParams
from tocsin.stream_rules.signals.class_totals import ClassTotals, Recent
from tocsin.stream_rules.testing import RunBuilder, issues_of, only

FAILED = only("rule_failed")
NOW = cast(Moment, None)  # a rule that asks nothing of it


# -- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "column"),
    [
        ("scaler_skips", "scaler_skipped"),
        ("gradients_not_cleared", "gradients_uncleared"),
        ("dead_optimizer_state", "optimizer_renewed"),
        ("stalled_training", "step_time_s"),
    ],
)
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_is_no_issue(rule: str, column: str, number: float) -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(8), loss=1.0, columns={column: number})
    for second in range(2, 30):
        run.wait(2.0)
        run.heartbeat(last_step=8, forward_calls=second)
    assert issues_of(run.records, specs=(*only(rule), *FAILED)) == []


def test_a_text_of_the_rest_alone() -> None:
    run = RunBuilder()
    run.started()
    for step, tokens in ((100, {"0": 900, "5": 100}), (200, {"other": 5000})):
        run.steps([step], loss=1.0)
        add(run, step, "tokens", list(tokens), counts={"count": list(tokens.values())})
    found = issues_of(run.records, specs=(*only("nlp_sequence_ratio"), *FAILED))
    assert [(issue.rule, issue.state) for issue in found] == [
        ("nlp_sequence_ratio", "firing"),
        ("nlp_sequence_ratio", "resolved"),
    ]


def test_the_entropy_is_that_of_the_layer_named() -> None:
    run = RunBuilder()
    run.started()
    shares = {"qk_bound": [9.0, 9.0], "logit_max": [9.0, 9.0], "entropy_share": [0.2, 0.7]}
    add(run, 1, "attention", ["a", "b"], shares, {"numel": [1, 1]})
    # No entropy this time, and other layers.
    bounds = {"qk_bound": [9.0, 9.0, 900.0, 9.0], "logit_max": [9.0, 9.0, 900.0, 9.0]}
    add(run, 101, "attention", ["x", "y", "b", "z"], bounds, {"numel": [1] * 4})
    found = issues_of(run.records, specs=(*only("attention_logit_growth"), *FAILED))
    assert [issue.subject.name for issue in found] == ["b"]
    facts = {fact.name: fact.value for fact in found[0].evidence.facts}
    assert facts["entropy"] == pytest.approx(70.0)
    add(run, 201, "attention", ["c"], {"qk_bound": [950.0]}, {"numel": [1]})
    unknown = issues_of(run.records[:1] + run.records[2:3], specs=only("attention_logit_growth"))
    assert [fact.name for fact in unknown[0].evidence.facts] == ["largest_logit"]


# -- ranks ------------------------------------------------------------------------------------


def ranks(run: RunBuilder, world: int, steps: range, slow: int | None) -> list[StepFrame]:
    """A frame of each rank; all wait for the slow one in their backward pass."""
    made = []
    for rank in range(world):
        forward = 0.5 if rank == slow else 0.1
        values = np.tile(np.array([forward, 0.9 - forward, 1, 0], np.float32), (len(steps), 1))
        made.append(
            StepFrame(
                origin=replace(run.origin(rank), world_size=world),
                mode="train",
                steps=np.asarray(steps, np.uint64),
                at_us=np.full(len(steps), run.now_ms * 1000, np.uint64),
                columns=("forward_s", "backward_s", "step_time_s", "data_wait_s"),
                values=values,
            )
        )
    return made


def test_a_world_that_shrinks_has_other_ranks() -> None:
    run = RunBuilder()
    run.started()
    for first in range(0, 60, 10):
        for rank, frame in enumerate(ranks(run, 4, range(first, first + 10), slow=3)):
            run.add(frame, rank=rank)
    for first in range(60, 120, 10):
        for rank, frame in enumerate(ranks(run, 2, range(first, first + 10), slow=1)):
            run.add(frame, rank=rank)
    found = issues_of(run.records, specs=(*only("straggler_rank"), *FAILED))
    assert [(issue.state, issue.subject.name) for issue in found if issue.state != "ongoing"] == [
        ("firing", "rank 3"),
        ("resolved", "rank 3"),
        ("firing", "rank 1"),
    ]
    second = found[-1]
    assert isinstance(second, IssueFiring)
    # Ten steps of the new world are left out, and twenty are looked at.
    assert second.step == 60 + 10 + 20 - 1


def test_more_steps_than_a_series_has() -> None:
    run = RunBuilder()
    run.started()
    for first in range(0, 250, 10):
        for rank, frame in enumerate(ranks(run, 2, range(first, first + 10), slow=1)):
            run.add(frame, rank=rank)
    found = issues_of(run.records, specs=(*only("straggler_rank", for_steps=200), *FAILED))
    assert [issue.subject.name for issue in found if issue.state == "firing"] == ["rank 1"]
    issue = found[0]
    assert isinstance(issue, IssueFiring)
    # Which is step 10 only where as many steps are remembered as are looked at.
    assert issue.first_step == 10
    assert issue.evidence.series is not None
    assert issue.evidence.series.steps == tuple(range(82, 210))


@pytest.mark.parametrize(("for_steps", "most_bytes"), [(20, 600_000), (1000, 1_200_000)])
def test_the_state_of_a_thousand_ranks(for_steps: int, most_bytes: int) -> None:
    run = RunBuilder(world_size=1024)
    rule = StragglerRank("s", StragglerRankParams(for_steps=for_steps))
    found = set()
    for first in range(0, 80, 10):
        for frame in ranks(run, 1024, range(first, first + 10), slow=7):
            found |= {one.about for one in rule.on_steps(frame, NOW) if isinstance(one, Finding)}
    assert found == {"7"}
    for frame in ranks(run, 1024, range(80, 90), slow=7)[:-1]:
        assert list(rule.on_steps(frame, NOW)) == []
    assert len(rule.state.pending) == 10
    assert len(rule.snapshot()) < most_bytes


# -- classes ----------------------------------------------------------------------------------


def test_the_recent_labels_are_as_many_as_are_asked_for() -> None:
    recent, chance = Recent(), np.random.default_rng(0)
    whole: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    for i in range(50):
        table = chance.poisson(0.2, (10 + i % 3, 10 + i % 3)).astype(np.float64)
        whole.append(table)
        recent.add(table, float(table.sum()), 100)
        while sum(one.sum() for one in whole[1:]) >= 100:
            del whole[0]
        expected = np.zeros(np.max([one.shape for one in whole], axis=0))
        for one in whole:
            expected[: len(one), : len(one)] += one
        np.testing.assert_array_equal(recent.total(), expected)
        assert recent.seen == expected.sum()
        recent = load_state(Recent, dump_state(recent))


def test_the_states_of_many_classes_are_small() -> None:
    chance, tally, confusion = np.random.default_rng(0), ClassTotals(), Recent()
    for _ in range(64):
        labels = chance.poisson(0.007, (1000, 2)).astype(np.float64)
        tally.recent.add(labels, float(labels[:, 0].sum()), 500)
        table = np.diag(np.bincount(chance.integers(0, 100, 32), minlength=100)).astype(float)
        confusion.add(table, 32.0, 500)
    assert len(dump_state(tally)) < 100_000
    assert len(dump_state(confusion)) < 100_000


def test_full_tables_are_put_together() -> None:
    recent = Recent()
    for i in range(200):
        recent.add(np.ones((100, 100)), 10_000.0, 100_000)
        assert len(dump_state(recent)) < 600_000
        assert recent.seen == recent.total().sum() == 10_000 * recent.total()[0, 0]
        assert recent.seen >= min(10_000.0 * (i + 1), 100_000)
        assert recent.seen <= 200_000
