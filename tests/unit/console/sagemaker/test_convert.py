"""`tocsin convert sagemaker`: every rule, parameter and action of its tables, and bad input."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sagemaker_page import COMMAND, page, write_page
from tocsin.actions.receivers.email.config import EmailReceiver
from tocsin.actions.receivers.sms.config import SmsReceiver
from tocsin.console.__main__ import app
from tocsin.console.context import section_registry
from tocsin.console.sagemaker.convert import Converted, convert
from tocsin.console.sagemaker.tables import ACTIONS, BY_NAME, NEVER_FIRED, RULES, OldRule
from tocsin.console.sagemaker.values import COLLECTIONS
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.stream_rules.catalogue import built_in
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.testing import RunBuilder, issues_of

DOCS = Path(__file__).parents[4] / "docs"
CATALOGUE = built_in()
REGISTRY = section_registry()
IMAGE = "503895931360.dkr.ecr.us-east-1.amazonaws.com/sagemaker-debugger-rules:latest"
WITH_COUNTERPART = [rule for rule in RULES if rule.name in CATALOGUE.aliases()]


def rule(name: str, label: str = "", /, **parameters: object) -> dict[str, object]:
    return {
        "RuleConfigurationName": label or name,
        "RuleEvaluatorImage": IMAGE,
        "RuleParameters": {"rule_to_invoke": name, **parameters},
    }


def converted(data: object, *, only: bool = False) -> tuple[Config, Converted]:
    """The configuration that comes out; it has no problems."""
    done = convert(json.dumps(data, indent=1), "job.json", only=only)
    config, problems = check_config(done.text, "tocsin.yaml", REGISTRY)
    assert problems == [], done.text
    assert config is not None
    return config, done


def said(done: Converted) -> list[str]:
    return [warning.message for warning in done.warnings]


# -- the tables


def test_the_page_is_current(tmp_path: Path) -> None:
    file = Path("how-to") / "from-sagemaker.md"
    assert (DOCS / file).read_text() == page(), f"write it with: {COMMAND}"
    write_page(tmp_path)
    assert (tmp_path / file).read_text() == page()


def test_each_note_is_understood_by_itself() -> None:
    notes = {one.note for old in RULES for one in old.parameters}
    assert [note for note in notes if note == "the same" or note.startswith("as are ")] == []


def test_every_alias_is_in_the_tables() -> None:
    assert set(CATALOGUE.aliases()) <= set(BY_NAME)
    assert all(f"| `{rule.name}` | " in page() for rule in RULES)


def test_every_rule_that_has_an_alias_has_the_preset() -> None:
    without = [rule.meta.name for rule in CATALOGUE if rule.meta.alias and not rule.meta.presets]
    # They must be told what to watch, or against what; the documentation has no default for that.
    assert set(without) <= {"tensor_variance", "differs_from_run"}


@pytest.mark.parametrize("old", WITH_COUNTERPART, ids=lambda old: old.name)
def test_documented_defaults_are_those_of_the_preset(old: OldRule) -> None:
    given = {one.name: one.default for one in old.parameters if one.default}
    given |= {one.name: "gpt-1" for one in old.parameters if one.kind == "run"}
    config, done = converted([rule(old.name, **given)])
    assert said(done) == []
    (entry,) = config.rules
    ours = CATALOGUE.get(old.name)
    assert entry.use == ours.meta.name
    preset = ours.meta.presets.get("sagemaker", {})
    assert entry.preset == ("sagemaker" if ours.meta.presets else None)
    # Those that are not in the preset keep their defaults, which are then the same.
    run = {one.new: "gpt-1" for one in old.parameters if one.kind == "run"}
    assert ours.meta.params.model_validate({**preset, **entry.params}) == (
        ours.meta.params.model_validate({**preset, **run})
    )
    fields = ours.meta.params.model_fields
    assert {one.new for one in old.parameters if one.new} <= set(fields)


@pytest.mark.parametrize("old", [rule for rule in RULES if rule.instead], ids=lambda old: old.name)
def test_reports_are_left_out_and_said(old: OldRule) -> None:
    config, done = converted([rule(old.name)])
    assert config.rules == ()
    assert f"# {old.name} (line 2): " in done.text
    assert old.name == "ProfilerReport" or said(done) == [f"{old.name} is left out: {old.instead}"]


@pytest.mark.parametrize("name", COLLECTIONS)
def test_collections_become_capture(name: str) -> None:
    collection = {
        "CollectionName": name,
        "CollectionParameters": {"save_interval": "50", "train.start_step": "10"},
    }
    config, done = converted({**rule("Overfit"), "CollectionConfigurations": [collection]})
    assert said(done) == []
    kept = {} if name == "losses" else {COLLECTIONS[name]: (50, 10)}
    found = {key: (one.every, one.start) for key, one in config.capture.collections.items()}  # type: ignore[union-attr]
    assert found == kept


@pytest.mark.parametrize(
    "collections",
    [
        {"gradients": {"train.save_interval": "100", "save_interval": "500"}},
        {"relu_output": {"save_interval": "100"}, "outputs": {"save_interval": "500"}},
        {"outputs": {"save_interval": "500"}, "relu_output": {"save_interval": "100"}},
    ],
)
def test_of_several_intervals_the_one_that_was_asked_for_counts(
    collections: dict[str, dict[str, str]],
) -> None:
    listed = [
        {"CollectionName": name, "CollectionParameters": options}
        for name, options in collections.items()
    ]
    config, _ = converted({**rule("Overfit"), "CollectionConfigurations": listed})
    assert [one.every for one in config.capture.collections.values()] == [100]  # type: ignore[union-attr]


def test_evaluations_of_what_is_one_collection_here_are_both_captured() -> None:
    listed = [
        {"CollectionName": name, "CollectionParameters": {f"{mode}.save_interval": "7"}}
        for name, mode in (("relu_output", "eval"), ("outputs", "predict"))
    ]
    _, done = converted({**rule("Overfit"), "CollectionConfigurations": listed})
    assert (done.text.count("eval:"), done.text.count("predict:")) == (1, 1), done.text


def test_a_character_beyond_sixteen_bits_is_no_mistake() -> None:
    for text in ("😀", "\ud83d", "\\ud83d"):
        request = {"DebugRuleConfigurations": [rule("AllZero")], "HyperParameters": {"note": text}}
        config, _ = converted(request)
        assert [one.name for one in config.rules] == ["all_zero"]


# -- actions


def action(name: str, **options: str) -> dict[str, str]:
    return {"name": name.lower(), **options}


STOP = action("StopTraining", training_job_prefix="gpt")
EMAIL = action("Email", endpoint="me@example.com")
SMS = action("SMS", endpoint="+4915112345678")


def escaped(actions: object) -> str:
    """As its libraries write them: JSON with a backslash before each quote."""
    return json.dumps(actions).replace('"', '\\"')


@pytest.mark.parametrize("write", [json.dumps, escaped, list], ids=["text", "escaped", "list"])
@pytest.mark.parametrize("key", ["action_json", "Actions"])
def test_actions_become_a_stop_and_receivers(key: str, write: type[list[object]]) -> None:
    assert {"StopTraining", "Email", "SMS"} == set(ACTIONS)
    config, done = converted([rule("VanishingGradient", **{key: write([EMAIL, SMS, STOP])})])
    assert said(done) == []
    (entry,) = config.rules
    assert [one.receiver or one.kind for one in entry.actions or ()] == ["stop", "mail", "sms"]
    mail, sms = config.receivers["mail"], config.receivers["sms"]
    assert isinstance(mail, EmailReceiver)
    assert isinstance(sms, SmsReceiver)
    assert (mail.to, sms.region) == (("me@example.com",), "us-east-1")


def test_one_receiver_for_each_address_and_actions_beside_the_parameters() -> None:
    other = action("Email", endpoint="you@example.com")
    config, _ = converted(
        [
            {**rule("Overfit"), "Actions": {"name": "Email", "parameters": {"endpoint": "a@b.de"}}},
            rule("Overtraining", action_json=json.dumps([other, EMAIL])),
            rule("DeadRelu", action_json=json.dumps(EMAIL)),
        ]
    )  # fmt: skip
    names = [[one.receiver for one in entry.actions or ()] for entry in config.rules]
    assert names == [["mail"], ["mail-2", "mail-3"], ["mail-3"]]


def test_actions_that_are_none_are_said() -> None:
    wrong = [action("Fax"), action("Email", endpoint="nobody"), action("SMS"), "x"]
    config, done = converted([rule("Overfit", Actions=wrong)])
    assert len(said(done)) == 4
    assert config.rules[0].actions is None


def test_who_stopped_nothing_stops_nothing_here() -> None:
    config, _ = converted([rule("ExplodingTensor"), rule("Overfit")])
    assert [entry.actions for entry in config.rules] == [(), None]


def test_the_option_to_stop_that_is_older_than_actions() -> None:
    config, done = converted(
        [
            rule("StalledTrainingRule", threshold="60", stop_training_on_fire="False"),
            rule("StalledTrainingRule", "Stalled 2", threshold="120", stop_training_on_fire="True"),
        ]
    )
    first, second = config.rules
    assert (first.name, first.params) == ("stalled_training", {"threshold": "1m"})
    assert first.actions is None
    assert (second.name, second.use) == ("stalled-2", "stalled_training")
    assert [one.kind for one in second.actions or ()] == ["stop"]
    assert said(done) == []


# -- parameters


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("MaxInitializationTime", {"threshold": "0.5"}, {"threshold": "30s"}),
        ("LossNotDecreasing", {"mode": "EVAL", "num_steps": 25}, {"mode": "eval", "num_steps": 25}),
        ("ExplodingTensor", {"only_nan": "True"}, {"only_nan": True}),
        (
            "AllZero",
            {"collection_names": "weights, gradients", "threshold": "90.5"},
            {"tensors": ["weights/*", "gradients/*"], "threshold": 90.5},
        ),
        (
            "NLPSequenceRatio",
            {"token_values": "0,1", "token_thresholds_percent": "50, 20.5"},
            {"token_values": [0, 1], "token_thresholds_percent": [50, 20.5]},
        ),
    ],
)
def test_values_become_ours(
    name: str, parameters: dict[str, object], expected: dict[str, object]
) -> None:
    config, done = converted(rule(name, **parameters))
    assert said(done) == []
    assert config.rules[0].params == expected


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("Overfit", {"patience": "0"}, "patience: expected a value greater than or equal to 1"),
        ("Overfit", {"patience": "many"}, "patience: expected a number"),
        ("Overfit", {"patience": "1.5"}, "patience: expected a whole number"),
        ("Overfit", {"patiense": "1"}, "Overfit has no parameter 'patiense'"),
        ("ExplodingTensor", {"only_nan": "perhaps"}, "only_nan: expected True or False"),
        ("LossNotDecreasing", {"mode": "PREDICT"}, "mode: expected EVAL, TRAIN or GLOBAL"),
        ("DeadRelu", {"threshold_inactivity": "5"}, "threshold_inactivity: the training process"),
        ("AllZero", {"collection_names": "mine"}, "collection_names: there is no collection like"),
        ("AllZero", {"tensor_regex": ".*block_7"}, "tensor_regex: names of tensors are others"),
        ("AllZero", {"tensor_regex": ".*gradient"}, "tensor_regex became gradients/*: see if"),
    ],
)
def test_what_is_not_taken_over_is_said(
    name: str, parameters: dict[str, object], message: str
) -> None:
    config, done = converted(rule(name, **parameters))
    (warning,) = done.warnings
    assert warning.message.startswith(message)
    assert (warning.source, warning.line) == ("job.json", 6)
    assert f"# {' ' * 2}not converted: {warning.message}"[:60] in done.text
    assert len(config.rules) == 1


@pytest.mark.parametrize(
    "parameters",
    [{"other_trials": "s3://bucket/tensors"}, {"other_trial_0": "s3://b"}, {"other_trials": "a,b"}],
)
def test_a_comparison_with_what_is_no_run_is_left_out_and_said(
    parameters: dict[str, object],
) -> None:
    stop = {"name": "StopTraining", "training_job_prefix": "gpt"}
    mail = {"name": "Email", "endpoint": "ana@example.com"}
    given = {**parameters, "action_json": json.dumps([stop, mail])}
    config, done = converted(rule("SimilarAcrossRuns", **given))
    assert (config.rules, dict(config.receivers)) == ((), {})
    left_out = "SimilarAcrossRuns is left out: add it with other_run, a run's id"
    assert left_out in said(done)
    assert all(message in done.text for message in said(done))


def test_rules_of_your_own_and_unknown_ones_are_left_out_and_said() -> None:
    own = rule("ImproperActivation", source_s3_uri="s3://bucket/rules.py")
    config, done = converted([own, rule("Overfitt")])
    assert config.rules == ()
    assert said(done) == [
        "ImproperActivation is a rule of your own: left out",
        "Overfitt is no rule of SageMaker Debugger: left out",
    ]
    assert done.warnings[1].hint == "Overfit"


def test_a_report_becomes_the_rules_of_which_it_says_something() -> None:
    config, done = converted(
        {
            "ProfilerConfig": {"ProfilingIntervalInMilliseconds": 1000},
            "ProfilerRuleConfigurations": [
                rule("ProfilerReport", CPUBottleneck_cpu_threshold="80", X_y="1"),
                rule("CPUBottleneck"),
            ],
        }
    )
    assert [(entry.name, entry.params) for entry in config.rules] == [
        ("cpu_bottleneck", {"cpu_threshold": 80}),
        ("cpubottleneck", {}),
    ]
    assert said(done) == ["X_y belongs to no rule of the report"]
    assert "#   not converted: X_y belongs to no rule of the report\n" in done.text
    assert config.capture.system.interval.total_seconds() == 1


def test_a_whole_request_with_its_hook() -> None:
    request = {
        "TrainingJobName": "gpt",
        "DebugHookConfig": {
            "S3OutputPath": "s3://bucket/tensors",
            "HookParameters": {"save_interval": "100"},
            "CollectionConfigurations": [
                {
                    "CollectionName": "relu_output",
                    "CollectionParameters": {
                        "eval.save_interval": "5",
                        "save_steps": "1,2",
                        "end_step": "90",
                        "include_regex": "relu",
                    },
                },
                {"CollectionName": "gradients", "CollectionParameters": {"eval.save_interval": 3}},
                {"CollectionName": "mine"},
            ],
        },
        "DebugRuleConfigurations": [rule("VanishingGradient", threshold="20.0")],
    }
    config, done = converted(request, only=True)
    assert config.defaults.rules == "none"
    activations = config.capture.collections["activations"]
    assert activations != "off"
    assert (activations.steps, activations.end) == ((1, 2), 90)
    evaluations = activations.modes["eval"]
    assert evaluations != "off"
    assert evaluations.every == 5
    assert said(done) == [
        "S3OutputPath of the hook is left out: records go to the bus and the store",
        "save_interval of the hook is left out",
        "all tensors of activations are captured, whatever their names",
        "gradients are captured in training only",
        "there is no collection like 'mine'",
    ]
    for message in said(done):
        assert f"# not converted: {message}\n" in done.text
    assert "Only the rules that are listed here run." in done.text
    assert "run as well" not in done.text


# -- bad input


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ('[\n {"a": 1,}]', (2, 10), "not valid JSON: "),
        ('{"a": // x\n1}', (1, 7), "not valid JSON: "),
        ("", (1, 1), "not valid JSON: "),
        ('[\n\t{"a": 1}]', (2, 2), "expected RuleConfigurationName and RuleParameters here"),
        ('{"DebugRuleConfigurations":\n {}}', (2, 2), "expected a list, got a mapping"),
        ('{"DebugRuleConfigurations": [1]}', (1, 30), "expected a mapping, got a number"),
        ('{"TrainingJobName": "x"}', (1, 1), "expected rule configurations: "),
        ('"text"', (1, 1), "expected rule configurations: "),
        ('{"RuleParameters": {}, "RuleParameters": {}}', (1, 24), "the key 'RuleParameters'"),
    ],
)
def test_bad_input_is_said_with_its_place(text: str, place: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigProblems) as raised:
        convert(text, "job.json")
    (problem,) = raised.value.problems
    assert (problem.source, (problem.line, problem.column)) == ("job.json", place)
    assert problem.message.startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=False, width=32)
    | st.sampled_from(["", "1", "-1", "True", "EVAL", "1e400", "weights", "a,b", ".*", "é\u2028#"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)  # fmt: skip
PARAMETERS = st.sampled_from(
    sorted({one.name for rule in RULES for one in rule.parameters} | {"action_json", "x"})
)

SCHEDULE = st.sampled_from(["save_interval", "eval.save_interval", "end_step", "save_steps", "x"])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*BY_NAME, "Other"]),
    st.dictionaries(PARAMETERS, JSON, max_size=5),
    st.dictionaries(SCHEDULE, JSON, max_size=3),
    st.text(),
)
def test_whatever_stands_there_what_comes_out_can_be_used(
    name: str, parameters: dict[str, Plain], schedule: dict[str, Plain], label: str
) -> None:
    collection = {"CollectionName": "weights", "CollectionParameters": schedule}
    rules = [rule(name, label, **parameters), rule(name, label, **parameters)]
    data = {"CollectionConfigurations": [collection], "DebugRuleConfigurations": rules}
    # What no YAML may hold is a problem with a place; anything else can be used.
    with contextlib.suppress(ConfigProblems):
        converted(data)


# -- the command


def test_the_command_writes_a_file_once(tmp_path: Path) -> None:
    job, out = tmp_path / "job.json", tmp_path / "tocsin.yaml"
    job.write_text(json.dumps([rule("Overfit", patience="0")]))
    done = CliRunner().invoke(app, ["convert", "sagemaker", str(job), "--out", str(out)])
    assert done.exit_code == 0
    assert f"{job}:1:" in done.stderr
    assert check_config(out.read_text(), str(out), REGISTRY)[1] == []
    shown = CliRunner().invoke(app, ["convert", "sagemaker", "-"], input=job.read_bytes())
    assert shown.stdout.splitlines()[1:] == out.read_text().splitlines()[1:]
    again = CliRunner().invoke(app, ["convert", "sagemaker", str(job), "--out", str(out)])
    assert "already exists" in str(again.exception)
    missing = CliRunner().invoke(app, ["convert", "sagemaker", str(tmp_path / "none.json")])
    assert "cannot read" in str(missing.exception)


# -- what did not fire there


def memory_grows(run: RunBuilder) -> None:
    run.steps(range(5), loss=1.0)
    used = np.concatenate([np.full(600, 20.0), np.full(600, 60.0)])
    run.system(
        {
            "gpu.0.utilization_percent": np.full(1200, 50.0),
            "gpu.0.of_job": np.ones(1200),
            "gpu.0.memory_used_bytes": used * 1e9,
            "gpu.0.memory_total_bytes": np.full(1200, 100e9),
        },
        every_s=0.5,
    )


def one_gpu_waits(run: RunBuilder) -> None:
    run.steps(range(5), loss=1.0)
    columns = {}
    for number, busy in enumerate((90.0, 5.0)):
        columns[f"gpu.{number}.utilization_percent"] = np.full(1200, busy)
        columns[f"gpu.{number}.of_job"] = np.ones(1200)
        columns[f"gpu.{number}.memory_used_bytes"] = np.full(1200, 50e9)
        columns[f"gpu.{number}.memory_total_bytes"] = np.full(1200, 100e9)
    run.system(columns, every_s=0.5)


def no_first_step(run: RunBuilder) -> None:
    for _ in range(130):
        run.wait(10)
        run.heartbeat()


def slow_steps(run: RunBuilder) -> None:
    seconds = np.where(np.arange(1000) % 10 == 9, 20.0, 1.0)
    run.steps(range(1000), loss=1.0, step_time_s=seconds)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("GPUMemoryIncrease", memory_grows),
        ("LoadBalancing", one_gpu_waits),
        ("MaxInitializationTime", no_first_step),
        ("StepOutlier", slow_steps),
    ],
)
def test_profiler_rules_that_did_not_fire_do_so_here(name: str, make: object) -> None:
    assert name in NEVER_FIRED
    config, _ = converted([rule(name)], only=True)
    run = RunBuilder()
    run.started()
    make(run)  # type: ignore[operator]
    specs = rule_specs(config.rules, defaults="none")
    found = issues_of(run.records, specs=specs, until_ms=run.now_ms)
    assert [issue.state for issue in found][:1] == ["firing"]
