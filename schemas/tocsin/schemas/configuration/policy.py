"""The sections `policy` and `limits`: which backends may end the jobs of which runs, none unless
listed; and how much may be stopped, so that one wrong rule cannot stop a fleet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from pydantic import Field, PrivateAttr

from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean
from tocsin.schemas.configuration.routing.matches import Match
from tocsin.schemas.configuration.sections import Entry, Section
from tocsin.schemas.configuration.values import Duration, Names, Percent


class StopLimits(Section):
    """How much `tocsin actions` may stop. It counts the stops of all rules, on all runs of the bus.

    A run on an embedded bus, which only its own rules stop, has no limits.
    """

    per_hour: int | None = Field(default=None, ge=1, examples=[3])
    """Stops within an hour."""
    per_team_per_hour: int | None = Field(default=None, ge=1, examples=[2])
    """Stops within an hour of runs with the same label `team`."""
    max_fraction_of_running: Percent | None = Field(default=None, examples=["10%"])
    """Stops within an hour, as a share of the runs that are running. One is always permitted."""
    min_job_age: Duration | None = Field(default=None, examples=["5m"])
    """How long a run must have been running."""
    on_exceed: Literal["notify_only", "ask"] = Field(default="notify_only", examples=["ask"])
    """Beyond a limit: `notify_only` sends no stop; `ask` sends it when people approve."""

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        limits = (self.per_hour, self.per_team_per_hour, self.max_fraction_of_running)
        return any(limit is not None for limit in (*limits, self.min_job_age))


class LimitsConfig(Section):
    """Limits of what tocsin does by itself."""

    stops: StopLimits = StopLimits()
    """How much may be stopped."""


class PolicyEntry(Entry):
    """Backends that may be asked to end the jobs of these runs, where the launcher has not.

    A run that no entry matches is stopped by its own launcher only.
    """

    MATCHES = ("match",)

    match: Match = Field(examples=[{"team": "vision"}])
    """Labels that the run must have: each with a pattern (`*`, `?`) or a list of patterns; `run` is
    its id. `{}`: every run."""
    may_stop_on: Names = Field(examples=[["slurm-a100"]])
    """Names of targets."""

    _listed: bool = PrivateAttr(default=True)

    def named(self) -> Iterator[tuple[str, Loc]]:
        """All targets that it names, each with its place in the file."""
        for index, name in enumerate(self.may_stop_on):
            inner = (index,) if self._listed else ()
            yield name, (*self.loc, "may_stop_on", *inner)

    def placed(self, loc: Loc, raw: object) -> None:
        """Note where it stands in the document, and how it was written there."""
        super().placed(loc, raw)
        self._listed = isinstance(raw, dict) and isinstance(raw.get("may_stop_on"), list)


def policy_problems(policy: Sequence[PolicyEntry], targets: Collection[str]) -> Iterator[Problem]:
    """Entries that name no target, or one that the section `targets` does not have."""
    for entry in policy:
        if not entry.may_stop_on:
            hint = "remove the entry: without one, no backend is used"
            message = "expected the name of a target"
            yield Problem((*entry.loc, "may_stop_on"), message, "empty_policy", hint)
        for name, loc in entry.named():
            if name not in targets:
                hint = did_you_mean(name, targets) or "name it in the section 'targets'"
                yield Problem(loc, f"unknown target {name!r}", "unknown_target", hint)
