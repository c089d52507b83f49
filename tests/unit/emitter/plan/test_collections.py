"""Which tensors a plan selects, at which steps, and how the environment says it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.emitter.plan.collections import DEFAULT_PLANS, NEVER, CollectionPlan, Schedule
from tocsin.emitter.plan.settings import CaptureSettings, capture_settings
from tocsin.schemas.records.collections import KINDS, MODES

_STEP = st.integers(0, 300)


@given(
    every=st.none() | st.integers(1, 50),
    start=_STEP,
    end=st.none() | _STEP,
    steps=st.frozensets(_STEP, max_size=4),
    interval=st.integers(1, 50),
    at=_STEP,
)
def test_the_steps_of_a_schedule_are_those_it_names_and_each_nth_in_its_range(
    every: int | None, start: int, end: int | None, steps: frozenset[int], interval: int, at: int
) -> None:
    schedule = Schedule(every, start, end, steps)
    n = every if every is not None else None if steps else interval
    each = set(range(start, 400 if end is None else end, n)) if n is not None else set()
    assert {step for step in range(400) if schedule.due(step, interval)} == each | steps
    assert schedule.automatic == (every is None and not steps)
    later = min((step for step in {*each, *steps} if step > at), default=sys.maxsize)
    assert schedule.following(at, interval) == later


def test_a_tensor_belongs_to_a_plan_by_pattern_type_or_name() -> None:
    plan = CollectionPlan(
        "attention",
        "weights",
        NEVER,
        match=(re.compile(r"^blocks\.\d+\.attention"),),
        module_types=("Embedding",),
        tensors=frozenset({"head.weight"}),
    )
    assert plan.selects("blocks.10.attention.weight", "Linear")
    assert plan.selects("tokens.weight", "Embedding")
    assert plan.selects("head.weight")
    assert not plan.selects("my.blocks.1.attention.weight", "Linear")
    assert not plan.everything
    assert DEFAULT_PLANS["weights"].selects("anything")
    assert len({plan, *DEFAULT_PLANS.values()}) == len(KINDS) + 1


def test_what_holds_without_a_word() -> None:
    settings = capture_settings("")
    assert settings == CaptureSettings() == capture_settings("{}")
    assert settings.budget == 0.005
    assert tuple(settings.plans) == KINDS
    assert settings.collections == (
        "losses",
        "gradients",
        "weights",
        "activations",
        "optimizer_state",
    )
    for name, plan in settings.plans.items():
        on = {mode for mode in MODES if plan.schedule(mode) is not None}
        named = {"losses": {"train", "eval", "predict"}, "inputs": set(), "biases": set()}
        assert on == named.get(name, {"train"})
        assert all(when is None or when.automatic for when in plan.schedules.values())
    assert [settings.plans[name].floor for name in KINDS] == [1, 10, 10, 10, 100, 100, 100]


def test_a_section_is_read_in_the_form_of_the_file() -> None:
    settings = capture_settings(
        json.dumps(
            {
                "budget": "1%",
                "a later key": 1,
                "collections": {
                    "gradients": {"every": 3, "start": 10, "end": 20, "columns": ["l2"]},
                    "weights": "off",
                    "inputs": {},
                    "activations": {"modes": {"eval": {"every": 5}, "train": "off"}},
                    "heads": {"of": "weights", "match": "head", "tensors": ["out"]},
                },
            }
        )
    )
    assert settings.budget == 0.01
    assert settings.plans["gradients"].schedule() == Schedule(3, 10, 20)
    assert settings.plans["gradients"].columns == ("l2",)
    assert settings.plans["weights"].schedules == NEVER
    assert settings.plans["inputs"].schedule() == Schedule()
    assert settings.plans["activations"].schedules == {**NEVER, "eval": Schedule(5)}
    heads = settings.plan("heads")
    assert heads is not None
    assert heads.schedules == {**NEVER, "train": Schedule()}
    assert settings.plans_of("weights") == (heads,)
    assert settings.plan("tails") is None


def test_global_holds_in_each_mode_that_is_not_named() -> None:
    def schedules(name: str, options: object) -> dict[str, Schedule]:
        plan = capture_settings(json.dumps({"collections": {name: options}})).plans[name]
        return {mode: when for mode, when in plan.schedules.items() if when is not None}

    fifth, seventh = {"every": 5}, {"every": 7}
    everywhere = {"train": Schedule(5), "eval": Schedule(5), "predict": Schedule(5)}
    assert schedules("activations", {"modes": {"global": fifth}}) == everywhere
    assert schedules("losses", {"modes": {"global": fifth, "eval": seventh}}) == {
        **everywhere,
        "eval": Schedule(7),
    }
    assert schedules("inputs", {"every": 7, "modes": {"global": fifth, "predict": "off"}}) == {
        "train": Schedule(7),
        "eval": Schedule(5),
    }
    assert schedules("weights", {"modes": {"global": fifth}}) == {"train": Schedule(5)}
    assert schedules("losses", {"modes": {"global": "off", "eval": {}}}) == {"eval": Schedule()}


@pytest.mark.parametrize(
    "section",
    [
        *("[", "[]", '{"budget": 0.5}', '{"budget": "all"}', '{"collections": {"gradients": 3}}'),
        *('{"collections": {"x": {"match": "head"}}}', '{"pacing": "clock"}'),
        '{"collections": {"x": {"of": "weights", "match": "("}}}',
    ],
)
def test_a_section_that_nobody_has_checked_is_refused(section: str) -> None:
    with pytest.raises(ValueError, match="expected the section `capture` as JSON"):
        capture_settings(section)


def test_settings_are_read_without_pydantic_and_numpy() -> None:
    text = "import sys; import tocsin.emitter.plan.settings as s; s.capture_settings('{}')"
    text += "; sys.exit(bool({'pydantic', 'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
