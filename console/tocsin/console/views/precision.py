"""`tocsin issues --precision`: how often each rule was right, by what people answered. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from tocsin.console.views.issues import IssueFilter
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line


@dataclass(slots=True)
class RulePrecision:
    """What people answered to the issues of one rule; each issue counts once, by the last answer.

    Attributes:
        fired: issues, answered or not.
        confirmed: those that were acknowledged or resolved by a person: they were real.
    """

    rule: str
    fired: int = 0
    confirmed: int = 0
    false_alarms: int = 0

    @property
    def precision(self) -> float | None:
        """The real ones among those that people answered; None if they answered none."""
        judged = self.confirmed + self.false_alarms
        return self.confirmed / judged if judged else None


def precision_of_rules(view: RunsView, wanted: IssueFilter) -> Sequence[RulePrecision]:
    """Of each rule that has an issue which is wanted; the least precise first, by name."""
    rules: dict[str, RulePrecision] = {}
    for issue in view.issues:
        if not wanted.wants(issue, view):
            continue
        rule = rules.setdefault(issue.rule, RulePrecision(issue.rule))
        rule.fired += 1
        # An issue that has fired again since is still the one that was judged.
        if given := view.feedback(issue.issue_id):
            if given[-1].verdict == "false alarm":
                rule.false_alarms += 1
            else:
                rule.confirmed += 1
    return sorted(
        rules.values(),
        key=lambda one: (2.0 if one.precision is None else one.precision, one.rule),
    )


def precision_table(rules: Sequence[RulePrecision]) -> Table:
    """A row for each rule."""
    table = Table(box=None)
    table.add_column("rule")
    for name in ("fired", "confirmed", "false alarms", "precision"):
        table.add_column(name, justify="right")
    for one in rules:
        cells = (one.fired, one.confirmed, one.false_alarms)
        shown = "-" if one.precision is None else f"{one.precision:.0%}"
        table.add_row(Text(plain_line(one.rule)), *map(str, cells), shown)
    return table


def precision_json(rules: Sequence[RulePrecision]) -> str:
    """For programs: one JSON object with `version` and `rules`; `precision` may be null."""
    found = [
        {
            "rule": one.rule,
            "fired": one.fired,
            "confirmed": one.confirmed,
            "false_alarms": one.false_alarms,
            "precision": one.precision,
        }
        for one in rules
    ]
    return json.dumps({"version": 1, "rules": found}, indent=2)
