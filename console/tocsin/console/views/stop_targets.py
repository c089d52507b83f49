"""Stop targets as `status --json` and `drill` show them: which would be asked, by which line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tocsin.actions.config import places
from tocsin.actions.decision.stop_policy import StopPolicy
from tocsin.actions.receivers.address_guard import AddressGuard, parse_networks
from tocsin.actions.targets.build import Targets, stop_policy
from tocsin.actions.targets.kind import TargetContext
from tocsin.actions.targets.registry import TargetKinds
from tocsin.console.context import CommandContext
from tocsin.schemas.configuration.routing.matches import Match
from tocsin.schemas.errors import ConfigurationError, MissingExtra
from tocsin.schemas.records.run_view import RunView


@dataclass(frozen=True, slots=True)
class TargetSeen:
    """One target of the configuration.

    Attributes:
        problem: why it could not be asked; empty if it could.
        policy: the lines that permit it, each with the labels of the runs.
    """

    name: str
    type: str
    problem: str
    policy: Sequence[str]


def policy_of(context: CommandContext) -> StopPolicy:
    """Which target may end which job, by this configuration."""
    return stop_policy(context.config, TargetKinds(), places(context.loaded.path))


def stop_target(run: RunView, policy: StopPolicy) -> dict[str, object]:
    """Which target would be asked to end the job of a run, if its launcher did not, and why."""
    if run.scheduler is None:
        return {"target": None, "why": "the run has recorded no job of a known scheduler"}
    permit = policy.permit(run, run.scheduler)
    return {"target": permit.target, "why": permit.why}


async def targets_seen(context: CommandContext, allow_cidr: Sequence[str] = ()) -> list[TargetSeen]:
    """All targets of the configuration, each opened and closed; no backend is asked."""
    place = places(context.loaded.path)
    opener = TargetContext(
        secrets=context.secrets,
        guard=AddressGuard(private=context.embedded, allow=parse_networks(allow_cidr)),
        folder=context.loaded.folder,
        environ=os.environ,
    )
    found = []
    for name, config in context.config.targets.items():
        problem, targets = "", Targets(opener, TargetKinds())
        try:
            targets.open({name: config})
        except (ConfigurationError, MissingExtra) as error:
            problem = str(error)
        finally:
            await targets.close()
        lines = [
            f"{_runs(entry.match)} ({place(loc)})"
            for entry in context.config.policy
            for named, loc in entry.named()
            if named == name
        ]
        found.append(TargetSeen(name, config.type, problem, lines))
    return found


def target_lines(seen: Sequence[TargetSeen]) -> list[str]:
    """For people: a line for each target."""
    lines = []
    for one in seen:
        may = "; ".join(one.policy) or "no entry of the policy names it"
        ready = one.problem or f"can be asked, for {may}"
        lines.append(f"target {one.name}  {one.type}  {ready}")
    return lines


def target_facts(seen: Sequence[TargetSeen]) -> list[dict[str, object]]:
    """For programs."""
    return [asdict(one) for one in seen]


def _runs(match: Match) -> str:
    if not match:
        return "every run"
    labels = ", ".join(f"{key}={'|'.join(some)}" for key, some in match.items())
    return f"runs with {labels}"
