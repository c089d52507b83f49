"""The section `policy`: which backends may end the jobs of which runs. None, unless it says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pydantic import Field, PrivateAttr

from tocsin.schemas.configuration.matches import Match
from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean
from tocsin.schemas.configuration.sections import Entry
from tocsin.schemas.configuration.values import Names


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
        """See `Entry`."""
        super().placed(loc, raw)
        self._listed = isinstance(raw, dict) and isinstance(raw.get("may_stop_on"), list)


def policy_problems(policy: Sequence[PolicyEntry], targets: Collection[str]) -> Iterator[Problem]:
    """Entries that name no target, or one that the section `targets` does not have."""
    for entry in policy:
        if not entry.may_stop_on:
            hint = "remove the entry: without one, no backend is asked"
            message = "expected the name of a target"
            yield Problem((*entry.loc, "may_stop_on"), message, "empty_policy", hint)
        for name, loc in entry.named():
            if name not in targets:
                hint = did_you_mean(name, targets) or "name it in the section 'targets'"
                yield Problem(loc, f"unknown target {name!r}", "unknown_target", hint)
