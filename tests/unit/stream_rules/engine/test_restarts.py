"""Checkpoints to go back to, and a run that fails the same way after each restart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from support.rules.restarts import told_with_restarts
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.testing import START_MS, RunBuilder, issues_of, only

NAN = math.nan


def nan_at(run: RunBuilder, step: int, *, saved: Sequence[int] = (), prefix: str = "") -> None:
    """An incarnation whose gradients are NaN at `step`, with checkpoints."""
    run.started(role="launcher")
    run.started()
    for now in range(step):
        run.steps([now], loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
        if now in saved:
            run.checkpoint(now, path=f"{prefix}{now}.pt")
    run.steps([step], loss=NAN, gradient_norm=NAN, gradient_nonfinite=1)
    run.tensors(step, "gradients", ["a"], nans={"a": 1})


def restarted(run: RunBuilder, number: int) -> None:
    """The job ended, and its scheduler started it again."""
    run.ended(outcome="stopped")
    run.ended(role="launcher", outcome="stopped")
    run.wait(60.0)
    run.incarnation, run.boot = f"made-{number}", f"boot-{number}"


def found(run: RunBuilder, rule: str = "restart_loop", *others: str) -> list[IssueFiring]:
    """What a rule reports, beside others."""
    rules = (rule, *(others or ("nonfinite",)))
    return issues_of(run.records, rule, specs=[spec for name in rules for spec in only(name)])


def test_the_checkpoint_to_go_back_to_was_followed_by_healthy_steps() -> None:
    run = RunBuilder()
    nan_at(run, 130, saved=(40, 79, 80, 129))

    (issue,) = found(run, "nonfinite", "restart_loop")[:1]

    good = issue.last_good_checkpoint
    assert good is not None
    assert (good.step, good.verified) == (79, True)


def test_without_a_verified_checkpoint_the_newest_is_named() -> None:
    run = RunBuilder()
    nan_at(run, 30, saved=(10, 20))

    good = found(run, "nonfinite", "restart_loop")[0].last_good_checkpoint

    assert good is not None
    assert (good.step, good.verified) == (20, False)


def test_the_same_fault_after_a_restart_is_a_loop() -> None:
    run = RunBuilder()
    nan_at(run, 130, saved=(40, 70, 129), prefix="first/")
    restarted(run, 2)
    nan_at(run, 30)
    restarted(run, 3)
    nan_at(run, 31)

    (issue,) = found(run)

    assert issue.incarnation == "made-3"
    assert (issue.severity, issue.stop_worthy, issue.first_step) == ("critical", True, 31)
    assert issue.reason == (
        "nonfinite, 31 steps after the start, as in the incarnation before: go back to first/70.pt "
        "(step 70 of its incarnation)"
    )
    good = issue.last_good_checkpoint
    assert good is not None
    # Not the newest, with which the restarts have started.
    assert good.path == "first/70.pt"


def test_each_further_restart_counts() -> None:
    run = RunBuilder()
    nan_at(run, 20)
    for number in (2, 3, 4):
        restarted(run, number)
        nan_at(run, 20)

    issues = found(run)

    assert [issue.incarnation for issue in issues] == ["made-2", "made-3", "made-4"]
    assert len({issue.issue_id for issue in issues}) == 3
    assert "the 3 incarnations before: no older checkpoint is known" in issues[-1].reason
    thrice = issues_of(
        run.records, "restart_loop", specs=[*only("nonfinite"), *only("restart_loop", times=3)]
    )
    assert [issue.incarnation for issue in thrice] == ["made-3", "made-4"]


@pytest.mark.parametrize("step", [33, 60, 3])
def test_a_fault_at_another_step_is_no_loop(step: int) -> None:
    run = RunBuilder()
    nan_at(run, 30)
    restarted(run, 2)
    nan_at(run, step)

    assert found(run, "nonfinite", "restart_loop")
    assert found(run) == []


def test_an_incarnation_that_completes_ends_the_story() -> None:
    run = RunBuilder()
    nan_at(run, 30)
    restarted(run, 2)
    run.started(role="launcher")
    run.started()
    run.steps(range(100), loss=1.0)
    run.ended()
    run.ended(role="launcher")
    run.incarnation, run.boot = "made-3", "boot-3"
    nan_at(run, 30)

    assert found(run) == []


def test_a_job_that_fails_at_the_same_step_is_a_loop() -> None:
    run = RunBuilder()
    for number in (2, 3):
        run.incarnation, run.boot = f"made-{number}", f"boot-{number}"
        run.started(role="launcher")
        run.started()
        run.steps(range(50), loss=1.0)
        run.ended(outcome="failed")
        run.ended(role="launcher", outcome="failed")

    (issue,) = found(run)

    assert issue.incarnation == "made-3"
    assert issue.reason.startswith("the job failed with exit code 0, 49 steps after the start")


def test_a_worker_that_is_restarted_remembers() -> None:
    run = RunBuilder()
    nan_at(run, 130, saved=(40, 70, 129))
    restarted(run, 2)
    nan_at(run, 30)
    restarted(run, 3)
    nan_at(run, 30)
    specs = [*only("nonfinite"), *only("restart_loop")]

    uninterrupted = [issue.model_dump_json() for issue in issues_of(run.records, specs=specs)]

    assert told_with_restarts(run.records, specs, every=7) == uninterrupted
    assert any("restart_loop" in issue for issue in uninterrupted)


@pytest.mark.parametrize("again", [False, True])
def test_a_configuration_may_name_the_rule(again: bool) -> None:
    """Its input is the end of a run: no run ends without it."""
    run = RunBuilder()
    nan_at(run, 30)
    if again:
        restarted(run, 2)
        nan_at(run, 30)
    run.ended(outcome="stopped")
    run.ended(role="launcher", outcome="stopped")

    names = ("nonfinite", "restart_loop", "rule_has_no_input")
    specs = rule_specs([RuleEntry(name=name, use=name) for name in names], defaults="none")

    assert issues_of(run.records, "rule_has_no_input", specs=specs) == []


def test_a_fault_that_a_timer_finds_is_compared_before_a_checkpoint() -> None:
    """Else a checkpoint that is torn keeps the fault alone, and nobody compares it any more."""
    run = RunBuilder()
    for incarnation in ("first", "second"):
        run.incarnation, run.boot = incarnation, f"boot of {incarnation}"
        run.started()
        run.steps(range(15), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
        run.tensors(15, "gradients", ["a", "b"], nans={"a": 2})
        run.wait(60)
    engine = PartitionEngine(rule_specs())
    found = [one.issue for record in run.records for one in engine.apply(record)]
    assert [one.rule for one in found if one.rule == "restart_loop"] == []
    number = run.records[0].partition.number
    later = engine.tick(number, run.now_ms, since_ms=START_MS)
    assert {"nonfinite", "restart_loop"} <= {one.issue.rule for one in later}
