"""How a configuration names custom rules, and what is said where it does so wrongly."""

from __future__ import annotations

import math
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from support.rules.custom import FILE
from tocsin.console.configuration.check import as_text, check_file
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.stream_rules.custom import loading
from tocsin.stream_rules.custom.loading import RuleNotLoaded, load_rule, load_specs
from tocsin.stream_rules.custom.protocol import Hello
from tocsin.stream_rules.engine.configured_rules import custom_entries, rule_specs, with_own_names

TEXT = """\
version: 1
rules:
  - {name: well, use: "rules/sick.py:HighLoss", params: {limit: 2.5}, actions: [stop]}
  - {name: no-file, use: "rules/none.py:HighLoss"}
  - {name: no-class, use: "rules/sick.py:HighLos"}
  - {name: no-rule, use: "rules/sick.py:HighLossParams"}
  - {name: raises, use: "rules/raises.py:Any"}
  - {name: bad-syntax, use: "rules/syntax.py:Any"}
  - name: bad-params
    use: rules/sick.py:HighLoss
    params: {limit: much, limt: 2.0}
  - {name: bad-preset, use: "rules/sick.py:HighLoss", preset: sagemaker}
  - {name: taken, use: "rules/taken.py:Nonfinite"}
  - {name: no-state, use: "rules/state.py:NoState"}
"""

TAKEN = """\
from tocsin.stream_rules.rules.numerical.nonfinite import Nonfinite
"""

NO_STATE = """\
from dataclasses import dataclass, field, replace
from sick import HighLoss, HighLossParams
from tocsin.stream_rules.rule import Rule

@dataclass
class State:
    seen: object = field(default_factory=object)

class NoState(Rule[HighLossParams, State]):
    meta = replace(HighLoss.meta, name="no_state")
    state_type = State
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "sick.py").write_text(FILE.read_text())
    (rules / "raises.py").write_text("import math\n\nmath.sqrt(-1)\n")
    (rules / "syntax.py").write_text("def broken(:\n")
    (rules / "taken.py").write_text(TAKEN)
    (rules / "state.py").write_text(NO_STATE)
    return tmp_path


def test_check_says_each_mistake_with_line_and_column(folder: Path) -> None:
    (folder / "tocsin.yaml").write_text(TEXT)

    checked = check_file(Path("tocsin.yaml"), {}, folder)

    found = {(p.line, p.column): (p.code, p.message) for p in checked.problems}
    lines = {line: message for (line, _), (_, message) in found.items()}
    assert [p.code for p in checked.problems] == [
        *["rule_not_loaded"] * 5,
        "invalid_value",
        "unknown_key",
        "unknown_preset",
        *["rule_not_loaded"] * 2,
    ]
    assert lines[4] == "there is no file rules/none.py"
    assert lines[5] == "there is no class 'HighLos' in rules/sick.py"
    assert "is not a rule: expected a subclass of Rule" in lines[6]
    assert lines[7].endswith("ValueError: math domain error (line 3)")
    assert "SyntaxError" in lines[8]
    assert lines[8].endswith("(line 1)")
    assert found[11, 21] == ("invalid_value", "expected a number, got text")
    assert found[11, 27][0] == "unknown_key"
    assert "has no preset 'sagemaker'" in lines[12]
    assert "is a built-in rule" in lines[13]
    assert "cannot be saved and restored" in lines[14]
    assert "try: HighLoss" in as_text(checked)
    assert not list(folder.rglob("__pycache__"))


def test_check_says_what_holds_with_a_rule_of_ones_own(folder: Path) -> None:
    (folder / "tocsin.yaml").write_text("\n".join(TEXT.splitlines()[:3]) + "\n")

    checked = check_file(Path("tocsin.yaml"), {}, folder)

    assert checked.problems == ()
    assert checked.effective is not None
    assert checked.effective.rules_on[0] == "well"
    assert "nonfinite" in checked.effective.rules_on
    assert [(told.rule, told.actions) for told in checked.effective.rule_actions] == [
        ("well", ["stop"])
    ]


@pytest.mark.parametrize(
    ("entry", "code", "hint"),
    [
        ('{use: "rules/my.py:Mine"}', "missing_key", "name: my-rule"),
        ('{name: mine, use: "rules/my.py"}', "name", "rules/my.py:MyRule"),
        ('{name: mine, use: "rules/my"}', "name", "rules/my_rule.py:MyRule"),
        ('{name: nonfinite, use: "rules/my.py:Mine"}', "duplicate_rule", None),
        ('{name: ExplodingTensor, use: "rules/my.py:Mine"}', "invalid_value", None),
        ("{name: mine, use: my_rule}", "unknown_rule", None),
        ("{name: nonfinite, use: loss_spike}", "duplicate_rule", "give this one another name"),
    ],
)
def test_the_form_of_an_entry_is_checked_without_loading(
    entry: str, code: str, hint: str | None
) -> None:
    _, problems = check_config(f"version: 1\nrules:\n  - {entry}\n", "f", section_registry())

    assert [(problem.code, problem.line) for problem in problems] == [(code, 3)]
    if hint is not None:
        assert problems[0].hint == hint


def test_a_package_offers_rules_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = EntryPoint("high_loss", "support.rules.sick_rules:HighLoss", "tocsin.rules")

    def offered(group: str, name: str | None = None) -> EntryPoints:
        found = EntryPoints([offer]).select(group=group)
        return found if name is None else found.select(name=name)

    monkeypatch.setattr(loading, "entry_points", offered)
    monkeypatch.setattr("tocsin.stream_rules.engine.configured_rules.entry_points", offered)
    text = "version: 1\nrules: [{high_loss: []}, {name: twice, use: high_loss}]"
    config, problems = check_config(text, "f", section_registry())
    assert config is not None, problems

    loaded = load_specs(custom_entries(config.rules), folder=Path("/nowhere"))
    specs = rule_specs(config.rules, customs=loaded.specs)

    assert loaded.problems == []
    assert [(spec.name, spec.custom, spec.listed) for spec in specs[:2]] == [
        ("high_loss", True, True),
        ("twice", True, True),
    ]
    assert with_own_names(config).rules == config.rules
    with pytest.raises(RuleNotLoaded, match="no installed package offers a rule 'low_loss'"):
        load_rule("low_loss", Path())


def test_a_file_is_loaded_once_and_does_not_stand_in_for_other_modules(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text(FILE.read_text())
    before = sys.modules["queue"]

    first = load_rule("queue.py:HighLoss", tmp_path)

    assert load_rule("queue.py:HighLoss", tmp_path) is first
    assert sys.modules["queue"] is before


def test_parameters_that_are_infinite_or_no_number_reach_the_rules() -> None:
    params = {"limit": math.inf, "low": -math.inf, "start": math.nan}
    hello = Hello(
        entries=(RuleEntry(name="a", use="a.py:A", params=params),), folder="/", memory_bytes=1
    )
    (entry,) = Hello.model_validate_json(hello.model_dump_json()).entries
    assert repr(entry.params) == repr(params)
