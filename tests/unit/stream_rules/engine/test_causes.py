"""Causes before consequences: the decision on made issues, and through the engine."""

from __future__ import annotations

import pytest

from tocsin.schemas.records.issues import (
    IssueFiring,
    IssueResolved,
    Severity,
    Subject,
    SubjectKind,
    gravest,
)
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.causal_order import CAUSAL_ORDER, ENDS, LATER, ROOTS
from tocsin.stream_rules.engine.causes import (
    AFTER_STEPS,
    KNOWN,
    MAX_WHY,
    SAMPLED_STEPS,
    WITHIN_MS,
    Causes,
    cause_first,
)
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder


def made(
    rule: str,
    step: int | None = 100,
    *,
    rank: int | None = None,
    branch: str = "",
    kind: SubjectKind = "loss",
    onset_ms: int = 0,
    severity: Severity = "warning",
) -> IssueFiring:
    return IssueFiring(
        run_id="r",
        incarnation="i",
        issue_id=f"{rule}{branch}-{step}-{rank}",
        rule=rule,
        use=rule,
        branch=branch,
        rule_version=1,
        severity=severity,
        subject=Subject(kind=kind, name="x"),
        reason=f"{rule} happened",
        first_step=step,
        first_rank=rank,
        onset_ms=onset_ms,
    )


def roots(*issues: IssueFiring) -> dict[str, str]:
    """By rule, the rule that its story began with."""
    causes = Causes()
    for issue in issues:
        causes.fired(issue)
    rules = {known.id: known.rule for known in causes.known}
    return {known.rule: rules[known.root] for known in causes.known}


def test_what_begins_a_story_is_the_root_of_all_that_follows() -> None:
    found = roots(
        made("weight_update_ratio", 10, branch="large", kind="tensor"),
        made("exploding_gradient", 12),
        made("loss_spike", 13),
        made("nonfinite", 20),
    )
    assert set(found.values()) == {"weight_update_ratio"}


def test_what_no_mechanism_joins_are_two_stories() -> None:
    found = roots(made("overfit", 10), made("nonfinite", 20))
    assert found == {"overfit": "overfit", "nonfinite": "nonfinite"}


def test_advice_is_the_cause_of_no_more_than_advice() -> None:
    advice = made("unnormalised_inputs", 2, severity="info")
    alone = roots(advice, made("nonfinite", 20))
    assert alone["nonfinite"] == "nonfinite"
    graver = made("unnormalised_inputs", 2)
    assert roots(graver, made("nonfinite", 20))["nonfinite"] == "unnormalised_inputs"


def test_a_cause_does_not_begin_after_its_consequence() -> None:
    found = roots(made("nonfinite", 20), made("exploding_gradient", 21))
    assert found == {"nonfinite": "nonfinite", "exploding_gradient": "nonfinite"}
    found = roots(made("loss_spike", 20), made("exploding_gradient", 21))
    assert found == {"loss_spike": "loss_spike", "exploding_gradient": "exploding_gradient"}


def test_but_one_that_is_read_off_summaries_may_be_seen_a_little_later() -> None:
    seen = made("weight_update_ratio", 20 + SAMPLED_STEPS, branch="large", kind="tensor")
    assert roots(made("loss_spike", 20), seen)["loss_spike"] == "weight_update_ratio"
    later = made("weight_update_ratio", 21 + SAMPLED_STEPS, branch="large", kind="tensor")
    assert roots(made("loss_spike", 20), later)["loss_spike"] == "loss_spike"


def test_a_cause_that_is_found_late_takes_over_what_was_told_with_its_consequences() -> None:
    causes = Causes()
    assert causes.fired(made("exploding_gradient", 12)) == []
    spike = causes.fired(made("loss_spike", 13))
    assert [(a.issue, a.cause) for a in spike] == [
        ("loss_spike-13-None", "exploding_gradient-12-None")
    ]
    late = causes.fired(made("gradients_not_cleared", 2))
    root = "gradients_not_cleared-2-None"
    assert {(a.issue, a.cause) for a in late} == {
        ("exploding_gradient-12-None", root),
        ("loss_spike-13-None", root),
    }


