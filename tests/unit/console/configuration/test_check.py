"""What `tocsin check` says: all problems with places and codes, or the settings in effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tocsin.console.configuration.check import NO_FILE, as_json, as_text, check_file, check_files
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.signing import SigningKey
from tocsin.stream_rules.catalogue import built_in

GOOD = """\
version: 1
labels: {team: vision}
secrets:
  hook: {env: CHECK_TEST_HOOK}
receivers:
  ml-hook: {type: webhook, url: "https://hooks.example.com/ml", sign: {key: {secret: hook}}}
rules:
  - nonfinite: [stop, ml-hook]
  - name: loose
    use: exploding_gradient
    match: {env: [prod, "test-*"]}
    actions: []
  - loss_not_decreasing: off
"""
HOOK = {"CHECK_TEST_HOOK": "whsec_c2VjcmV0"}


def written(folder: Path, text: str, name: str = "tocsin.yaml") -> Path:
    path = Path(name)
    (folder / path).write_text(text)
    return path


def test_all_problems_are_said_with_place_caret_code_and_hint(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "version: 1\nrules:\n  - nonfinit: [stop]\n"
        "  - {name: nonfinite, params: {for_step: 2}, actions: [hok]}\n",
    )

    checked = check_file(path, {}, tmp_path)

    assert checked.effective is None
    assert as_text(checked).splitlines() == [
        "tocsin.yaml:3:5: unknown rule 'nonfinit' [unknown_rule]",
        "     3 |   - nonfinit: [stop]",
        "       |     ^",
        "         try: nonfinite",
        "tocsin.yaml:4:32: unknown key 'for_step' [unknown_key]",
        "     4 |   - {name: nonfinite, params: {for_step: 2}, actions: [hok]}",
        "       |                                ^",
        "         try: for_steps",
        "tocsin.yaml:4:56: unknown receiver 'hok' [unknown_receiver]",
        "     4 |   - {name: nonfinite, params: {for_step: 2}, actions: [hok]}",
        "       |                                                        ^",
        "         try: one of by_route, stop",
        "tocsin.yaml: 3 problems",
    ]


def test_the_services_checks_are_among_them(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "version: 1\nreceivers:\n  a: {type: webhook, url: 'https://e.example/', headers: "
        "{Host: x}}\nrules:\n  - nonfinite: [a, a]\n",
    )

    codes = [problem.code for problem in check_file(path, {}, tmp_path).problems]

    assert codes == ["header", "duplicate_action"]


def test_of_a_good_file_the_settings_in_effect_are_printed(tmp_path: Path) -> None:
    named_only = [rule.meta.name for rule in built_in() if not rule.meta.by_default]
    checked = check_file(written(tmp_path, GOOD), HOOK, tmp_path)

    assert not checked.problems
    assert not checked.warnings
    assert not checked.notes
    assert checked.effective is not None
    off = checked.effective.rules_off
    assert set(off) == {"loss_not_decreasing", *named_only}
    assert as_text(checked).splitlines() == [
        "tocsin.yaml: no problems",
        "  bus        embedded:.tocsin/bus.db (the default)",
        "  labels     team=vision",
        "  secrets    hook (variable CHECK_TEST_HOOK)",
        "  rules      "
        f"{len(checked.effective.rules_on)} on: among them loose; {len(off)} off: {', '.join(off)}",
        "  capture    0.5% of the step time: losses, gradients, weights, activations, "
        "optimizer_state",
        "  receivers  ml-hook (webhook)",
        "  actions    nonfinite: stop at critical, ml-hook",
        "  actions    loose (runs with env=prod|test-*): nothing",
        "  actions    all others: the terminal of the run",
        "  stops      also critical issues of loss_diverged, restart_loop stop their run",
    ]


def test_a_stop_before_an_update_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "version: 1\nstop: {before_update: true}\n")
    *_, last = as_text(check_file(path, {}, tmp_path)).splitlines()
    assert last == "  stops      before an update that would write NaN or Inf (stop.before_update)"


def test_rules_are_counted_and_named_where_that_is_short_or_asked_for(tmp_path: Path) -> None:
    def rules_of(text: str, *, verbose: bool = False) -> str:
        checked = check_file(written(tmp_path, f"version: 1\n{text}"), {}, tmp_path)
        lines = as_text(checked, verbose=verbose).splitlines()
        (line,) = (line for line in lines if line.startswith("  rules "))
        return line.removeprefix("  rules      ")

    usual = [rule.meta.name for rule in built_in() if rule.meta.by_default]
    few = "defaults: {rules: none}\nrules: [nonfinite: [stop]]\n"
    assert rules_of("").startswith(f"{len(usual)} on; ")
    assert rules_of(few) == f"1 on: nonfinite; {len(built_in().names()) - 1} off"
    assert ", ".join(usual) in rules_of("", verbose=True)


def test_what_is_captured_is_said_with_its_schedule(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "version: 1\ncapture: {budget: 1%, collections: {weights: off, activations: off, "
        "gradients: {every: 10, start: 5, end: 2000}, optimizer_state: {every: 1}, "
        "losses: {modes: {train: off, eval: {every: 3}}}, inputs: {steps: [0, 4]}, "
        "mine: {of: weights, match: a}, "
        "relus: {of: activations, match: a, modes: {global: {every: 9}, predict: off}}}}\n",
    )
    checked = check_file(path, {}, tmp_path)

    assert checked.effective is not None
    assert checked.effective.captured["mine"] == "auto"
    assert (
        "  capture    1% of the step time: losses in eval every 3 steps, "
        "gradients every 10 steps from step 5 until step 2,000, inputs at 2 steps, "
        "optimizer_state each step, mine, relus every 9 steps and in eval every 9 batches"
        in as_text(checked)
    )


def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("labels:", "bus: embedded:one.db\nlabels:"))
    environ = {**HOOK, "TOCSIN_BUS": "kafka://k:9092", "TOCSIN_LABELS": "env=prod"}

    effective = check_file(path, environ, tmp_path).effective

    assert effective is not None
    assert (effective.bus, effective.bus_origin) == ("kafka://k:9092", "environment")
    assert effective.labels == {"team": "vision", "env": "prod"}


def test_a_secret_that_is_not_on_this_machine_is_a_note(tmp_path: Path) -> None:
    checked = check_file(written(tmp_path, GOOD), {}, tmp_path)

    assert not checked.problems
    assert list(checked.notes) == ["secret 'hook': variable CHECK_TEST_HOOK is not set"]
    told = as_text(checked)
    assert "tocsin.yaml: note: secret 'hook': variable" in told
    assert (
        "tocsin.yaml: no problems in the file; whether it can be used here, the notes say" in told
    )


def test_where_it_is_to_be_used_what_is_not_there_is_a_problem(tmp_path: Path) -> None:
    keys = "stop: {trusted_keys: [keys, actions.pub]}\n"
    optional = "  other: {file: gone, optional: true}\n  token: {file: token}\n"
    path = written(tmp_path, GOOD.replace("receivers:", f"{optional}receivers:") + keys)

    (checked,) = check_files([], {}, tmp_path)
    named = check_file(path, {}, tmp_path)

    assert [(problem.line, problem.code, problem.message) for problem in checked.problems] == [
        (4, "secret_missing", "secret 'hook': variable CHECK_TEST_HOOK is not set"),
        (6, "secret_missing", "secret 'token': file 'token' does not exist"),
        (16, "no_trusted_key", "keys: there is no public key"),
        (16, "no_trusted_key", "actions.pub: there is no public key"),
    ]
    assert not named.problems
    assert list(named.notes) == [problem.message for problem in checked.problems]

    (tmp_path / "token").write_text("t")
    SigningKey.generate().write(tmp_path / "keys" / "actions.key")
    SigningKey.generate().write(tmp_path / "actions.key")
    (good,) = check_files([], HOOK, tmp_path)
    assert not good.problems
    assert not good.notes


def test_one_mistake_hides_no_other_of_its_rule(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "version: 1\nrules:\n"
        "  - {name: nonfinite, severity: bad, params: {for_step: 2}}\n"
        "  - {name: loss_spike, preset: none_such, params: {no_such: 1}}\n",
    )
    found = check_file(path, {}, tmp_path).problems
    assert [(problem.line, problem.code) for problem in found] == [
        (3, "invalid_value"),
        (3, "unknown_key"),
        (4, "unknown_preset"),
        (4, "unknown_key"),
    ]


def test_what_works_though_hardly_as_meant_is_warned_of(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "version: 1\ndefaults: {rules: none}\n"
        "receivers:\n  lonely: {type: webhook, url: 'https://e.example/hidden-path'}\n",
    )

    checked = check_file(path, {}, tmp_path)

    assert not checked.problems
    assert [warning.code for warning in checked.warnings] == [
        "no_rules",
        "unused_receiver",
    ]
    text = as_text(checked)
    assert "tocsin.yaml:2:12: warning: no rule is enabled" in text
    assert "try: rules: all" in text
    assert "hidden-path" not in text


def test_the_file_is_found_as_the_other_commands_find_it(tmp_path: Path) -> None:
    assert [checked.source for checked in check_files([], {}, tmp_path)] == [NO_FILE]
    written(tmp_path, GOOD)
    written(tmp_path, GOOD, "other.yaml")

    assert [checked.source for checked in check_files([], HOOK, tmp_path)] == ["tocsin.yaml"]
    environ = {**HOOK, "TOCSIN_CONFIG": "other.yaml"}
    assert [checked.source for checked in check_files([], environ, tmp_path)] == ["other.yaml"]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.yaml"):
        check_files([Path("nothing.yaml")], {}, tmp_path)


def test_a_wrong_variable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="TOCSIN_BUS"):
        check_files([], {"TOCSIN_BUS": "rabbit://x"}, tmp_path)


def test_json_has_everything_but_lines_of_the_file(tmp_path: Path) -> None:
    bad = "version: 1\nreceivers:\n  a: {type: webhook, url: 'ftp://hidden.example/'}\n"
    files = [written(tmp_path, GOOD), written(tmp_path, bad, "bad.yaml")]

    text = as_json(check_files(files, HOOK, tmp_path))

    assert "hidden" not in text
    found = json.loads(text)
    assert found["version"] == 1
    good, wrong = found["files"]
    assert (good["file"], good["ok"], good["problems"]) == ("tocsin.yaml", True, [])
    assert good["effective"]["receivers"] == {"ml-hook": "webhook"}
    assert good["effective"]["rule_actions"][0] == {
        "rule": "nonfinite",
        "match": {},
        "actions": ["stop", "ml-hook"],
        "stops_at": "critical",
    }
    assert (wrong["ok"], wrong["effective"]) == (False, None)
    assert wrong["problems"] == [
        {
            "file": "bad.yaml",
            "line": 3,
            "column": 27,
            "code": "invalid_value",
            "message": "expected a URL like https://hooks.example.com/ml, or {secret: NAME}",
            "hint": None,
        }
    ]


HOOKS = """\
  mail: {type: email, to: [me@example.com]}
  events: {type: webhook, url: "https://e.example/x"}
  page: {type: webhook, url: "https://e.example/x", body: alertmanager-v4}
  own: {type: webhook, url: "https://e.example/x", template: {text: '{"text": "{headline}"}'}}
  full: {type: webhook, url: "https://e.example/x", template: {text: '{"x": "{text}"}'}}
  room: {type: chat, url: "slack://a/b/c"}
  phone: {type: sms, to: ["+15550100"]}
  queue: {type: sqs, queue: "https://sqs.eu-west-1.amazonaws.com/1/q"}
