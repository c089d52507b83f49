"""The files that `tocsin test` reads: issues in virtual time, and what must come of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from tocsin.schemas.configuration.problems import ConfigProblems, Loc, Problem, did_you_mean
from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.sources import DEFAULT_FILE, Sources, read_config
from tocsin.schemas.configuration.validation import parse_model
from tocsin.schemas.configuration.values import Duration, FilePath, Moment
from tocsin.schemas.records.issues import IssueState, Severity

ANY: Final = "any"
"""In the place of a receiver or a run: all of them."""

START: Final = datetime(2026, 1, 5, 12, tzinfo=UTC)
"""The start of a test that names none: a Monday at noon."""


class RunUnderTest(Section):
    """A run that issues are about."""

    name: str = Field(min_length=1, max_length=200)
    """Its id."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Its labels, over those of the configuration."""


class ScenarioIssue(Section):
    """A state of an issue, and when the rules report it."""

    at: Duration
    """When, since the start."""
    rule: str
    """The rule that reports it."""
    run: str
    """One of `runs`."""
    state: IssueState = "firing"
    """Its state."""
    severity: Severity | None = None
    """Its severity; absent: the rule's."""
    raised_from: Severity | None = None
    """The severity until now, for an ongoing issue that got worse."""
    subject: str = Field(default="loss", min_length=1, max_length=512)
    """What it is about; a rule has one issue for each subject."""
    reason: str = Field(default="a test issue", max_length=1000)
    """What happened, in one sentence."""
    step: int | None = Field(default=None, ge=0)
    """Where it started."""
    cause: str | None = None
    """The rule whose issue in the same run is its cause; it must have been reported before."""


class Match(Section):
    """Notices or stops."""

    notify: str | None = None
    """Notices to this receiver; `any`: to any."""
    stop: str | None = None
    """Stops of this run; `any`: of any."""
    rule: str | None = None
    """Only those about this rule."""
    run: str | None = None
    """Only those about this run."""
    state: IssueState | None = None
    """Only those about this state of the issue."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.notify is None) == (self.stop is None):
            raise ValueError("expected exactly one of 'notify' and 'stop'")
        return self


class Expectation(Match):
    """Notices or stops that must be sent."""

    by: Duration
    """Until when, since the start."""
    count: int | None = Field(default=None, ge=0)
    """How many; absent: at least one."""
    text_has: tuple[str, ...] = Field(default=(), strict=False)
    """Words that the text of each one must contain."""


class Scenario(Section):
    """One test."""

    name: str = Field(min_length=1)
    """What it is about."""
    start: Moment = START
    """When it starts, for time windows and silences; absent: Monday, 2026-01-05T12:00:00Z."""
    until: Duration = timedelta(hours=1)
    """How long it goes on after its last issue."""
    runs: tuple[RunUnderTest, ...] = Field(default=(), strict=False)
    """The runs."""
    feed: tuple[ScenarioIssue, ...] = Field(default=(), strict=False)
    """The issues."""
    expect: tuple[Expectation, ...] = Field(default=(), strict=False)
    """What must be sent."""
    never: tuple[Match, ...] = Field(default=(), strict=False)
    """What must not be sent."""
    replay: FilePath | None = None
    """Instead of `feed`: a file of issues, one event in JSON on each line."""
    golden: FilePath | None = None
    """With `replay`: a file of what is expected; `tocsin test --update` writes it."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.replay is None) != (self.golden is None):
            raise ValueError("expected 'replay' and 'golden' together")
        if self.replay is None and not self.feed:
            raise ValueError("expected 'feed' or 'replay'")
        if self.replay is not None and (self.feed or self.expect or self.never):
            raise ValueError("expected 'replay' without 'feed', 'expect' and 'never'")
        return self


class ScenarioFile(Section):
    """A file of tests."""

    config: FilePath = Path(DEFAULT_FILE)
    """The configuration, or a folder of it; relative paths start at the folder of this file."""
    tests: tuple[Scenario, ...] = Field(strict=False, min_length=1)
    """The tests."""


@dataclass(frozen=True, slots=True)
class Scenarios:
    """A file of tests that was read."""

    path: Path
    file: ScenarioFile
    sources: Sources

    def locate(self, path: Path) -> Path:
        """A path of the file as it is meant."""
        return self.path.parent / path

    def place(self, loc: Loc) -> str:
        """`tocsin_test.yaml:12:7` for a part of the file."""
        return str(self.sources.place(loc))


def read_scenarios(path: Path) -> Scenarios:
    """Read and check a file of tests.

    Raises:
        ConfigProblems: it has problems; all are in the error.
        ConfigurationError: it cannot be read.
    """
    texts = {str(path): read_config(path)}
    sources = Sources.from_texts(texts)
    problems: list[Problem] = []
    file = parse_model(ScenarioFile, sources.data, (), problems) if not sources.problems else None
    if file is not None:
        problems += _unknown_runs(file)
    placed = [*sources.problems, *map(sources.placed, problems)]
    if file is None or placed:
        raise ConfigProblems(sorted(placed, key=sources.order), texts)
    return Scenarios(path, file, sources)


def _unknown_runs(file: ScenarioFile) -> Iterator[Problem]:
    for number, test in enumerate(file.tests):
        runs = {run.name for run in test.runs}
        named: list[tuple[str | None, Loc]] = [
            (fed.run, ("feed", index, "run")) for index, fed in enumerate(test.feed)
        ]
        for part, matches in (("expect", test.expect), ("never", test.never)):
            for index, match in enumerate(matches):
                named.append((match.run, (part, index, "run")))
                named.append((None if match.stop == ANY else match.stop, (part, index, "stop")))
        for run, loc in named:
            if run is not None and run not in runs:
                hint = did_you_mean(run, runs, list_up_to=0) or "list it under 'runs'"
                yield Problem(("tests", number, *loc), f"unknown run {run!r}", "unknown_run", hint)
