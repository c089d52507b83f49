"""What a command is told, put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.console.context import read_context, read_viewing_context
from tocsin.schemas.configuration.problems import ConfigProblems
from tocsin.schemas.configuration.settings import SecretUnavailable


def test_the_aliases_of_rules_are_read_as_the_rules_own_names(tmp_path: Path) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text(
        "version: 1\n"
        "rules:\n"
        "  - ExplodingTensor: [stop]\n"
        "  - {name: slow, use: LossNotDecreasing, actions: []}\n"
    )
    context = read_context(file, None, environ={})
    assert [(rule.name, rule.use) for rule in context.config.rules] == [
        ("nonfinite", "nonfinite"),
        ("slow", "loss_not_decreasing"),
    ]


def test_the_flag_beats_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text("version: 1\nbus: embedded:file.db\n")
    urls = [
        read_context(file, flag, environ=environ).settings.bus.url
        for flag, environ in (
            (None, {}),
            (None, {"TOCSIN_BUS": "embedded:environment.db"}),
            ("embedded:flag.db", {"TOCSIN_BUS": "embedded:environment.db"}),
        )
    ]
    assert urls == ["embedded:file.db", "embedded:environment.db", "embedded:flag.db"]


def test_a_file_with_problems_keeps_nobody_from_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text("version: 1\nreceivrs: {}\n")
    monkeypatch.chdir(tmp_path)
    for variable in ("TOCSIN_CONFIG", "TOCSIN_BUS"):
        monkeypatch.delenv(variable, raising=False)

    context = read_viewing_context(None, "embedded:other.db")

    assert context.settings.bus.url == "embedded:other.db"
    assert capsys.readouterr().err == (
        "tocsin: the configuration here has 1 problem (`tocsin check`); reading "
        "embedded:other.db, --bus names another\n"
    )
    # Whoever names the file means it.
    with pytest.raises(ConfigProblems, match="unknown section"):
        read_viewing_context(file, None)
    monkeypatch.setenv("TOCSIN_CONFIG", str(file))
    with pytest.raises(ConfigProblems):
        read_viewing_context(None, None)


def test_who_does_not_deliver_needs_no_secret_of_a_receiver(tmp_path: Path) -> None:
    (tmp_path / "tocsin.yaml").write_text(
        "version: 1\nsecrets: {hook: {env: TEST_HOOK}, pass: {env: TEST_PASS}}\n"
        "receivers: {hook: {type: chat, url: {secret: hook}}}\n"
        "bus: {url: 'kafka://k:9092', sasl: {mechanism: SCRAM-SHA-512, username: u, "
        "password: {secret: pass}}}\n"
    )
    context = read_context(
        tmp_path / "tocsin.yaml", "embedded:bus.db", environ={"TEST_PASS": "word"}
    )
    assert context.secrets["pass"].get_secret_value() == "word"
    with pytest.raises(SecretUnavailable, match="secret 'hook': variable TEST_HOOK is not set"):
        context.secrets.get("hook")
    with pytest.raises(SecretUnavailable, match="TEST_HOOK is not set"):
        context.all_secrets()
