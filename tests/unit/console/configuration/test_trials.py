"""`tocsin test`: unit tests of a configuration, in virtual time, with the lines that say so."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from support.records.issues import NOW_MS, issue
from tocsin.actions.receivers.build import Receivers
from tocsin.console.__main__ import app
from tocsin.console.configuration.check import check_file
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.events import Event

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*/tocsin.yaml"))

CONFIG = """\
version: 1
receivers:
  chat: {type: webhook, url: "https://chat.example.com/x"}
  pager: {type: webhook, url: "https://pager.example.com/x"}
rules:
  - nonfinite: [stop, chat]
  - {name: slow, use: throughput_regression}
routes:
  - {name: nights, match: {team: night}, notify: [pager], active: [night]}
  - {name: rest, notify: [chat]}
time_windows:
  night: {weekly: ["22:00-06:00"]}
inhibit:
  - {name: nan, when: {rule: nonfinite}, mute: {rule: loss_spike}, equal: [run]}
"""
TESTS = """\
tests:
  - name: a NaN stops the run, notifies once, and explains the spike
    runs: [{name: r1, labels: {team: vision}}]
    feed:
      - {at: 0s, rule: nonfinite, run: r1, severity: critical, subject: h.3.mlp, step: 17,
         reason: NaN in h.3.mlp}
      - {at: 1s, rule: loss_spike, run: r1}
      - {at: 5m, rule: nonfinite, run: r1, subject: h.3.mlp, state: resolved}
    expect:
      - {by: 3s, notify: chat, count: 1, text_has: [NaN in h.3.mlp, "step 17"]}
      - {by: 3s, stop: r1, rule: nonfinite, count: 1}
      - {by: 6m, notify: chat, state: resolved}
    never: [{notify: any, rule: loss_spike}, {notify: pager}]
  - name: at night the pager
    start: 2026-11-23T23:00:00Z
    runs: [{name: r1, labels: {team: night}}]
    feed: [{at: 0s, rule: loss_spike, run: r1}]
    expect: [{by: 1m, notify: pager}]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tocsin.yaml").write_text(CONFIG)
    Path("tocsin_test.yaml").write_text(TESTS)

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a receiver was made")

    monkeypatch.setattr(Receivers, "__init__", made)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["test", *words])


def test_expectations_are_met_in_virtual_time() -> None:
    done = run()

    assert (done.exit_code, done.output.splitlines()) == (
        0,
        [
            "tocsin_test.yaml: ok     a NaN stops the run, notifies once, and explains the spike",
            "tocsin_test.yaml: ok     at night the pager",
            "tocsin_test.yaml: used: rules 1/2 (not slow), routes 2/2, receivers 2/2, "
            "inhibitions 1/1",
        ],
    )


def test_what_is_not_met_is_said_with_its_line(tmp_path: Path) -> None:
    Path("tocsin_test.yaml").write_text(
        TESTS.replace("23:00:00Z", "12:00:00Z")
        .replace("count: 1, text_has", "count: 2, text_has")
        .replace('"step 17"', "step 18")
        .replace("notify: pager}]\n  -", "notify: chat}]\n  -")
    )

    done = run("--junit", "report.xml")
    facts = json.loads(run("--json").output)

    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].startswith("tocsin_test.yaml: FAILED a NaN stops")
    assert lines[1] == "  tocsin_test.yaml:10:9: expected 2 notices to chat by 3s, got 1"
    assert lines[2] == "  tocsin_test.yaml:10:9: the text has no 'step 18':"
    assert (
        "  tocsin_test.yaml:13:46: expected no notice to chat, got nonfinite firing at "
        in done.output
    )
    assert "  tocsin_test.yaml:18:14: expected at least one notice to pager by 1m, got 0" in lines
    suite = ElementTree.parse("report.xml").getroot()[0]
    assert suite.attrib == {"name": "tocsin_test.yaml", "tests": "2", "failures": "2"}
    failure = suite[1][0]
    assert failure.attrib["message"] == "expected at least one notice to pager by 1m, got 0"
    assert (failure.text or "").startswith("tocsin_test.yaml:18:14: ")
    assert [test["failures"] != [] for test in facts["files"][0]["tests"]] == [True, True]


