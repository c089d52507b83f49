"""`tocsin stops report`: which runs were stopped, and which would have been. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from tocsin.actions.decision.planned import STOP
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.runs import RunView
from tocsin.schemas.records.runs_view import RunsView
from tocsin.schemas.text import plain_line

_HOUR_MS: Final = 3_600_000

METHOD: Final = (
    "rank-hours: from the decision to the end of the run (or to what was last heard of it), times "
    "its ranks; an estimate of what a stop at once would have saved"
)


@dataclass(slots=True)
class RuleStops:
    """The stops that one rule decided; of each training the first counts.

    Attributes:
        stopped: trainings that it stopped.
        shadow: those that it would have stopped in another mode.
        not_sent: those that a limit, the switch, a silence or people kept from being stopped.
        confirmed: issues of these that people acknowledged or resolved: they were real.
        false_alarms: those that people called false alarms.
        rank_hours: for how long the trainings of `shadow` and `not_sent` continued, times ranks.
    """

    rule: str
    stopped: int = 0
    shadow: int = 0
    not_sent: int = 0
    confirmed: int = 0
    false_alarms: int = 0
    rank_hours: float = 0.0


def stops_of_rules(view: RunsView) -> Sequence[RuleStops]:
    """Of each rule that decided to stop a run, by name."""
    rules: dict[str, RuleStops] = {}
    seen: set[tuple[str, str, str]] = set()
    for stop in view.deliveries:
        training = (stop.rule, stop.run_id, stop.incarnation)
        counts = stop.state == "delivered" or stop.held is not None
        if stop.kind != STOP or not counts or training in seen:
            continue
        seen.add(training)
        rule = rules.setdefault(stop.rule, RuleStops(stop.rule))
        if stop.state == "delivered":
            rule.stopped += 1
        else:
            rule.shadow += stop.held == "shadow"
            rule.not_sent += stop.held != "shadow"
            rule.rank_hours += _rank_hours(stop, view)
        if given := view.feedback(stop.issue_id):
            wrong = given[-1].verdict == "false alarm"
            rule.false_alarms += wrong
            rule.confirmed += not wrong
    return sorted(rules.values(), key=lambda one: one.rule)


def report_table(rules: Sequence[RuleStops]) -> Table:
    """A row for each rule."""
    table = Table(box=None)
    table.add_column("rule")
    for name in ("stopped", "shadow", "not sent", "confirmed", "false alarms", "rank-hours"):
        table.add_column(name, justify="right")
    for one in rules:
        counts = (one.stopped, one.shadow, one.not_sent, one.confirmed, one.false_alarms)
        hours = f"{one.rank_hours:,.1f}"
        table.add_row(Text(plain_line(one.rule)), *map(str, counts), hours)
    return table


def report_json(rules: Sequence[RuleStops]) -> str:
    """The report for programs: one object with `version`, `rules` and `method`."""
    found = [asdict(one) for one in rules]
    return json.dumps({"version": 1, "rules": found, "method": METHOD}, indent=2)


def _rank_hours(stop: Delivery, view: RunsView) -> float:
    run = view.seen.get(stop.run_id)
    training = None if run is None else run.views.get(stop.incarnation)
    if run is None or training is None:
        return 0.0
    newest = training is run.view
    until_ms = training.ended_ms or _last_heard_ms(training) or (run.view_ms if newest else 0)
    return max(0, until_ms - stop.created_ms) / _HOUR_MS * max(1, len(training.ranks))


def _last_heard_ms(training: RunView) -> int:
    return max((rank.last_heard_ms for rank in training.ranks), default=0)
