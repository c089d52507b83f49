"""Two runs side by side: expressions, what differs first, the verdict, the exit code."""

from __future__ import annotations

import io
import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from support.docs.plain_english import found_in
from support.records.numbered_runs import START_MS, MadeRun, issue_of, view_of
from tocsin.console.compare.comparison import Comparison, Undecided, compare
from tocsin.console.compare.differences import Difference
from tocsin.console.compare.document import ComparisonDocument, to_json
from tocsin.console.compare.expression import BadExpression, Condition, parse
from tocsin.console.compare.text import print_comparison
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.program_facts import LayerInputsSeen
from tocsin.schemas.records.runs import DataLoaderSeen, RunStarted

COUNT = 400


def run(
    name: str, *, seed: int = 0, slower: float = 0.0, loss: float = 0.0, **started: object
) -> MadeRun:
    """A run of 400 steps; equal arguments give equal runs but for the noise of its times."""
    made = MadeRun(run_id=name)
    noise = np.exp(0.05 * np.random.default_rng(seed).standard_normal(COUNT))
    made.scalar("step_time_s", 0.1 * (1 + slower) * noise)
    made.scalar("forward_s", 0.03 * noise)
    same = np.random.default_rng(99).standard_normal(COUNT)
    made.scalar("loss", (1 + loss) * (1.5 + 0.1 * same))
    made.tensors("weights", "l2", ["a.weight"], [[3.0, 3.1]], steps=[0, 10])
    made.tensors("gradients", "l2", ["a.weight"], [[1.0, 0.9]], steps=[0, 10])
    fields: dict[str, object] = {"run_id": name, "incarnation": made.incarnation, "job_id": "j"}
    fields |= {"command": "train.py"}
    fields |= {"groups": [{"index": 0, "parameters": 1, "lr": 0.1}]} | started
    return made.say(RunStarted.model_validate(fields), view_of(made, last_step=COUNT - 1))


# Expressions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step_time > +5%", ("step_time", ">", 0.05, True)),
        ("throughput < -3.5 %", ("throughput", "<", -0.035, True)),
        ("eval_loss>+0.01", ("eval_loss", ">", 0.01, False)),
        ("  step_time.p95 > +1e1%  ", ("step_time.p95", ">", 0.1, True)),
        ("log.val/acc < -2", ("log.val/acc", "<", -2, False)),
        ("log.acc@1 < -1%", ("log.acc@1", "<", -0.01, True)),
        ("log.metrics/mAP50(B)<-1%", ("log.metrics/mAP50(B)", "<", -0.01, True)),
        ("log.share of loss<0.5 < -1%", ("log.share of loss<0.5", "<", -0.01, True)),
        ("log.lr>+0 > +1", ("log.lr>+0", ">", 1, False)),
        ("log.oh! > +1e-3", ("log.oh!", ">", 1e-3, False)),
        ("log.val accuracy at k=5 < -1 %", ("log.val accuracy at k=5", "<", -0.01, True)),
    ],
)
def test_an_expression_is_read(text: str, expected: tuple[str, str, float, bool]) -> None:
    found = parse(text)
    assert (found.measure, found.sign, found.relative) == (expected[0], expected[1], expected[3])
    assert found.change == pytest.approx(expected[2])


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 0),
        ("> +5%", 0),
        ("step_time", 9),
        ("step_time +5%", 10),
        ("step_time >> +5%", 10),
        ("step_time >= +5%", 10),
        ("step_time > 5%", 12),
        ("step_time > ", 12),
        ("step_time > +five%", 12),
        ("step_time > +5% or so", 16),
        ("step_time > +nan", 12),
        ("step_time > +1e99", 12),
    ],
)
def test_a_bad_expression_is_pointed_at(text: str, column: int) -> None:
    with pytest.raises(BadExpression) as error:
        parse(text)
    assert error.value.column == column
    lines = str(error.value).splitlines()
    assert lines[2].index("^") == column + 2
    assert "for example" in lines[3]


@given(st.text(max_size=40))
def test_no_text_breaks_the_reading(text: str) -> None:
    column = 0
    try:
        assert isinstance(parse(text), Condition)
    except BadExpression as error:
        column = error.column
    assert column <= len(text)