def test_a_consequence_says_first_what_to_fix_first() -> None:
    causes = Causes()
    causes.fired(made("gradients_not_cleared", 2))
    causes.fired(made("exploding_gradient", 12))
    (found,) = causes.fired(made("loss_spike", 13))
    assert found.rule == "gradients_not_cleared"
    assert cause_first("Lower the rate.", found.cause, found.rule) == (
        "Fix gradients_not_cleared (gradient) first: this issue follows from it. Lower the rate."
    )


def test_the_sentence_names_the_cause_and_the_mechanism() -> None:
    causes = Causes()
    causes.fired(made("exploding_gradient", 12))
    (why,) = causes.fired(made("loss_spike", 13))
    assert why.why.startswith("exploding_gradient (explodin) began at step 12: exploding_gradient")
    assert "one step along a gradient of that size" in why.why


def test_the_sentence_has_an_end_however_long_the_chain() -> None:
    causes = Causes()
    causes.fired(made("exploding_gradient", 12).model_copy(update={"reason": "x" * 900}))
    causes.fired(made("loss_spike", 13).model_copy(update={"reason": "y" * 900}))
    causes.fired(made("nonfinite", 14))
    causes.fired(made("gradients_not_cleared", 2))
    whys = [len(known.why) for known in causes.known]
    assert max(whys) == MAX_WHY


def test_of_several_the_first_and_of_one_step_the_one_before_in_the_order() -> None:
    found = roots(
        made("dead_relu", 10, kind="layer"),
        made("saturated_activation", 10, kind="layer"),
        made("vanishing_gradient", 30, kind="tensor"),
    )
    assert found["vanishing_gradient"] == "saturated_activation"
    found = roots(
        made("dead_relu", 5, kind="layer"),
        made("saturated_activation", 10, kind="layer"),
        made("vanishing_gradient", 30, kind="tensor"),
    )
    assert found["vanishing_gradient"] == "dead_relu"


def test_one_condition_of_a_rule_may_be_a_cause_that_the_others_are_not() -> None:
    assert roots(made("nonfinite", 9, branch="input"), made("loss_spike", 9)) == {
        "nonfinite": "nonfinite",
        "loss_spike": "nonfinite",
    }


def test_an_issue_that_is_over_explains_a_little_longer() -> None:
    for gap, root in ((AFTER_STEPS, "weight_update_ratio"), (AFTER_STEPS + 1, "loss_spike")):
        causes = Causes()
        first = made("weight_update_ratio", 10, branch="large")
        causes.fired(first)
        causes.resolved(IssueResolved(**{**first.model_dump(), "step": 30}))
        causes.fired(made("loss_spike", 30 + gap))
        rules = {known.id: known.rule for known in causes.known}
        assert rules[causes.known[-1].root] == root


@pytest.mark.parametrize("branch", ["input", "weight"])
def test_a_nan_that_comes_from_outside_is_a_root(branch: str) -> None:
    found = roots(
        made("learning_rate_anomaly", 300, branch="jump"),
        made("weight_update_ratio", 300, branch="large", kind="tensor"),
        made("loss_spike", 9_295),
        made("nonfinite", 9_300, branch=branch, severity="critical"),
    )
    assert found["nonfinite"] == "nonfinite"
    # Also where the other fault has only just begun.
    found = roots(
        made("loss_diverged", 9_290, branch="risen"), made("nonfinite", 9_300, branch=branch)
    )
    assert found["nonfinite"] == "nonfinite"
    # Only a device that computes wrongly puts NaN there.
    found = roots(made("replica_divergence", 9_290), made("nonfinite", 9_300, branch=branch))
    assert found["nonfinite"] == "replica_divergence"


OLD_AND_OPEN = [
    ("learning_rate_anomaly", "jump"),
    ("weight_update_ratio", "large"),
    ("weight_update_ratio", "small"),
    ("loss_input_mismatch", "probabilities_as_logits"),
    ("gradients_not_cleared", ""),
    ("attention_logit_growth", "limit"),
    ("logit_drift", "limit"),
    ("embedding_norm_growth", "growth"),
    ("low_precision_range", "overflow"),
    ("low_precision_range", "underflow"),
    ("moe_imbalance", "overload"),
    ("loss_spike", ""),
    ("gpu_hardware_error", ""),
]