"""


@pytest.mark.parametrize(
    ("via", "shown"),
    [
        ("mail", True),
        ("events", False),
        ("page", True),
        ("own", False),
        ("full", True),
        ("room", True),
        ("phone", False),
        ("queue", False),
    ],
)
def test_a_receiver_that_shows_no_question_is_warned_of(
    tmp_path: Path, via: str, shown: bool
) -> None:
    stop = f"{{stop: {{mode: ask, approve: {{via: {via}}}}}}}"
    text = f"version: 1\nreceivers:\n{HOOKS}rules:\n  - nonfinite: [{stop}]\n"

    checked = check_file(written(tmp_path, text), {}, tmp_path)

    assert not checked.problems
    assert f"the receiver {via!r}" not in as_text(checked), "it is used: it gets the question"
    found = [one for one in checked.warnings if one.code == "question_not_shown"]
    message = f"{via!r} cannot show an approval request"
    assert [(one.line, one.message) for one in found] == ([] if shown else [(12, message)])


def test_routes_and_repeats_that_cannot_work_are_found_at_their_lines(tmp_path: Path) -> None:
    text = (
        "version: 1\nreceivers: {a: {type: email, to: [me@example.com]}}\nroutes:\n"
        "  - {name: all, notify: [a]}\n"
        "  - {name: vision, match: {team: vision}, notify: [a]}\n"
        "  - {name: slow, notify: [a], group_wait: 2m, repeat_interval: 1m}\n"
    )

    found = check_file(written(tmp_path, text), {}, tmp_path).problems

    assert sorted((one.line, one.code) for one in found) == [
        (5, "unreachable_route"),
        (6, "repeat_before_message"),
        (6, "unreachable_route"),
    ]


def test_a_rule_by_its_other_name_is_the_same_rule(tmp_path: Path) -> None:
    found = []
    for names in (("ExplodingTensor", "VanishingGradient"), ("nonfinite", "vanishing_gradient")):
        text = "".join(f"  - {name}: [stop]\n" for name in names)
        off = "capture: {collections: {gradients: off}}\n"
        checked = check_file(written(tmp_path, f"version: 1\n{off}rules:\n{text}"), {}, tmp_path)
        found.append((checked.effective, [one.code for one in checked.warnings]))
    assert found[0] == found[1]
    assert found[0][1] == ["stop_without_input"]


def test_a_stop_of_a_rule_whose_input_is_not_captured_is_warned_of(tmp_path: Path) -> None:
    rules = "rules:\n  - dead_relu: [stop]\n  - vanishing_gradient: [stop]\n  - nonfinite: [stop]\n"
    off = "capture: {collections: {activations: off}}\n"

    without = check_file(written(tmp_path, f"version: 1\n{off}{rules}"), {}, tmp_path)
    captured = check_file(written(tmp_path, f"version: 1\n{rules}"), {}, tmp_path)

    assert [
        (one.line, one.column, one.code, one.message, one.hint) for one in without.warnings
    ] == [
        (
            4,
            17,
            "stop_without_input",
            "'dead_relu' never stops a run: activations are not captured",
            "capture: {collections: {activations: {every: 10}}}",
        )
    ]
    assert list(captured.warnings) == []
