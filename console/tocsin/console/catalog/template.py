"""`tocsin catalog new NAME`: a rule of your own to begin with, and a test that passes."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Final

from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import built_in

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

_RULE: Final = '''\
"""`{name}`: the loss is above a limit for several steps in a row.

A rule to begin with: change what it reads, what it remembers and when it finds something.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, RuleMeta, scalar
from tocsin.stream_rules.rule_bases import SeriesRule, SeriesState
from tocsin.stream_rules.signals.streaks import Streak


class {cls}Params(Params):
    """What the configuration may set under `params`."""

    limit: float = 10.0
    """A loss above it is high."""
    steps: int = Field(default=5, ge=1)
    """How many steps in a row it must be high. Unit: steps."""


@dataclass(slots=True)
class {cls}State(SeriesState):
    """All that the rule remembers: it is saved, and read back after a crash."""

    high: Streak = field(default_factory=Streak)


class {cls}(SeriesRule[{cls}Params, {cls}State]):
    """The loss is above `limit` for `steps` steps in a row."""

    meta = RuleMeta(
        name="{name}",
        version=1,
        family="progress",
        meaning="The loss is above a limit for several steps in a row.",
        severity="warning",
        inputs=(scalar("loss"),),
        remedy="Lower the learning rate, or raise the limit.",
        params={cls}Params,
        capture_hint="The loss is captured by itself in PyTorch; else `run.log({{'loss': loss}})`.",
        does_not_see="A loss that is high from time to time only.",
        resolve_after_steps=20,
    )
    state_type = {cls}State
    column = "loss"

    def on_value(self, step: int, value: float, at: Moment) -> Outcomes:
        """Called with the finite loss of each step; no clock, no chance, no files here."""
        high, params = self.state.high, self.params
        if not high.update(step, at.now_ms, holds=value > params.limit):
            yield Clear(step)
        elif high.length >= params.steps:
            yield Finding(
                subject=Subject(kind="loss", name="loss"),
                reason=f"the loss is {{value:.4g}} at step {{step}}, and has been above "
                f"{{params.limit:g}} for {{high.length}} steps",
                first_step=high.first_step,
                facts=[fact("loss", value, limit=params.limit)],
                series=self.state.rank_series.series("loss", limit=params.limit),
            )
'''

_TEST: Final = '''\
"""Tests of `{name}`. Run them with `python -m pytest`."""

from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, only

from {name} import {cls}


def test_a_high_loss_is_found_with_the_step_that_began_it() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(50), loss=1.0)
    run.steps(range(50, 60), loss=12.0)

    issue = assert_fires(run.records, "{name}", first_step=50, specs=only({cls}))

    assert issue.step == 54
    assert issue.severity == "warning"


def test_a_spike_is_not() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(50), loss=1.0)
    run.steps(range(50, 54), loss=12.0)
    run.steps(range(54, 100), loss=1.0)
    run.ended()

    assert_quiet(run.records, specs=only({cls}))


def test_the_limit_can_be_set() -> None:
    run = RunBuilder()
    run.started()
    run.steps(range(10), loss=3.0)

    assert_quiet(run.records, specs=only({cls}))
    assert_fires(run.records, "{name}", first_step=0, specs=only({cls}, limit=2.0))
'''


def write_template(folder: Path, name: str) -> list[Path]:
    """Write `NAME.py` and `test_NAME.py` into a folder, which is made if it is not there.

    Raises:
        ConfigurationError: the name cannot be a rule's, or a file already exists or cannot be
            written; nothing was overwritten.
    """
    if not _NAME.fullmatch(name) or len(name) > 64 or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name of a rule: expected snake_case, like my_rule"
        )
    if name in built_in():
        raise ConfigurationError(f"{name!r} is a rule of tocsin's own: choose another name")
    words = {"name": name, "cls": class_name(name)}
    files = {
        folder / f"{name}.py": _RULE.format(**words),
        folder / f"test_{name}.py": _TEST.format(**words),
    }
    for path in files:
        if path.exists():
            raise ConfigurationError(f"{path} already exists: choose another name or folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigurationError(f"cannot write into {folder}: {error.strerror}") from error
    return list(files)


def class_name(name: str) -> str:
    """The class of the rule of that name: `my_rule` → `MyRule`."""
    return "".join(word.capitalize() for word in name.split("_"))


def config_entry(path: Path, name: str) -> str:
    """The line of a `tocsin.yaml` beside which `path` lies that switches the rule on."""
    return f"- {{name: {name}, use: {path}:{class_name(name)}}}"