@pytest.mark.parametrize(
    ("effect", "branch"), [("nonfinite", "loss"), ("nonfinite", "gradient"), ("loss_spike", "")]
)
@pytest.mark.parametrize(("cause", "of"), OLD_AND_OPEN)
def test_an_old_open_issue_is_not_the_cause_of_a_new_fault(
    cause: str, of: str, effect: str, branch: str
) -> None:
    if cause == effect:
        return
    old = made(cause, 300, branch=of, kind="tensor")
    new = made(effect, 300 + LATER + 1, branch=branch)
    assert roots(old, new)[effect] == effect


def test_what_hardly_moves_is_no_cause_of_a_loss_that_rises() -> None:
    small = made("weight_update_ratio", 100, branch="small", kind="tensor")
    assert roots(small, made("loss_diverged", 120))["loss_diverged"] == "loss_diverged"
    flat = made("loss_not_decreasing", 5_000, branch="flat")
    assert roots(small, flat)["loss_not_decreasing"] == "weight_update_ratio"
    rising = made("loss_not_decreasing", 5_000, branch="rising")
    assert roots(small, rising)["loss_not_decreasing"] == "loss_not_decreasing"


def test_a_nan_that_the_training_does_not_go_on_from_explains_nothing() -> None:
    for branch in ("evaluation_loss", "scalar", "skipped"):
        found = roots(made("nonfinite", 10, branch=branch), made("loss_spike", 20))
        assert found["loss_spike"] == "loss_spike"


def test_a_device_explains_what_comes_within_the_hour() -> None:
    broken = made("gpu_hardware_error", None, kind="device", onset_ms=1_000)
    soon = made("loss_spike", 40, onset_ms=1_000 + WITHIN_MS)
    assert roots(broken, soon)["loss_spike"] == "gpu_hardware_error"
    late = made("loss_spike", 40, onset_ms=1_001 + WITHIN_MS)
    assert roots(broken, late)["loss_spike"] == "loss_spike"


def test_an_issue_that_comes_again_is_no_consequence_of_itself() -> None:
    causes = Causes()
    depth = made("vanishing_gradient", 0, branch="depth", kind="tensor")
    causes.fired(depth)
    share = made("vanishing_gradient", 60, branch="share", kind="tensor")
    assert [a.cause for a in causes.fired(share)] == [depth.issue_id]
    over = IssueResolved(**{**dict(depth), "step": 120})
    causes.resolved(over)
    again = depth.model_copy(update={"first_step": 200, "times": 2})
    assert all(a.cause != a.issue for a in causes.fired(again))


def test_an_issue_that_comes_again_has_the_cause_of_its_new_time() -> None:
    causes = Causes()
    spike = made("loss_spike", 13)
    causes.fired(spike)
    causes.resolved(IssueResolved(**{**spike.model_dump(), "step": 30}))
    causes.fired(made("exploding_gradient", 300))
    again = spike.model_copy(update={"first_step": 301, "times": 2})
    assert [a.cause for a in causes.fired(again)] == ["exploding_gradient-300-None"]


def test_a_prompt_mechanism_does_not_explain_what_comes_much_later() -> None:
    assert roots(made("exploding_gradient", 10), made("loss_spike", 110))["loss_spike"] == (
        "exploding_gradient"
    )
    assert roots(made("exploding_gradient", 10), made("loss_spike", 111))["loss_spike"] == (
        "loss_spike"
    )


@pytest.mark.parametrize(("step", "root"), [(10, "nonfinite"), (11, "exploding_gradient")])
def test_another_rank_is_reached_a_step_later(step: int, root: str) -> None:
    found = roots(made("exploding_gradient", 10, rank=1), made("nonfinite", step, rank=0))
    assert found["nonfinite"] == root


def test_issues_of_a_node_are_ordered_by_time() -> None:
    throttle = made("gpu_thermal_throttle", None, kind="device", onset_ms=1_000)
    slower = made("straggler_rank", 40, kind="rank", onset_ms=2_000)
    assert roots(throttle, slower)["straggler_rank"] == "gpu_thermal_throttle"
    before = made("straggler_rank", 40, kind="rank", onset_ms=900)
    assert roots(throttle, before)["straggler_rank"] == "straggler_rank"


def test_a_repeated_issue_gets_the_same_cause_and_changes_nothing() -> None:
    causes = Causes()
    causes.fired(made("exploding_gradient", 12))
    first = causes.fired(made("loss_spike", 13))
    known = list(causes.known)
    assert causes.fired(made("loss_spike", 13)) == first
    assert causes.fired(made("exploding_gradient", 12)) == []
    assert causes.known == known


