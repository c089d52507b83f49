"""Files of others that decide what runs: the configuration, and rules of one's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.somebody import give_away
from tocsin.console.configuration.check import as_text, check_file
from tocsin.console.services.launch import RunOptions, launch_options
from tocsin.schemas.configuration.file import load_config
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.custom.loading import load_specs

USES_CODE = "version: 1\nrules:\n  - {name: mine, use: rules/mine.py:Mine}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a rule that leaves a mark when it is run."""
    (tmp_path / "rules").mkdir(mode=0o700)
    (tmp_path / "rules" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return tmp_path


def ran(folder: Path) -> bool:
    return (folder / "ran").exists()


def open_to_others(path: Path, how: str) -> None:
    if how == "owner":
        give_away(path)
    else:
        path.chmod(0o777 if path.is_dir() else 0o666)


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_configuration_of_others_runs_no_code(folder: Path, how: str) -> None:
    config = folder / "tocsin.yaml"
    config.write_text(USES_CODE)
    open_to_others(config, how)

    with pytest.raises(ConfigProblems, match="and could make it run any code"):
        launch_options(["true"], RunOptions(config=config), {})
    checked = check_file(Path("tocsin.yaml"), {}, folder)

    assert [problem.code for problem in checked.problems] == ["rule_not_loaded"]
    assert not ran(folder)


@pytest.mark.parametrize("how", ["mode", "owner"])
@pytest.mark.parametrize("what", ["conf", "conf/b.yaml"])
def test_a_folder_to_which_others_can_add_a_file_runs_no_code(
    folder: Path, what: str, how: str
) -> None:
    (folder / "conf").mkdir(mode=0o700)
    (folder / "conf" / "a.yaml").write_text(USES_CODE)
    (folder / "conf" / "b.yaml").write_text("version: 1\n")
    (folder / "rules").rename(folder / "conf" / "rules")
    open_to_others(folder / what, how)

    checked = check_file(Path("conf"), {}, folder)
    with pytest.raises(ConfigProblems, match="and could make it run any code"):
        launch_options(["true"], RunOptions(config=folder / "conf"), {})

    assert [problem.code for problem in checked.problems] == ["rule_not_loaded"]
    assert f"others can write to {folder / what} " in checked.problems[0].message
    assert not ran(folder)


def test_a_configuration_of_others_is_warned_of(folder: Path) -> None:
    config = folder / "tocsin.yaml"
    config.write_text("version: 1\n")
    assert load_config(config, {}).shared is None
    open_to_others(config, "mode")

    env = {"XDG_CONFIG_HOME": str(folder), "TOCSIN_BUS": f"embedded:{folder / 'bus.db'}"}
    (warning,) = launch_options(["true"], RunOptions(config=config), env).warnings

    assert warning.startswith(f"others can write to {config} (mode 0666)")
    assert warning in as_text(check_file(Path("tocsin.yaml"), {}, folder))


@pytest.mark.parametrize("how", ["mode", "owner"])
@pytest.mark.parametrize("what", ["rules/mine.py", "rules", "rules/__pycache__"])
def test_a_rule_that_others_could_have_written_is_not_run(
    folder: Path, what: str, how: str
) -> None:
    (folder / "rules" / "__pycache__").mkdir()
    open_to_others(folder / what, how)

    entry = RuleEntry(name="mine", use="rules/mine.py:Mine")
    (problem,) = load_specs([entry], folder=folder).problems

    assert problem.message.startswith("rules/mine.py is not run: others can write to")
    assert not ran(folder)


def test_what_is_mounted_read_only_is_nobody_s_to_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = list(os.statvfs(folder))
    facts[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(facts))
    (folder / "rules").chmod(0o777)
    load_specs([RuleEntry(name="mine", use="rules/mine.py:Mine")], folder=folder)
    assert ran(folder)


def test_a_rule_of_one_s_own_is_run(folder: Path) -> None:
    load_specs([RuleEntry(name="mine", use="rules/mine.py:Mine")], folder=folder)
    assert ran(folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("receivers:\n  hook: {type: webhook, url: 'https://hooks.example.com'}\n", "receivers"),
        ("secrets:\n  hook: {file: /etc/shadow}\n", "secrets"),
        ("stop: {trusted_keys: [theirs.pub]}\n", "stop.trusted_keys"),
    ],
)
def test_what_another_user_leaves_in_a_folder_does_not_decide_who_is_told_or_obeyed(
    folder: Path, text: str, named: str
) -> None:
    config = folder / "tocsin.yaml"
    config.write_text(f"version: 1\n{text}")
    open_to_others(config, "owner")

    with pytest.raises(ConfigurationError, match=f"the file sets {named}: .* `--config"):
        load_config(None, {}, folder=folder)

    assert load_config(config, {}).shared
    assert load_config(None, {"TOCSIN_CONFIG": str(config)}, folder=folder).shared


def test_what_only_chooses_rules_is_warned_of(folder: Path) -> None:
    config = folder / "tocsin.yaml"
    config.write_text("version: 1\nrules:\n  - loss_spike: off\nsecrets: {hook: {env: HOOK}}\n")
    open_to_others(config, "owner")
    assert load_config(None, {}, folder=folder).shared
