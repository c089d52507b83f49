"""`tocsin issues`: what was found, one line each, and what was done about it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from rich.table import Table
from rich.text import Text

from tocsin.schemas.records.deliveries import REPEAT, STOPPED, Delivery
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import IssueFiring, Severity
from tocsin.schemas.records.runs_fold import RunsView, StateSeen
from tocsin.schemas.text import plain_line, time_text

StateFilter = Literal["open", "resolved", "all"]

SEVERITY_STYLE: Final[Mapping[Severity, str]] = {
    "critical": "bold red",
    "warning": "yellow",
    "info": "cyan",
}
"""In colour, wherever an issue is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueFilter:
    """Which issues are wanted; None and `all` mean each."""

    run_id: str | None = None
    rule: str | None = None
    severity: Severity | None = None
    state: StateFilter = "all"
    since_ms: int | None = None

    def wants(self, issue: IssueFiring, view: RunsView) -> bool:
        """Whether it is one of them. A rule is meant by its own name or by the catalogue's.

        An issue that a person has closed is not open, whatever its rule still sees.
        """
        return (
            self.run_id in (None, issue.run_id)
            and self.rule in (None, issue.rule, issue.use)
            and self.severity in (None, issue.severity)
            and (self.state == "all" or (self.state == "open") == view.open(issue))
            and (self.since_ms is None or view.changed_ms(issue) >= self.since_ms)
        )

    def __str__(self) -> str:
        """In words, after `no issues`; empty if each is wanted."""
        parts = []
        if self.run_id is not None:
            parts.append(f"in run {plain_line(self.run_id)}")
        if self.rule is not None:
            parts.append(f"of rule {plain_line(self.rule)}")
        if self.severity is not None:
            parts.append(f"of severity {self.severity}")
        if self.state != "all":
            parts.append(f"that are {self.state}")
        if self.since_ms is not None:
            parts.append(f"that changed since {time_text(self.since_ms)}")
        return " ".join(parts)


def issue_table(view: RunsView, wanted: IssueFilter, *, ids: bool = True) -> Table | None:
    """The issues in order of occurrence, each in its newest state; None if there is none.

    `ids` is whether the first column has their ids.
    """
    issues = [issue for issue in view.issues if wanted.wants(issue, view)]
    if not issues:
        return None
    done: dict[str, list[str]] = {}
    for delivery in view.deliveries:
        # `tocsin why` lists the repeats, of which there may be many, and edits after a stop.
        if delivery.occasion not in (REPEAT, STOPPED):
            done.setdefault(delivery.issue_id, []).append(f"{delivery.action}: {_state(delivery)}")
    table = Table(box=None)
    if ids:
        table.add_column("issue", no_wrap=True)
    for name in ("run", "severity", "rule", "state"):
        table.add_column(name)
    # A step is read at a glance, where it is one line.
    table.add_column("first", no_wrap=True)
    table.add_column("reason", overflow="fold")
    table.add_column("done")
    for issue in issues:
        cells = [
            Text(plain_line(issue.run_id)),
            Text(issue.severity, style=SEVERITY_STYLE[issue.severity]),
            Text(plain_line(issue.rule)),
            Text(state_text(view, issue)),
            Text(first_seen(issue)),
            Text(plain_line(issue.reason)),
            Text(plain_line(", ".join(done.get(issue.issue_id, ["-"])))),
        ]
        table.add_row(*([Text(issue.short_id)] if ids else []), *cells)
    return table


def state_text(view: RunsView, issue: IssueFiring) -> str:
    """What its rule says, and what people answered last: `ongoing, acknowledged`."""
    verdict = view.verdict(issue)
    return issue.state if verdict is None else f"{issue.state}, {verdict.verdict}"


def first_seen(issue: IssueFiring) -> str:
    """Where it began, in few words: `step 12, rank 1`."""
    parts = []
    if issue.first_step is not None:
        parts.append(f"step {issue.first_step:,}")
    if issue.first_rank is not None and issue.world_size > 1:
        parts.append(f"rank {issue.first_rank}")
    return ", ".join(parts) or datetime.fromtimestamp(issue.onset_ms / 1000, UTC).strftime(
        "%H:%M:%S UTC"
    )


def no_issues_line(view: RunsView, wanted: IssueFilter, bus_url: str) -> str:
    """What to say, and to try, where the table would be empty."""
    words = str(wanted)
    if not view.runs and not view.issues:
        return no_runs_line(bus_url)
    if words and view.issues:
        found = len(view.issues)
        return f"no issues {words}; {found:,} without this filter"
    watched = len(view.runs)
    return f"no issues {words or f'in {watched:,} run' + 's' * (watched != 1)}"


def no_runs_line(bus_url: str) -> str:
    """What to say, and to try, on a bus on which there is nothing yet."""
    return f"no runs on {bus_url} yet; try: tocsin run -- python train.py"


def issues_json(view: RunsView, wanted: IssueFilter) -> str:
    """The issues for programs: one JSON object with `version` and `issues`.

    Each has its newest state, `states` (all of them, with times), `feedback` and `deliveries`.
    """
    issues = [issue_facts(view, issue) for issue in view.issues if wanted.wants(issue, view)]
    return json.dumps({"version": 1, "issues": issues}, indent=2)


def issue_facts(view: RunsView, issue: IssueFiring) -> dict[str, object]:
    """One issue as JSON values: its fields, `state`, `short_id`, `states`, `feedback`,
    `deliveries`."""
    issue_id = issue.issue_id
    return printed_facts(
        issue, view.states(issue_id), view.feedback(issue_id), view.deliveries_of(issue_id)
    )


def printed_facts(
    issue: IssueFiring,
    states: Iterable[StateSeen],
    feedback: Iterable[Feedback],
    deliveries: Iterable[Delivery],
) -> dict[str, object]:
    """One issue as JSON values, as `issue_facts`, with those states, answers and deliveries."""
    return {
        "state": issue.state,
        "short_id": issue.short_id,
        **issue.model_dump(mode="json", exclude_none=True),
        "states": [
            {"state": seen.state, "at_ms": seen.at_ms, "step": seen.step} for seen in states
        ],
        "feedback": [*map(feedback_facts, feedback)],
        "deliveries": [*map(delivery_facts, deliveries)],
    }


def feedback_facts(feedback: Feedback) -> dict[str, object]:
    """What a person answered, as JSON values; of the issue, which it repeats, only the id."""
    facts = feedback.model_dump(mode="json", exclude={"issue"})
    return {"verdict": feedback.verdict, "issue_id": feedback.issue.issue_id, **facts}


def delivery_facts(delivery: Delivery) -> dict[str, object]:
    """One delivery as JSON values; the issue's own events, which it repeats, are left out."""
    return delivery.model_dump(mode="json", exclude_none=True, exclude={"event", "issue_event"})


def _state(delivery: Delivery) -> str:
    return "waits for approval" if delivery.waits_for_people else delivery.state
