"""How the rules of a run stand, in few words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tocsin.schemas.records.run_view import RuleStatus

FOUND: Final[Mapping[RuleStatus, str]] = {"issues_found": "found by", "error": "failed"}
"""Statuses whose rules are named."""

COUNTED: Final[Mapping[RuleStatus, str]] = {
    "in_progress": "in progress",
    "waiting_for_input": "waiting for input",
    "no_issues_found": "without issues",
    "stopped": "stopped with the run",
}
"""Statuses whose rules are counted."""


def named(rules: Mapping[str, RuleStatus], status: RuleStatus) -> str:
    """`found by loss_spike, nonfinite`; empty: none is in that status."""
    names = [name for name, found in rules.items() if found == status]
    return f"{FOUND[status]} {', '.join(names)}" if names else ""


def counts(rules: Mapping[str, RuleStatus]) -> str:
    """`48 in progress, 9 waiting for input`; empty: all have found something or failed."""
    return ", ".join(
        f"{number} {words}"
        for status, words in COUNTED.items()
        if (number := sum(found == status for found in rules.values()))
    )


def in_a_line(rules: Mapping[str, RuleStatus]) -> str:
    """All of it: `48 in progress, 9 waiting for input, found by loss_spike`."""
    parts = [counts(rules), *(named(rules, status) for status in FOUND)]
    return ", ".join(part for part in parts if part)