def test_mistakes_in_a_file_of_tests_have_places() -> None:
    Path("tocsin_test.yaml").write_text(
        TESTS.replace("run: r1, severity", "run: r2, severity").replace("by: 6m", "bye: 6m")
    )
    wrong = run().exception
    Path("tocsin_test.yaml").write_text(TESTS.replace("run: r1, severity", "run: r2, severity"))
    unknown = run().exception
    Path("tocsin_test.yaml").write_text(TESTS.replace("rule: loss_spike, run", "rule: spike, run"))
    no_rule = run().exception

    assert isinstance(wrong, ConfigProblems)
    assert "tocsin_test.yaml:12:10: unknown key 'bye'" in str(wrong)
    assert "tocsin_test.yaml:5:40: unknown run 'r2'" in str(unknown)
    assert "tocsin_test.yaml:7:24: the rule 'spike' does not exist" in str(no_rule)
    assert "no file of tests" not in str(no_rule)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "{notify: any, rule: loss_spike}",
            "{notify: any, rule: los_spike}",
            "13:33: the rule "
            "'los_spike' does not exist in this configuration; the nearest that is on: loss_spike",
        ),
        (
            "stop: r1, rule: nonfinite",
            "stop: r1, rule: nonfinit",
            "11:34: the rule 'nonfinit' "
            "does not exist in this configuration; the nearest that is on: nonfinite",
        ),
        ("{notify: pager}", "{notify: pagr}", "13:55: unknown receiver 'pagr'; try: pager"),
        (
            "stop: r1, rule",
            "stop: r2, rule",
            "11:24: unknown run 'r2'\n"
            "    11 |       - {by: 3s, stop: r2, rule: nonfinite, count: 1}\n"
            "       |                        ^\n         try: list it under 'runs'",
        ),
        ("{notify: pager}", "{notify: pager, run: r}", "13:67: unknown run 'r'"),
    ],
)
def test_a_check_of_something_that_does_not_exist_is_refused(old: str, new: str, says: str) -> None:
    assert old in TESTS
    Path("tocsin_test.yaml").write_text(TESTS.replace(old, new))

    refused = run().exception

    assert isinstance(refused, ConfigurationError)
    assert says in str(refused)


def test_a_check_may_name_a_rule_as_sagemaker_does() -> None:
    Path("tocsin_test.yaml").write_text(
        TESTS.replace("stop: r1, rule: nonfinite", "stop: r1, rule: ExplodingTensor")
    )

    assert run().exit_code == 0


def test_a_replay_is_compared_with_what_was_written_before() -> None:
    told = [issue("gpt-1"), issue("gpt-1", resolved=True)]
    Path("week.jsonl").write_text(
        "".join(
            Event.wrap(one, id=f"i/{number}", source="/x", time_ms=NOW_MS).encode().decode() + "\n"
            for number, one in enumerate(told)
        )
    )
    Path("tocsin_test.yaml").write_text(
        "tests: [{name: week, replay: week.jsonl, golden: week.expected.json}]\n"
    )

    missing, written, same = run(), run("--update"), run()
    Path("tocsin.yaml").write_text(CONFIG.replace("[stop, chat]", "[chat]"))
    changed = run()

    assert "`tocsin test --update` writes it" in missing.output
    assert (missing.exit_code, written.exit_code, same.exit_code) == (1, 0, 0)
    assert changed.exit_code == 1
    assert 'week.expected.json differs: - "action": "stop",' in changed.output


def test_an_update_makes_the_folder_or_names_the_path_that_it_cannot_write() -> None:
    event = Event.wrap(issue("gpt-1"), id="i/1", source="/x", time_ms=NOW_MS)
    Path("week.jsonl").write_text(event.encode().decode() + "\n")
    tests = "tests: [{name: week, replay: week.jsonl, golden: expected/gpt/week.json}]\n"
    Path("tocsin_test.yaml").write_text(tests)

    written, same = run("--update", "--junit", "reports/junit.xml"), run()
    Path("tocsin_test.yaml").write_text(tests.replace("expected/gpt", "week.jsonl"))
    refused = run("--update")

    assert (written.exit_code, same.exit_code) == (0, 0), written.output
    assert Path("reports/junit.xml").is_file()
    assert isinstance(refused.exception, ConfigurationError)
    assert str(refused.exception).startswith("cannot write week.jsonl/week.json: ")


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda path: path.parent.name)
def test_each_example_passes_check_and_its_tests(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)

    checked = check_file(Path(config.name), {}, config.parent)
    done = run("--json")

    assert [*checked.problems, *checked.warnings] == []
    assert done.exit_code == 0, done.output
    used = json.loads(done.output)["files"][0]["used"]
    assert all(used["receivers"].values())