def test_it_remembers_so_many_and_forgets_what_is_over() -> None:
    causes = Causes()
    for step in range(KNOWN):
        causes.fired(made("overfit", step))
    over = made("overfit", 7)
    causes.resolved(IssueResolved(**{**over.model_dump(), "step": 9}))
    causes.fired(made("overfit", KNOWN))
    assert len(causes.known) == KNOWN
    assert over.issue_id not in {known.id for known in causes.known}


def test_all_that_the_order_names_is_in_the_catalogue() -> None:
    named = {name for link in CAUSAL_ORDER for name in (link.cause, *link.effects, *link.lasting)}
    for name in named | ROOTS | ENDS:
        rule, _, branch = name.partition("/")
        assert branch in {"", *built_in().get(rule).meta.branches}, name


def test_no_rule_is_its_own_cause_and_the_rows_are_there_once() -> None:
    for link in CAUSAL_ORDER:
        assert link.cause.partition("/")[0] not in link.effects
        assert len({*link.effects, *link.lasting}) == len(link.effects) + len(link.lasting)
    assert len({link.cause for link in CAUSAL_ORDER}) == len(CAUSAL_ORDER)


# -- through the engine ---------------------------------------------------------------------


RULES = tuple(spec for spec in rule_specs() if spec.name in ("exploding_gradient", "nonfinite"))


def diverging() -> RunBuilder:
    """The gradient norm jumps at step 60, the loss follows and becomes NaN at step 70."""
    run = RunBuilder()
    run.started()
    run.steps(range(60), loss=2.0, gradient_norm=1.0, columns={"lr.0": 0.1})
    norms = [50.0 * 3**i for i in range(10)]
    losses = [2.0 + 4 * i for i in range(10)]
    run.steps(range(60, 70), loss=losses, gradient_norm=norms, columns={"lr.0": 0.1})
    run.steps(range(70, 75), loss=float("nan"), gradient_norm=float("nan"), columns={"lr.0": 0.1})
    run.ended()
    return run


def last(told: list[Reported]) -> dict[str, IssueFiring]:
    return {one.issue.use: one.issue for one in told}


def test_the_engine_marks_the_consequence_and_says_why() -> None:
    issues = last(replay(diverging().records, RULES))
    cause, effect = issues["exploding_gradient"], issues["nonfinite"]
    assert cause.consequence_of is None
    assert effect.consequence_of == cause.issue_id
    assert cause.reason in effect.evidence.cause
    first = f"Fix exploding_gradient ({cause.short_id}) first: this issue follows from it. "
    remedies = {spec.name: spec.rule.meta.remedy for spec in RULES}
    assert effect.remedy.startswith(first)
    assert cause.remedy == remedies["exploding_gradient"]
    assert gravest([effect, cause]) == cause


def test_marks_survive_a_restart_at_any_record() -> None:
    run = diverging()
    whole = [one.issue.model_dump_json() for one in replay(run.records, RULES)]
    for cut in range(58, len(run.records), 2):
        engine = PartitionEngine(RULES)
        told = replay(run.records[:cut], engine=engine)
        ((partition, state, one),) = engine.runs()
        saved = one.snapshots(next_offset=cut, clock_ms=state.clock_ms, software="test")
        fresh = PartitionEngine(RULES)
        fresh.adopt(partition, run.run_id, {s.rule: s for s in saved}, next_offset=cut)
        told += replay(run.records[cut:], engine=fresh)
        assert [one.issue.model_dump_json() for one in told] == whole


def test_a_rate_raised_long_ago_is_not_the_cause_of_a_nan() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(300), per_frame=50, loss=2.0, columns={"lr.0": 0.001})
    run.steps(range(300, 2_000), per_frame=50, loss=2.0, columns={"lr.0": 0.1})
    run.steps([2_000], loss=float("nan"), columns={"lr.0": 0.1})
    rules = ("learning_rate_anomaly", "nonfinite")
    issues = replay(run.records, [s for s in rule_specs() if s.name in rules])
    assert {one.issue.use for one in issues} == set(rules)
    assert last(issues)["nonfinite"].consequence_of is None