def test_an_unknown_measure_is_told_with_a_near_one() -> None:
    with pytest.raises(BadExpression, match=r"did you mean step_time\?"):
        compare(run("a"), run("b"), [parse("step_tme > +5%")])


# Conditions


def why_undecided(found: Comparison) -> str:
    """Why the only condition cannot be decided."""
    (only,) = found.conditions
    assert not only.holds
    assert f"It cannot be decided: '{only.condition.text}'." in found.verdict
    return only.undecided


def test_noise_does_not_fail_a_condition() -> None:
    found = compare(run("a", seed=1), run("b", seed=2), [parse("step_time > +1%")])
    assert not found.failed
    assert "does not differ by more than noise" in found.verdict


def test_a_planted_tenth_fails_it() -> None:
    conditions = [parse("step_time > +5%"), parse("throughput < -5%"), parse("forward > +5%")]
    found = compare(run("a", seed=1), run("b", seed=2, slower=0.1), conditions)
    assert [one.holds for one in found.conditions] == [True, True, False]
    assert "The time of a step changed: +10 %" in found.verdict
    assert "It fails: 'step_time > +5%', 'throughput < -5%'." in found.verdict


def test_a_change_below_the_condition_does_not_fail_it() -> None:
    found = compare(run("a", seed=1), run("b", seed=2, slower=0.1), [parse("step_time > +12%")])
    assert not found.failed


def test_a_difference_in_seconds_is_compared_in_seconds() -> None:
    found = compare(
        run("a", seed=1),
        run("b", seed=2, slower=0.5),
        [parse("step_time > +0.04"), parse("step_time > +0.06")],
    )
    assert [one.holds for one in found.conditions] == [True, False]


def test_a_gate_does_not_pass_for_want_of_numbers() -> None:
    short = MadeRun(run_id="short").scalar("step_time_s", np.full(20, 0.1))
    found = compare(run("a"), short, [parse("step_time > +5%")])
    assert why_undecided(found).startswith("too few steps")
    with pytest.raises(Undecided, match=r"'step_time > \+5%' cannot be decided: too few steps"):
        found.check_decided()
    assert issubclass(Undecided, ConfigurationError)


def test_what_cannot_be_decided_hides_neither_a_failure_nor_the_comparison() -> None:
    first, second = run("a", seed=1), run("b", seed=2, slower=0.1)
    for made in (first, second):
        made.scalar("log.rare", [1.0, 1.1], steps=[50, 60])
    conditions = [parse("log.rare > +5%"), parse("step_time > +5%")]
    found = compare(first, second, conditions)
    assert found.failed
    assert "It fails: 'step_time > +5%'. It cannot be decided: 'log.rare > +5%'." in found.verdict
    assert found.verdict == compare(first, second, conditions[::-1]).verdict
    out = io.StringIO()
    print_comparison(found, Console(file=out, width=120))
    assert "undecided  log.rare > +5%: too few steps" in out.getvalue()
    assert "FAILS  step_time > +5%: +10" in out.getvalue()
    told = json.loads(to_json(found))["conditions"]
    assert [one["holds"] for one in told] == [False, True]
    assert told[0]["undecided"].startswith("too few steps")
    assert told[1]["undecided"] == ""


def test_a_share_of_what_is_zero_is_undecided() -> None:
    second = run("b")
    second.say(issue_of(second))
    found = compare(run("a"), second, [parse("issues > +5%"), parse("issues > +0")])
    assert [one.holds for one in found.conditions] == [False, True]
    assert "give a difference, like +0.01" in found.conditions[0].undecided
    assert "no condition" not in found.verdict.lower()


def test_single_numbers_are_compared_as_they_are() -> None:
    first, second = run("a"), run("b")
    for made, loss in ((first, 1.0), (second, 1.2)):
        made.scalar("loss", [loss, loss], steps=[99, 99], mode="eval")
    found = compare(first, second, [parse("eval_loss > +10%"), parse("steps < -1%")])
    assert [one.holds for one in found.conditions] == [True, False]
    (measured,) = (one for one in found.measures if one.name == "eval_loss")
    assert not measured.tested


