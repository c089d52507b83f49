"""How many lines each part of the picture gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Plan:
    """What there is, and how much of it is shown.

    `details` is how many runs have a second line, the first ones; `reasons` whether an issue's
    reason has a line of its own, `spaces` how many empty lines are before a section.
    """

    runs: int
    running: int
    issues: int
    deliveries: int
    fixed: int
    run_rows: int = 0
    issue_rows: int = 0
    delivery_rows: int = 0
    details: int = 0
    reasons: int = 1
    spaces: int = 1

    @property
    def lines(self) -> int:
        """The height of the picture."""
        details = min(self.details, self.run_rows)
        total = self.fixed + 1 + self.run_rows + details + (self.run_rows < self.runs)
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
    plan.details = plan.runs
    for part, least in (
        ("delivery_rows", 3),
        ("issue_rows", 5),
        ("details", plan.running),
        ("run_rows", plan.running + 3),
        ("spaces", 0),
        ("reasons", 0),
        ("delivery_rows", 1),
        ("issue_rows", 3),
        ("details", 0),
        ("run_rows", 4),
        ("delivery_rows", 0),
        ("issue_rows", 1),
        ("run_rows", 1),
        ("issue_rows", 0),
    ):
        while (over := plan.lines - height) > 0 and (shown := getattr(plan, part)) > least:
            # Each takes two lines at most, so this leaves out none that has room.
            setattr(plan, part, max(least, shown - max(1, over // 2)))
    return plan
