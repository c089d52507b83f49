"""Several files in a folder are one configuration; each problem names its own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.actions.config import places
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.configuration import sources
from tocsin.schemas.configuration.file import (
    LoadedConfig,
    SectionRegistry,
    check_sources,
    load_config,
)
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.sources import Sources, config_files
from tocsin.schemas.errors import ConfigurationError

BASE = """\
version: 1
labels: {env: prod}
secrets:
  hook: {env: HOOK_KEY}
defaults: {rules: all}
receivers:
  ml-hook: {type: webhook, url: "https://hooks.example.com/ml", sign: {key: {secret: hook}}}
rules:
  - nonfinite: [stop, ml-hook]
"""
TEAM = """\
version: 1
# the team's own
labels: {team: vision}
receivers:
  vision-mail: {type: email, to: [vision@example.com]}
rules:
  - loss_spike: [vision-mail, ml-hook]
  - overtraining: off
"""


def folder_of(base: Path, **files: str) -> Path:
    conf = base / "conf"
    conf.mkdir()
    for name, text in files.items():
        (conf / f"{name}.yaml").write_text(text)
    return conf


def loaded(path: Path) -> LoadedConfig:
    return load_config(path, {}, registry=SectionRegistry(ReceiverKinds()))


def problems(**files: str) -> list[str]:
    texts = {f"{name}.yaml": text for name, text in files.items()}
    _, found = check_sources(Sources.from_texts(texts), SectionRegistry(ReceiverKinds()))
    return [f"{one.source}:{one.line}:{one.column}: {one.message}" for one in found]


def test_sections_are_put_together_and_lists_follow_the_names_of_the_files(tmp_path: Path) -> None:
    conf = folder_of(tmp_path, **{"20-team": TEAM, "10-base": BASE})

    config = loaded(conf).config

    assert loaded(conf).folder == conf
    assert dict(config.labels) == {"env": "prod", "team": "vision"}
    assert list(config.receivers) == ["ml-hook", "vision-mail"]
    assert [rule.name for rule in config.rules] == ["nonfinite", "loss_spike", "overtraining"]
    assert load_config(None, {"TOCSIN_CONFIG": "conf"}, folder=tmp_path).config.labels["env"]


def test_a_decision_names_the_line_of_the_file_that_made_it(tmp_path: Path) -> None:
    conf = folder_of(tmp_path, **{"10-base": BASE, "20-team": TEAM})
    rules = loaded(conf).config.rules

    place = places(conf)

    assert [place(action.loc) for rule in rules for action in rule.actions or ()] == [
        "conf/10-base.yaml:9:17",
        "conf/10-base.yaml:9:23",
        "conf/20-team.yaml:7:18",
        "conf/20-team.yaml:7:31",
    ]


def test_what_two_files_name_alike_is_said_with_both_places() -> None:
    other = (
        "version: 1\nlabels: {env: test}\nreceivers:\n"
        '  ml-hook: {type: webhook, url: "https://hooks.example.com/s3cret"}\n'
        "rules:\n  - nonfinite: off\ndefaults: {rules: none}\n"
    )

    assert problems(base=BASE, other=other) == [
        "other.yaml:2:10: 'labels.env' is already set in base.yaml:2:10",
        "other.yaml:4:3: 'receivers.ml-hook' is already set in base.yaml:7:3",
        "other.yaml:6:5: the rule 'nonfinite' is already listed in base.yaml:9:5",
        "other.yaml:7:12: 'defaults.rules' is already set in base.yaml:5:12",
    ]


def test_a_section_without_names_stands_in_one_file() -> None:
    assert problems(a="version: 1\nbus: embedded:a.db\n", b="version: 1\nbus: {prefix: p}\n") == [
        "b.yaml:2:1: 'bus' is already set in a.yaml:2:1"
    ]
    assert problems(a="version: 1\n", b="version: 2\n") == [
        "b.yaml:1:1: 'version' is already set in a.yaml:1:1"
    ]
    assert problems(a="version: 1\nrules:\n", b=TEAM.replace(", ml-hook", "")) == []


def test_problems_of_all_files_are_said_at_once_each_in_its_own() -> None:
    assert problems(
        a="version: 1\nrules:\n  - loss_spike: [nobody]\n",
        b="rules:\n  - nonfinite: [stop, 3]\nx: 1\n",
        c="# nothing\n",
        d="- 1\n",
    ) == [
        "a.yaml:3:18: unknown receiver 'nobody'",
        "b.yaml:1:1: the key 'version' is missing",
        "b.yaml:2:23: expected an action: stop, a receiver's name, or a mapping like "
        "{stop: {grace: 30s}}, got a number",
        "b.yaml:3:1: unknown section 'x'",
        "d.yaml:1:1: expected a mapping: each file of a folder is a configuration",
    ]
    assert problems(a="version: 1\n", b="version: 1\nlabels: {a: b\n") == [
        "b.yaml:3:1: not valid YAML: did not find expected ',' or '}' while parsing a flow mapping"
    ]


def test_the_line_is_shown_of_the_right_file_and_never_one_with_a_receiver(tmp_path: Path) -> None:
    hook = '  ml-hook: {type: webhook, url: "https://hooks.example.com/s3cret", x: 1}\n'
    conf = folder_of(
        tmp_path, a="version: 1\nlabels: {a: 1}\n", b=f"version: 1\nreceivers:\n{hook}"
    )

    with pytest.raises(ConfigProblems) as caught:
        loaded(conf)

    shown = str(caught.value)
    assert f"{conf}/a.yaml:2:13: expected text" in shown
    assert "     2 | labels: {a: 1}" in shown
    assert f"{conf}/b.yaml:3:69: unknown key 'x'" in shown
    assert "s3cret" not in shown


def test_hidden_files_tests_and_others_are_no_part_of_it(tmp_path: Path) -> None:
    conf = folder_of(tmp_path, a=BASE, a_test="tests: []\n", **{".swap": "nonsense: ["})
    (conf / "notes.txt").write_text("x")
    # As Kubernetes mounts a ConfigMap.
    data = conf / "..data"
    data.mkdir()
    (data / "b.yaml").write_text(TEAM)
    (conf / "b.yaml").symlink_to("..data/b.yaml")

    assert [file.name for file in config_files(conf)] == ["a.yaml", "b.yaml"]
    assert len(loaded(conf).config.rules) == 3


def test_an_empty_folder_and_one_that_is_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = folder_of(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no configuration in the folder .*conf"):
        loaded(conf)
    (conf / "a.yaml").write_text(BASE)
    (conf / "b.yaml").write_text("version: 1\n")
    monkeypatch.setattr(sources, "MAX_BYTES", len(BASE) + 5)
    with pytest.raises(ConfigurationError, match=f"over the limit of {len(BASE) + 5} characters"):
        loaded(conf)
    monkeypatch.setattr(sources, "MAX_FILES", 1)
    with pytest.raises(ConfigurationError, match=r"2 files in the folder .* over the limit of 1"):
        loaded(conf)
