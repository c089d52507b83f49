"""What `start(capture=…)` says is laid over the file's section, or the launcher's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tocsin.emitter import start
from tocsin.emitter.integrations.callbacks import Framework, Options
from tocsin.emitter.plan.collections import NEVER, Schedule
from tocsin.emitter.plan.settings import CaptureSettings, lay_over
from tocsin.emitter.run import Run
from tocsin.emitter.training.context import current
from tocsin.emitter.training.session import Session
from tocsin.schemas.errors import ConfigurationError

FILE = """\
version: 1
capture:
  budget: 2%
  collections: {gradients: {every: 7, columns: [l2]}, weights: {every: 7}}
"""
LAUNCHED = '{"budget": "2%", "collections": {"gradients": {"every": 7}, "weights": {"every": 7}}}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOCSIN_BUS", f"embedded:{tmp_path}/bus.db")
    monkeypatch.setattr(current, "session", None)
    for name in ("TOCSIN_RUN_ID", "TOCSIN_LAUNCHER", "TOCSIN_CAPTURE", "TOCSIN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@contextmanager
def settings_of(capture: Mapping[str, object]) -> Iterator[tuple[Run, CaptureSettings]]:
    with start(services=False, capture=capture) as run:
        assert current.session is not None
        yield run, current.session.start().settings


def test_what_code_says_is_laid_over_the_file(folder: Path) -> None:
    (folder / "tocsin.yaml").write_text(FILE)
    over = {"budget": "0.5%", "collections": {"gradients": {"every": 2}, "inputs": {}}}

    with settings_of(over) as (_, settings):
        assert settings.budget == 0.005
        assert settings.plans["gradients"].schedule() == Schedule(2)
        assert settings.plans["gradients"].columns is None
        assert settings.plans["weights"].schedule() == Schedule(7)
        assert settings.plans["inputs"].schedule() == Schedule()


def test_under_a_launcher_it_is_laid_over_what_that_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOCSIN_RUN_ID", "r1")
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(folder / "launcher"))
    monkeypatch.setenv("TOCSIN_CAPTURE", LAUNCHED)

    with settings_of({"collections": {"weights": "off"}}) as (run, settings):
        assert settings.budget == 0.02
        assert settings.plans["gradients"].schedule() == Schedule(7)
        assert settings.plans["weights"].schedules == NEVER
        assert start(capture={"budget": "1%"}) is run
    with pytest.raises(ConfigurationError, match="the launcher samples this node"):
        start(capture={"system": {"interval": "1s"}})


def test_what_a_training_captures_does_not_change_while_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOCSIN_RUN_ID", "r1")
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(folder / "launcher"))
    current.session = Session(os.environ, current.isolation)
    current.session.start()

    with settings_of({"budget": "1%"}) as (_, settings):
        assert settings == CaptureSettings()
    assert "training is already running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        ({"collections": {"gradients": {"every": 0}}}, "capture.collections.gradients.every: exp"),
        ({"budget": 0.5}, "start: capture.budget: expected a percentage"),
        (["gradients"], "start: capture: expected a mapping, found list"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(
    folder: Path, capture: Mapping[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        start(services=False, capture=capture)
    assert current.session is None
    assert not list(folder.iterdir())


def test_the_callback_of_a_framework_says_it_too(folder: Path) -> None:
    options = Options(
        run_id="r1", labels=None, config=None, services=False, capture={"budget": "3%"}
    )
    with Framework("any", options).run:
        assert current.session is not None
        assert current.session.start().settings.budget == 0.03


def test_keys_are_laid_over_one_by_one() -> None:
    assert lay_over("x", "") == "x"
    assert lay_over("", '{"budget": "1%"}') == '{"budget": "1%", "collections": {}}'
    with pytest.raises(ValueError, match="capture: expected a mapping"):
        lay_over("[]", "{}")
