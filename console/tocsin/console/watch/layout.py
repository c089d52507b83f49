"""How many lines each part of the picture gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Details = Literal["all", "running", "none"]


@dataclass(slots=True)
class Plan:
    """What there is, and how much of it is shown.

    `details` says under which runs there is a second line, `reasons` whether an issue's reason has
    a line of its own, `spaces` how many empty lines stand before a section.
    """

    runs: int
    running: int
    issues: int
    deliveries: int
    fixed: int
    run_rows: int = 0
    issue_rows: int = 0
    delivery_rows: int = 0
    details: Details = "all"
    reasons: bool = True
    spaces: int = 1

    @property
    def lines(self) -> int:
        """The height of the picture."""
        detailed = {
            "all": self.run_rows,
            "running": min(self.running, self.run_rows),
            "none": 0,
        }[self.details]
        total = self.fixed + 1 + self.run_rows + detailed + (self.run_rows < self.runs)
        for there, shown, each in (
            (self.issues, self.issue_rows, 1 + self.reasons),
            (self.deliveries, self.delivery_rows, 1),
        ):
            if shown:
                total += self.spaces + 1 + shown * each + (shown < there)
            elif not there:
                total += self.spaces + 1
        return total


def fit(plan: Plan, height: int) -> Plan:
    """All of it, less what must go so that it is at most `height` lines: in the order below."""
    plan.run_rows, plan.issue_rows, plan.delivery_rows = plan.runs, plan.issues, plan.deliveries

    def deliveries(least: int) -> None:
        over = plan.lines - height
        if over > 0 and plan.delivery_rows > least:
            plan.delivery_rows = max(least, plan.delivery_rows - over - 1)

    def issues(least: int) -> None:
        over = plan.lines - height
        if over > 0 and plan.issue_rows > least:
            each = 1 + plan.reasons
            plan.issue_rows = max(least, plan.issue_rows - -(-(over + 1) // each))

    def runs(least: int) -> None:
        over = plan.lines - height
        if over > 0 and plan.run_rows > least:
            each = 1 + (plan.details == "all")
            plan.run_rows = max(least, plan.run_rows - -(-(over + 1) // each))

    def details(kind: Details) -> None:
        if plan.lines > height:
            plan.details = kind

    deliveries(3)
    issues(5)
    details("running")
    runs(plan.running + 3)
    if plan.lines > height:
        plan.spaces = 0
    if plan.lines > height:
        plan.reasons = False
    deliveries(1)
    issues(3)
    details("none")
    runs(4)
    deliveries(0)
    issues(1)
    runs(1)
    issues(0)
    return plan
