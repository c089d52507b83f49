"""The section `capture`: what it takes, what it refuses and where, and how it reaches a job."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.emitter.plan.collections import NEVER, Schedule
from tocsin.emitter.plan.settings import CaptureSettings, capture_settings
from tocsin.schemas.configuration.capture import CaptureConfig, CollectionConfig, capture_config
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.configuration.file_schema import config_json_schema
from tocsin.schemas.configuration.values import format_percent, parse_percent
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.collections import KINDS, Kind, columns_of

WHOLE = """\
version: 1
capture:
  budget: 2.5%
  collections:
    losses: {modes: {predict: off, eval: {every: 7}}}
    gradients: {every: 10, start: 5, end: 50, steps: [1, 2], columns: [l2, zeros, p50]}
    weights: off
    biases: {steps: [0, 100]}
    activations: {columns: [dead], modes: {eval: off, train: {start: 7}}}
    inputs: {every: auto}
    heads: {of: weights, match: [query, "key$"], tensors: head.weight}
    norms: {of: gradients, module_types: LayerNorm, every: 3, modes: {global: off}}
  system: {interval: 1s, folders: [/data, scratch]}
"""


def section_of(text: str) -> CaptureConfig:
    config, problems = check_config(text, "tocsin.yaml")
    assert problems == []
    assert config is not None
    return config.capture


def test_the_file_the_json_of_a_job_and_its_settings_say_the_same() -> None:
    section = section_of(WHOLE)

    text = section.model_dump_json(exclude_defaults=True)
    settings = capture_settings(text)

    assert section.system.interval == timedelta(seconds=1)
    assert section.system.folders == (Path("/data"), Path("scratch"))
    assert capture_config(json.loads(text)) == section
    assert settings.budget == 0.025
    assert settings.collections == (
        *("losses", "gradients", "biases", "activations", "inputs", "optimizer_state"),
        *("heads", "norms"),
    )
    plans = settings.plans
    assert plans["losses"].schedules == {**NEVER, "train": Schedule(), "eval": Schedule(7)}
    assert plans["gradients"].schedule() == Schedule(10, 5, 50, frozenset({1, 2}))
    assert plans["gradients"].columns == ("l2", "zeros", "p50")
    assert plans["biases"].schedule() == Schedule(steps=frozenset({0, 100}))
    assert plans["activations"].schedules == {**NEVER, "train": Schedule(start=7)}
    assert plans["inputs"].schedule() == Schedule()
    assert [plans["heads"].selects(name) for name in ("a.query.w", "a.key", "a.key.w")] == [
        *(True, True, False)
    ]
    assert plans["heads"].selects("head.weight")
    assert plans["norms"].selects("x", "LayerNorm")
    assert plans["norms"].schedules == {**NEVER, "train": Schedule(3)}


def test_what_says_nothing_changes_nothing() -> None:
    for text in ("version: 1", "version: 1\ncapture:", "version: 1\ncapture: {collections: {}}"):
        section = section_of(text)
        assert section == CaptureConfig()
        assert section.model_dump_json(exclude_defaults=True) == "{}"
    assert capture_settings("{}").budget == CaptureConfig().budget == CaptureSettings().budget


@pytest.mark.parametrize(
    ("body", "column", "words", "hint"),
    [
        ("{budget: 0.5}", 19, "expected a percentage with its unit, like 0.5%", None),
        ("{budget: 0.001%}", 19, "expected a budget of 0.01% to 100%", None),
        ("{budget: 200%}", 19, "at most 100%", None),
        ("{budgt: 1%}", 11, "unknown key 'budgt'", "budget"),
        ("[1]", 10, "expected a mapping, got a list", None),
        ("{collections: [1]}", 24, "expected a mapping, got a list", None),
        ("{collections: {gradients: 5}}", 36, "expected a mapping, or off, got a number", "{every"),
        ("{collections: {inputs: }}", 25, "expected a mapping, or off, got nothing", "{every: 10}"),
        ("{collections: {gradients: {evry: 1}}}", 37, "unknown key 'evry'", "every"),
        ("{collections: {gradients: {every: 0}}}", 44, "at least 1, or auto", None),
        ("{collections: {gradients: {every: ten}}}", 44, "at least 1, or auto", None),
        ("{collections: {gradients: {every: true}}}", 44, "at least 1, or auto", None),
        ("{collections: {gradients: {start: -1}}}", 44, "greater than or equal to 0", None),
        ("{collections: {gradients: {start: 1.5}}}", 44, "expected a whole number", None),
        (
            "{collections: {gradients: {start: 5, end: 5}}}",
            52,
            "an end after the start, which",
            None,
        ),
        ("{collections: {gradients: {steps: 1}}}", 44, "expected a list, got a number", None),
        ("{collections: {gradients: {steps: [1, x]}}}", 48, "expected a whole number", None),
        (
            "{collections: {gradients: {every: auto, steps: [1]}}}",
            44,
            "must be a number",
            "omit it",
        ),
        ("{collections: {gradients: {steps: [1], end: 4}}}", 49, "'end' limits 'every'", "every"),
        (
            "{collections: {gradients: {columns: [l2, absmx]}}}",
            51,
            "unknown column 'absmx'",
            "absmax",
        ),
        (
            "{collections: {gradients: {columns: [dead]}}}",
            47,
            "unknown column 'dead' of grad",
            "one of",
        ),
        ("{collections: {gradients: {columns: []}}}", 46, "expected at least one column", "[l2]"),
        ("{collections: {losses: {columns: [l2]}}}", 44, "unknown column 'l2' of losses", None),
        ("{collections: {gradients: {match: x}}}", 37, "only for custom coll", "of: gradients"),
        ("{collections: {gradients: {of: weights}}}", 37, "only for custom coll", "of: gradients"),
        ("{collections: {gradients: {modes: {evel: off}}}}", 45, "unknown key 'evel'", "eval"),
        ("{collections: {gradients: {modes: [eval]}}}", 44, "a mapping like {eval", None),
        ("{collections: {gradients: {modes: {eval: 5}}}}", 51, "expected a mapping, or off", None),
        (
            "{collections: {gradients: {modes: {eval: {every: 5}}}}}",
            45,
            "cannot have a schedule in e",
            "remove",
        ),
        ("{collections: {gradients: {modes: {eval: {evry: 5}}}}}", 52, "unknown key 'ev", "every"),
        ("{collections: {losses: {modes: {eval: {end: 0}}}}}", 54, "an end after", None),
        ("{collections: {gradients: {every: 3, modes: {train: off}}}}", 55, "already", "one of"),
        ("{collections: {gradient: {every: 5}}}", 25, "unknown collection 'gradient'", "gradients"),
        ("{collections: {gradient: off}}", 25, "unknown collection 'gradient'", "gradients"),
        ("{collections: {x: off}}", 25, "unknown collection 'x'", "one of activations"),
        ("{collections: {x: {match: a}}}", 28, "needs the key 'of'", "of: weights"),
        ("{collections: {x: {of: weights}}}", 28, "at least one of 'match'", "match: "),
        ("{collections: {x: {of: losses, match: a}}}", 33, "got 'losses'", None),
        ("{collections: {x: {of: weights, match: '('}}}", 49, "a regular expression: miss", None),
        ("{collections: {x: {of: weights, match: '[[a]'}}}", 49, "nested set", None),
        ("{collections: {x: {of: weights, match: [a, '(']}}}", 53, "a regular expression", None),
        ("{collections: {x: {of: weights, match: []}}}", 49, "text, or a list of 1 to", None),
        ("{collections: {x: {of: weights, match: ['']}}}", 49, "texts of 1 to 400", None),
        ("{collections: {x: {of: weights, module_types: nn.Linear}}}", 56, "like LayerNorm", None),
        ("{collections: {updates: off}}", 25, "a built-in coll", "another name"),
        ("{collections: {Bad Name: {every: 1}}}", 25, "expected a name", None),
        ("{full_tensors: {url: 'gcs://bucket/x'}}", 31, "expected a folder, or s3://", None),
        ("{full_tensors: {url: 's3://KEY:x@b/x'}}", 31, "credentials do not belong", None),
        ("{system: {interval: 50ms}}", 30, "expected an interval of 100ms to 60s", None),
        ("{system: {interval: 2m}}", 30, "expected an interval of 100ms to 60s", None),
        ("{system: {intervall: 1s}}", 20, "unknown key 'intervall'", "interval"),
        ("{system: {folders: /data}}", 29, "expected a list, got text", None),
    ],
)
def test_each_mistake_has_its_place_its_words_and_its_hint(
    body: str, column: int, words: str, hint: str | None
) -> None:
    config, (problem,) = check_config(f"version: 1\ncapture: {body}\n", "tocsin.yaml")
    assert config is None
    assert (problem.line, problem.column) == (2, column), problem
    assert words in problem.message
    assert hint is None or hint in (problem.hint or "")


def test_one_mistake_hides_no_other() -> None:
    body = (
        "capture: {budget: 1, collections: {gradient: off, x: {of: weights, evry: 1, match: '('}}}"
    )
    _, problems = check_config(f"version: 1\n{body}\n", "tocsin.yaml")
    assert [problem.code for problem in problems] == [
        *("invalid_value", "unknown_collection", "unknown_key")
    ]


def test_there_is_an_end_to_the_collections() -> None:
    many = {f"mine-{n}": {"of": "weights", "match": "a"} for n in range(101)}
    with pytest.raises(ConfigurationError, match="at most 100 collections"):
        capture_config({"collections": many})


def test_code_gives_it_in_the_form_of_the_file() -> None:
    section = capture_config(
        {"budget": "1%", "collections": {"weights": "off", "gradients": {"steps": range(2)}}}
    )
    assert section.budget == 0.01
    assert section.collections == {"weights": "off", "gradients": CollectionConfig(steps=(0, 1))}


def test_what_is_wrong_in_code_is_said_with_its_key() -> None:
    with pytest.raises(ConfigurationError) as caught:
        capture_config({"budget": 0.5, "collections": {"gradients": {"every": 0}, "weight": "off"}})
    assert str(caught.value) == (
        "capture.budget: expected a percentage with its unit, like 0.5%; "
        "capture.collections.gradients.every: expected a whole number of steps, at least 1, or "
        "auto; capture.collections.weight: unknown collection 'weight' (try: weights)"
    )
    with pytest.raises(ConfigurationError, match=r"capture: expected mappings, .* object"):
        capture_config({"budget": object()})


_KEYS = """
    budget collections system gradients losses mine of match tensors module_types every start end
    steps columns modes train eval interval folders
