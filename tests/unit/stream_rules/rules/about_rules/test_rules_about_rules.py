"""`rule_has_no_input` and `rule_failed`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.catalogue import RuleCatalogue, built_in
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.run_view import run_view
from tocsin.stream_rules.outcomes import Finding, Moment, Outcome
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar
from tocsin.stream_rules.testing import RunBuilder, issues_of


class RaisingParams(Params):
    """Parameters of the rule below."""

    at_step: int = 5


@dataclass(slots=True)
class RaisingState:
    """It remembers nothing."""


class Raising(Rule[RaisingParams, RaisingState]):
    """A rule with a defect."""

    meta = RuleMeta(
        name="raising",
        version=1,
        family="progress",
        meaning="Raises.",
        severity="critical",
        stop_worthy=True,
        inputs=(scalar("loss"),),
        remedy="None.",
        params=RaisingParams,
    )
    state_type = RaisingState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        if frame.steps[-1] >= self.params.at_step:
            yield Finding(subject=Subject(kind="run", name="x"), reason="half said")
            raise ZeroDivisionError("division by a planted zero")


class Spinning(Raising):
    """A rule whose timer does not move on."""

    def next_due_ms(self) -> int | None:
        return 5


def with_rule(rule: type[Rule[RaisingParams, RaisingState]]) -> RuleCatalogue:
    catalogue = built_in()
    catalogue.add(rule)
    return catalogue


@pytest.mark.parametrize(("rule", "what"), [(Raising, "planted zero"), (Spinning, "timer")])
def test_a_rule_that_raises_is_quarantined_and_the_others_go_on(
    rule: type[Rule[RaisingParams, RaisingState]], what: str
) -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(10), loss=1.0)
    run.steps([10], loss=float("nan"))
    engine = PartitionEngine(rule_specs(catalogue=with_rule(rule)))
    issues = [one.issue for record in run.records for one in engine.apply(record)]
    assert [issue.rule for issue in issues] == ["rule_failed", "nonfinite"]
    assert issues[0].subject.name == "raising"
    assert what in issues[0].reason
    assert (issues[0].severity, issues[0].stop_worthy) == ("warning", False)
    state = engine.run("made")
    assert state is not None
    rules = run_view(state, next_offset=0).rules
    assert rules["raising"] == "error"
    assert rules["nonfinite"] == "issues_found"
    assert rules["loss_diverged"] == "in_progress"


class Timeless(Raising):
    """A rule whose timer cannot be asked for."""

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        return ()

    def next_due_ms(self) -> int | None:
        raise ZeroDivisionError("no time")


class Unsaved(Timeless):
    """A rule whose state cannot be saved."""

    def next_due_ms(self) -> int | None:
        return None

    def snapshot(self) -> bytes:
        raise ZeroDivisionError("no snapshot")


@pytest.mark.parametrize(("rule", "what"), [(Timeless, "no time"), (Unsaved, "no snapshot")])
def test_a_failure_between_records_is_told_too_once_and_after_a_restart(
    rule: type[Rule[RaisingParams, RaisingState]], what: str
) -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(3), loss=1.0)
    specs = rule_specs(catalogue=with_rule(rule))
    number = run.records[0].partition.number
    engine = PartitionEngine(specs)
    told = [one for record in run.records for one in engine.apply(record)]
    ((_, state, known),) = engine.runs()
    saved = known.snapshots(next_offset=state.next_offset, clock_ms=state.clock_ms, software="test")
    engine.reschedule(number, "made")
    told += engine.tick(number, run.now_ms, since_ms=run.now_ms)
    told += engine.tick(number, run.now_ms + 1, since_ms=run.now_ms)
    assert [one.issue.rule for one in told] == ["rule_failed"]
    assert what in told[0].issue.reason

    again = PartitionEngine(specs)
    again.adopt(number, "made", {one.rule: one for one in saved}, next_offset=state.next_offset)
    found = again.tick(number, run.now_ms, since_ms=run.now_ms)
    # Told before it was saved, or else still to be told, with the same id.
    assert [one.issue.issue_id for one in found] in ([], [told[0].issue.issue_id])
    assert bool(found) == (rule is Unsaved)


def test_switched_off_it_is_quarantined_in_silence() -> None:
    run = RunBuilder()
    run.steps(range(10), loss=1.0)
    entry = RuleEntry(name="rule_failed", use="rule_failed", off=True)
    specs = rule_specs([entry], catalogue=with_rule(Raising))
    assert issues_of(run.records, specs=specs) == []


def test_a_rule_without_input_is_named_once() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(200), gradient_norm=1.0)
    entry = RuleEntry(name="loss_diverged", use="loss_diverged")
    issues = issues_of(run.records, specs=rule_specs([entry]))
    assert [(i.rule, i.state, i.severity) for i in issues] == [
        ("rule_has_no_input", "firing", "warning")
    ]
    assert issues[0].subject.name == "loss_diverged"
    assert "train/gradient_norm" in issues[0].evidence.explanation
    assert "backward()" in issues[0].remedy


def test_an_event_that_never_came_is_missed_too() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(200), loss=1.0, gradient_norm=1.0)
    entries = [
        RuleEntry(name=name, use=name)
        for name in ("loss_input_mismatch", "max_initialization_time", "rule_has_no_input")
    ]
    specs = rule_specs(entries, defaults="none")
    (issue,) = issues_of(run.records, "rule_has_no_input", specs=specs)
    assert (issue.severity, issue.subject.name) == ("warning", "loss_input_mismatch")
    assert "tocsin.run.loss_inputs" in str(issue.evidence.facts[0].value)
    assert "tocsin.run.started" in issue.evidence.explanation


def test_among_all_rules_at_their_defaults_few_are_missed() -> None:
    run = RunBuilder()
    run.started()
    columns = {"lr.0": 1e-3}
    run.steps(range(200), loss=1.0, gradient_norm=1.0, step_time_s=0.1, columns=columns)
    run.ended()
    assert issues_of(run.records, "rule_has_no_input") == []


def test_a_rule_for_other_runs_is_not_missed() -> None:
    run = RunBuilder(labels={"env": "dev"})
    run.started()
    run.steps(range(200), gradient_norm=1.0)
    for wanted, missed in (("prod", []), ("dev", ["diverged-here"])):
        entry = RuleEntry(name="diverged-here", use="loss_diverged", match={"env": (wanted,)})
        watching = RuleEntry(name="any", use="rule_has_no_input")
        specs = rule_specs([entry, watching], defaults="none")
        issues = issues_of(run.records, "any", specs=specs)
        assert [i.subject.name for i in issues] == missed


def test_for_rules_at_their_defaults_it_is_an_info() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(200), gradient_norm=1.0)
    issues = issues_of(run.records)
    assert [(i.rule, i.severity) for i in issues] == [("rule_has_no_input", "info")]


def test_a_short_run_is_not_reproached() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(30), gradient_norm=1.0)
    assert issues_of(run.records) == []


def test_what_is_logged_at_steps_of_another_count_ends_no_grace() -> None:
    run = RunBuilder()
    run.started()
    for step in range(60):
        run.steps([step], loss=1.0, columns={"lr.0": 1e-3})
        run.steps([20_000 + step], columns={"log.accuracy": 0.5})
    assert issues_of(run.records, "rule_has_no_input") == []


def test_many_logged_scalars_hide_no_input_and_do_not_end_the_rule() -> None:
    specs = rule_specs(
        [RuleEntry(name=name, use=name) for name in ("overfit", "rule_has_no_input")],
        defaults="none",
    )
    run = RunBuilder()
    run.started()
    run.steps(range(50), loss=1.0, columns={"lr.0": 1e-3})
    run.steps([49], columns={f"log.metric_with_a_long_name_{i:0>40}": 0.5 for i in range(250)})
    run.steps([49], mode="eval", loss=1.1)
    run.steps(range(50, 150), loss=1.0, columns={"lr.0": 1e-3})
    run.ended()
    assert issues_of(run.records, specs=specs) == []
    said = issues_of(run.records)
    assert [i.rule for i in said if i.rule.startswith("rule_")] == ["rule_has_no_input"]