@pytest.mark.parametrize("losses", [[np.nan, 1.0], [np.inf, np.inf]])
def test_a_gate_does_not_pass_an_evaluation_of_nan(losses: list[float]) -> None:
    first, second = run("a"), run("b")
    first.scalar("loss", [1.0, 1.0], steps=[99, 99], mode="eval")
    second.scalar("loss", losses, steps=[99, 99], mode="eval")
    found = compare(first, second, [parse("eval_loss > +10%")])
    assert why_undecided(found) == "it is not finite in the second run"
    (measured,) = (one for one in compare(first, second).measures if one.name == "eval_loss")
    assert measured.change is None


def test_a_gate_does_not_pass_a_loss_that_is_nan_now_and_then() -> None:
    first, second = run("a"), run("b")
    values = second.series("loss").values.copy()
    values[-10::3] = np.nan
    second.scalar("loss", values)
    found = compare(first, second, [parse("loss > +50%")])
    assert "4 values that are not finite in the second run" in why_undecided(found)


def test_a_gate_does_not_pass_what_is_logged_and_has_become_nan() -> None:
    values = 1 + 0.1 * np.random.default_rng(7).standard_normal(COUNT)
    first, second = run("a").scalar("log.train", values), run("b")
    second.scalar("log.train", np.where(np.arange(COUNT) < COUNT - 20, values, np.nan))
    found = compare(first, second, [parse("log.train > +5%")])
    assert "20 values that are not finite in the second run" in why_undecided(found)


def test_a_scalar_may_be_called_like_a_mean() -> None:
    values = 1 + 0.1 * np.random.default_rng(7).standard_normal(COUNT)
    first, second = (run(name).scalar("log.lat.p95", values) for name in "ab")
    assert not compare(first, second, [parse("log.lat.p95 > +5%")]).failed


def test_norms_are_compared_over_the_steps_that_both_runs_have() -> None:
    """The second run was captured more often while its norm was high."""
    norms = np.where(np.arange(COUNT) < 100, 1.2, 1.0)
    norms *= np.exp(0.3 * np.random.default_rng(5).standard_normal(COUNT))
    often = sorted({*range(100), *range(0, COUNT, 4)})
    second = run("b").scalar("gradient_norm", norms[often], steps=often)
    found = compare(run("a").scalar("gradient_norm", norms), second)
    (measured,) = (one for one in found.measures if one.name == "gradient_norm")
    assert measured.change is not None
    assert measured.change.change == 0
    assert measured.change.values == (len(often) - 10,) * 2


def test_a_run_that_was_resumed_is_compared_over_the_steps_that_both_have_made() -> None:
    curve = 3 * np.exp(-np.arange(2_000) / 900) + 0.02 * np.random.default_rng(3).standard_normal(
        2_000
    )
    times = np.where(np.arange(2_000) < 1_000, 0.1, 0.2)
    times *= np.exp(0.05 * np.random.default_rng(4).standard_normal(2_000))
    whole = MadeRun(run_id="whole").scalar("loss", curve).scalar("step_time_s", times)
    tail = MadeRun(run_id="tail")
    tail.scalar("loss", curve[1_000:], steps=range(1_000, 2_000))
    tail.scalar("step_time_s", times[1_000:], steps=range(1_000, 2_000))
    changes = {one.name: one.change.change for one in compare(whole, tail).measures if one.change}
    assert changes["loss"] == 0
    assert changes["step_time"] == pytest.approx(0, abs=0.01)


def test_issues_of_all_incarnations_count() -> None:
    second = run("b")
    earlier = issue_of(second).model_copy(update={"incarnation": "before-the-restart"})
    second.say(earlier)
    found = compare(run("a"), second, [parse("issues > +0")])
    assert found.failed
    assert "Only the second run has an issue of rule nonfinite" in found.verdict


# What differs first


def kinds(first: MadeRun, second: MadeRun) -> list[str]:
    return [one.kind for one in compare(first, second).differences]


def test_equal_runs_do_not_differ() -> None:
    found = compare(run("a"), run("b"))
    assert list(found.differences) == []
    assert found.verdict.startswith("No difference was found")