"""
_WORDS = st.sampled_from(sorted(set(_KEYS.split())))
_LEAVES = st.sampled_from(["1", "0", "off", "auto", "~", "weights", "'('", "[1, 2]", "1%", "l2"])
_TREE = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: "[" + ", ".join(items) + "]")
        | st.dictionaries(_WORDS, inner, max_size=4).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=12,
)


@given(_TREE, _TREE)
def test_any_section_gives_settings_or_problems(whole: str, collections: str) -> None:
    for section in (whole, f"{{collections: {{gradients: {collections}, mine: {collections}}}}}"):
        config, problems = check_config(f"version: 1\ncapture: {section}\n", "tocsin.yaml")
        assert (config is None) == bool(problems)
        if config is not None:
            text = config.capture.model_dump_json(exclude_defaults=True)
            assert capture_config(json.loads(text)) == config.capture
            assert capture_settings(text).budget == config.capture.budget


@given(st.integers(1, 10_000))
def test_a_percentage_is_read_back(hundredths: int) -> None:
    share = parse_percent(f"{hundredths / 100:g}%")
    assert share == pytest.approx(hundredths / 10_000)
    assert parse_percent(format_percent(share)) == share


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_of_a_kind_can_be_named(kind: Kind) -> None:
    columns = list(columns_of(kind))
    if not columns:
        assert kind == "losses"
        return
    assert len(set(columns)) == len(columns) > 13
    section = capture_config({"collections": {kind: {"columns": columns}}})
    assert capture_settings(section.model_dump_json()).plans[kind].columns == tuple(columns)


def test_an_editor_takes_it_and_refuses_what_it_can_see_is_wrong() -> None:
    validator: Any = jsonschema.Draft202012Validator(
        config_json_schema(ReceiverKinds().models(), [])
    )
    section = json.loads(section_of(WHOLE).model_dump_json(exclude_defaults=True))

    def valid(capture: object) -> bool:
        return bool(validator.is_valid({"version": 1, "capture": capture}))

    assert valid(section)
    for wrong in (
        {"budget": 1},
        {"collections": {"gradients": {"every": 0}}},
        {"collections": {"gradients": {"every": "often"}}},
        {"collections": {"gradients": {"modes": {"evel": "off"}}}},
        {"collections": {"gradients": 5}},
        {"system": {"interval": "1"}},
    ):
        assert not valid(wrong), wrong
    assert Config().capture == CaptureConfig()
