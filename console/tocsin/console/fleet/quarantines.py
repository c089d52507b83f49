"""`tocsin bus quarantine`: the rules that failed and are off for a run; letting one try again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from tocsin.bus.port import Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.console.publication import person_record, publish
from tocsin.console.views.bus_view import read_view
from tocsin.console.views.selection import choose_run
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line, time_text
from tocsin.schemas.topics import Topics, telemetry_partition

_FAILED = "rule_failed"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A rule that is off for a run. `since_ms` is None where its issue is no longer on the bus."""

    run_id: str
    incarnation: str
    rule: str
    state: str
    why: str = ""
    since_ms: int | None = None


def quarantines(view: RunsView) -> list[Quarantine]:
    """The rules with the status `error`, newest run first, with what their issue says. Pure."""
    issues = {
        (issue.run_id, issue.incarnation, issue.subject.name): issue
        for issue in view.issues
        if issue.use == _FAILED
    }
    found: list[Quarantine] = []
    for run in view.runs:
        for rule in sorted(name for name, status in run.rules.items() if status == "error"):
            issue = issues.get((run.run_id, run.incarnation, rule))
            facts = () if issue is None else issue.evidence.facts
            why = next((fact.value for fact in facts if fact.name == "error"), "")
            found.append(
                Quarantine(
                    run.run_id,
                    run.incarnation,
                    rule,
                    run.state,
                    str(why),
                    None if issue is None else issue.onset_ms,
                )
            )
    return found


async def list_quarantines(context: CommandContext, from_ms: int | None = None) -> list[Quarantine]:
    """The quarantined rules of all runs on the bus; those alone that are known to be so since
    `from_ms` (Unix milliseconds) or later, if that is given. Raises BusError.
    """
    async with context.open_bus(create=False) as bus:
        found = quarantines(await read_view(bus, context.topics))
    if from_ms is None:
        return found
    return [one for one in found if one.since_ms is not None and one.since_ms >= from_ms]


async def release(
    context: CommandContext, run: str, rule: str, *, by: str, why: str, now_ms: int
) -> RuleReleased:
    """Have a rule tried again in a run; returns once the record is on the bus.

    Raises:
        ConfigurationError: there is no such run, it is over, or the rule is not quarantined in it.
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        view = await read_view(bus, context.topics)
        chosen = choose_run(view.runs, run)
        held = [one for one in quarantines(view) if one.run_id == chosen.run_id]
        if rule not in {one.rule for one in held}:
            names = ", ".join(one.rule for one in held) or "none"
            raise ConfigurationError(
                f"rule '{plain_line(rule)}' is not quarantined in run "
                f"'{plain_line(chosen.run_id)}'; quarantined there: {names}"
            )
        if chosen.state == "ended":
            raise ConfigurationError(
                f"run '{plain_line(chosen.run_id)}' has ended: a rule cannot be tried again in it. "
                "The next start of the run tries it anyway"
            )
        data = RuleReleased(
            release_id=new_id(),
            run_id=chosen.run_id,
            incarnation=chosen.incarnation,
            rule=rule,
            by=by,
            at_ms=now_ms,
            why=why,
        )
        await publish(bus, [release_record(context.topics, data)])
    return data


def release_record(topics: Topics, data: RuleReleased) -> Outgoing:
    """The record for the telemetry of the run."""
    partition = Partition(topics.telemetry, telemetry_partition(data.run_id))
    return person_record(data, partition, record_id=data.release_id, about=f"rules/{data.rule}")


def as_json(found: Sequence[Quarantine]) -> str:
    """For programs."""
    facts = {"version": 1, "quarantines": [asdict(one) for one in found]}
    return json.dumps(facts, indent=2, ensure_ascii=False)


def as_table(found: Sequence[Quarantine]) -> Table:
    """For people."""
    table = Table(box=None)
    for name in ("run", "state", "rule", "since", "error"):
        table.add_column(name, overflow="fold")
    for one in found:
        since = "" if one.since_ms is None else time_text(one.since_ms)
        cells = (one.run_id, one.state, one.rule, since, one.why)
        table.add_row(*(Text(plain_line(cell)) for cell in cells))
    return table