def test_configuration_comes_before_the_loss_that_follows_from_it() -> None:
    second = run("b", loss=0.1, groups=[{"index": 0, "parameters": 1, "lr": 0.2}])
    found = compare(run("a"), second)
    assert [one.kind for one in found.differences] == ["configuration", "loss"]
    assert found.differences[0] == Difference(
        "configuration", "learning rate of group 0", "0.1", "0.2"
    )
    assert found.verdict.startswith(
        "The runs differ first in their configuration: learning rate of group 0: 0.1, then 0.2. "
        "The loss differs from step 0 on"
    )


def test_data_is_compared_by_what_the_first_layer_was_given() -> None:
    first, second = run("a"), run("b")
    for made, mean in ((first, 0.5), (second, 0.7)):
        common = {"run_id": made.run_id, "incarnation": made.incarnation}
        seen = {"layer": "conv", "kind": "Conv2d", "step": 1, "values": 9, "minimum": 0,
                "maximum": 1, "mean": mean, "std": 0.2}  # fmt: skip
        made.say(
            DataLoaderSeen.model_validate({**common, "mode": "train", "workers": 2}),
            LayerInputsSeen.model_validate({**common, **seen}),
        )
    (found,) = compare(first, second).differences
    assert found == Difference("data", "mean of the input of conv", "0.5", "0.7", 1)


def test_ranks_that_come_in_another_order_are_no_difference() -> None:
    first, second = run("a"), run("b")
    for made, ranks in ((first, (0, 1)), (second, (1, 0))):
        for rank in ranks:
            fields = {"layer": "conv", "kind": "Conv2d", "step": 1, "values": 9, "minimum": 0,
                      "maximum": 1, "mean": 0.5 - rank, "std": 0.2, "rank": rank,
                      "run_id": made.run_id, "incarnation": made.incarnation}  # fmt: skip
            made.say(LayerInputsSeen.model_validate(fields))
    assert kinds(first, second) == []


def test_another_initialisation_is_told_apart_from_another_gradient() -> None:
    first, second = run("a"), run("b")
    second.tensors("weights", "l2", ["a.weight"], [[3.5, 3.6]], steps=[0, 10])
    assert kinds(first, second) == ["initialisation"]
    third = run("c").tensors("gradients", "l2", ["a.weight"], [[1.0, 0.5]], steps=[0, 10])
    (found,) = compare(first, third).differences
    assert (found.kind, found.step) == ("gradients", 10)


def test_a_loss_of_nan_differs_from_a_number_and_not_from_nan() -> None:
    values = np.ones(COUNT)
    values[300] = np.nan
    first, second = run("a").scalar("loss", np.ones(COUNT)), run("b").scalar("loss", values)
    (found,) = compare(first, second).differences
    assert (found.kind, found.step, found.second) == ("loss", 300, "NaN")
    assert kinds(run("c").scalar("loss", values), second) == []


def test_issues_and_ends_are_told_last() -> None:
    second = run("b")
    second.say(view_of(second, outcome="failed", last_step=COUNT - 1), issue_of(second))
    found = compare(run("a"), second)
    assert "The first run completed, the second failed." in found.verdict
    assert "Only the second run has an issue of rule nonfinite (critical from step 40)." in (
        found.verdict
    )


# Forms


def test_json_is_what_its_schema_says() -> None:
    found = compare(run("a"), run("b", slower=0.2), [parse("step_time > +5%")])
    document = json.loads(to_json(found))
    schema = ComparisonDocument.model_json_schema(mode="serialization")
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["version"] == 1
    assert document["failed"] is True
    measure = document["conditions"][0]["measure"]
    assert measure["test"] == "Welch's t-test on batch means"
    assert measure["low"] > 0.05
    assert measure["values"] == [389, 389]


def test_the_terminal_shows_names_as_text() -> None:
    second = run("b", command="\x1b[31m[bold]evil[/]")
    out = io.StringIO()
    print_comparison(compare(run("a"), second), Console(file=out, width=120))
    assert "\x1b" not in out.getvalue()
    assert "[bold]evil[/]" in out.getvalue()


def test_the_verdict_is_plain_english() -> None:
    first, second = run("a"), run("b", slower=0.3, loss=0.2, command="other.py")
    second.say(view_of(second, outcome="stopped"), issue_of(second))
    assert list(found_in(compare(first, second).verdict)) == []
    assert START_MS
