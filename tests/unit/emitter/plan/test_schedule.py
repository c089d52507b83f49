"""When a collection is summarised: plans, intervals of the budget, and looking closer."""

from __future__ import annotations

import itertools
import json

import pytest

from tocsin.emitter.plan.schedule import (
    BLOCKS,
    CLOSER_APART,
    CLOSER_STEPS,
    EXACT_AFTER_ALARM,
    NORMS,
    REVIEW_STEPS,
    CaptureSchedule,
)
from tocsin.emitter.plan.settings import CaptureSettings, capture_settings


def schedule(**collections: object) -> CaptureSchedule:
    return CaptureSchedule(capture_settings(json.dumps({"collections": collections})))


def steps(made: CaptureSchedule, kind: str, stop: int, start: int = 0) -> list[int]:
    """The steps at which something of that kind is due."""
    return [step for step in range(start, stop) if kind in made.due(step)]


def test_the_defaults() -> None:
    made = schedule()
    assert steps(made, "gradients", 35) == [0, 10, 20, 30]
    assert steps(schedule(), "activations", 250) == [0, 100, 200]
    assert steps(schedule(), "inputs", 250) == []
    assert made.is_due(BLOCKS, 7)
    assert made.is_due(NORMS, 7)


def test_fixed_intervals_windows_and_explicit_steps() -> None:
    made = schedule(
        gradients={"every": 3, "start": 6, "end": 13},
        weights={"steps": [2, 17]},
        activations="off",
        attention={"of": "gradients", "match": "attn", "every": 4},
    )
    due = {
        step: [p.name for p in made.due(step).get("gradients", ())]
        for step in range(20)
        if "gradients" in made.due(step)
    }
    assert due == {
        0: ["attention"], 4: ["attention"], 6: ["gradients"], 8: ["attention"],
        9: ["gradients"], 12: ["gradients", "attention"], 16: ["attention"],
    }  # fmt: skip
    assert steps(schedule(weights={"steps": [2, 17]}), "weights", 40) == [2, 17]
    assert steps(schedule(activations="off"), "activations", 200) == []
    assert made.intervals()["attention"] == 4


def test_a_step_that_is_asked_for_again_is_answered_alike() -> None:
    made = schedule()
    assert made.due(10) is made.due(10)
    assert "gradients" in made.due(10)
    assert not made.due(11)
    assert not made.due(11)
    assert "gradients" in made.due(20)


def test_the_interval_follows_what_a_pass_costs() -> None:
    made = schedule()
    for step in range(40 * REVIEW_STEPS):
        if "gradients" in made.due(step):
            made.spent("gradients", 0.01)
        made.stepped(0.1, spent_s=step * 1e-5)
    assert made.interval("gradients") == 20  # 10 ms a pass, 500 µs a step for it
    assert steps(made, "gradients", 1360, start=1280) == [1280, 1300, 1320, 1340]


def test_looking_closer_lasts_fifty_steps() -> None:
    made = schedule(gradients={"every": 100})
    assert steps(made, "gradients", 21) == [0]
    made.alarmed(20)
    assert steps(made, "gradients", 90, start=21) == list(range(21, 21 + CLOSER_STEPS))
    assert "gradients" in made.due(100)
    made.alarmed(101)  # not so soon again
    assert steps(made, "gradients", 200, start=101) == []
    made.alarmed(20 + CLOSER_APART)
    assert "gradients" in made.due(21 + CLOSER_APART)


def test_a_rule_may_ask_to_look_closer_in_the_middle() -> None:
    made = schedule()
    assert steps(made, "gradients", 14) == [0, 10]
    made.capture_closely(14, 5)
    assert steps(made, "gradients", 31, start=14) == [14, 15, 16, 17, 18, 20, 30]
    made.capture_closely(31, 20)
    assert steps(made, "activations", 60, start=31) == [35, 40, 45, 50]


def test_explicit_steps_are_all_there_is_in_a_closer_look_too() -> None:
    made = schedule(optimizer_state={"steps": [7, 22]}, gradients={"steps": [30]}, weights="off")
    made.capture_closely(20, 20)
    assert steps(made, "optimizer_state", 60) == [7, 22]
    assert steps(made, "gradients", 60) == [30]


def test_the_interval_in_force_is_that_of_the_step() -> None:
    made = schedule(weights={"every": 3})
    made.capture_closely(20, 10)
    made.capture_closely(25, 10)
    for step, intervals in (
        (19, (10, 3, 100)),
        (20, (1, 1, 5)),
        (34, (1, 1, 5)),
        (35, (10, 3, 100)),
    ):
        found = tuple(made.interval(name, step) for name in ("gradients", "weights", "activations"))
        assert found == intervals
    assert made.interval("gradients") == 10


def test_after_an_alarm_no_step_is_quiet_while_norms_are_exact() -> None:
    made = schedule(gradients="off", weights="off", activations="off", optimizer_state="off")
    for name in (BLOCKS, NORMS):
        made.budget.shares[name].interval = 1000
    made.alarmed(20)
    made.alarmed(200)  # no closer look so soon again, exact norms all the same
    assert made.quiet_until(201) == 201
    assert made.quiet_until(200 + EXACT_AFTER_ALARM) > 200 + EXACT_AFTER_ALARM


def test_what_was_spent_before_the_first_step_is_not_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, base = schedule(), []
    monkeypatch.setattr(made.budget, "review", lambda step_s, base_s: base.append(base_s))
    made.spent("gradients", 5.0)
    for step in range(2 * REVIEW_STEPS + 1):
        made.stepped(0.1, spent_s=33.0 + step * 1e-5)
    assert base == pytest.approx([1e-5, 1e-5])


def test_a_step_that_others_hold_up_may_not_cost_more() -> None:
    made = CaptureSchedule(CaptureSettings(), held_up=lambda: 0.75)
    for _ in range(REVIEW_STEPS + 1):
        made.stepped(0.04, spent_s=0.0)
    assert made.budget.allowed_s == pytest.approx(0.005 * 0.01)


def test_intervals_that_stay_are_chosen_less_often_where_steps_are_short() -> None:
    def reviewed(step_s: float) -> list[int]:
        made, found = schedule(), []
        for step in range(1000):
            if step % 100 == 0:
                made.spent("gradients", 0.1)  # more than is free
            made.stepped(step_s, spent_s=0.0)
            if not made.times and step:
                found.append(step)
        return found

    short, long = (reviewed(step_s) for step_s in (0.001, 0.1))
    assert [b - a for a, b in itertools.pairwise(long)] == [REVIEW_STEPS] * (len(long) - 1)
    apart = [b - a for a, b in itertools.pairwise(short)]
    assert apart[0] == REVIEW_STEPS
    assert max(apart) == 250
