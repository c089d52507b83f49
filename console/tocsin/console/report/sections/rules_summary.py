"""The rules: what each has found, how often, and what it suggests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tocsin.console.charts import Bar, bar_chart
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section, Table, not_captured
from tocsin.console.report.sections.shared import HOW_JUDGED, NOT_JUDGED, worst
from tocsin.console.views.rule_status import in_a_line
from tocsin.schemas.records.issues import SEVERITIES, IssueFiring, Severity
from tocsin.schemas.records.run_view import RuleStatus
from tocsin.schemas.text import counted, plain_line
from tocsin.stream_rules.catalogue import RuleCatalogue, built_in

KEY: Final = "rules_summary"
_TITLE: Final = "Rules summary"
_WORDS: Final[dict[RuleStatus, str]] = {
    "waiting_for_input": "had no input",
    "in_progress": "in progress",
    "no_issues_found": "no issues found",
    "issues_found": "issues found",
    "error": "failed",
    "stopped": "stopped with the run",
}


def rules_summary(numbers: RunNumbers) -> Section:
    """By rule: its status, times fired, meaning, remedy; those that fired most often first."""
    view, issues = numbers.run.view, numbers.issues()
    statuses = dict(view.rules) if view is not None else {}
    if not statuses and not issues:
        return not_captured(KEY, _TITLE, NOT_JUDGED, HOW_JUDGED)
    found: dict[str, list[IssueFiring]] = {}
    for issue in issues:
        found.setdefault(issue.rule, []).append(issue)
    times = {rule: sum(issue.times for issue in each) for rule, each in found.items()}
    fired = sorted(found, key=lambda rule: (-times[rule], rule))
    catalogue = built_in()
    finding = f"{counted(len(statuses), 'rule')}: {in_a_line(statuses)}." if statuses else ""
    if not fired:
        finding += " No rule has found an issue."
    charts = []
    if fired:
        bars = [Bar(rule, times[rule], _gravest(found[rule])) for rule in fired]
        charts.append(bar_chart(bars, title="Times that rules have fired"))
    tables = [_fired(fired, found, times, catalogue)] if fired else []
    quiet = sorted(rule for rule in statuses if rule not in found)
    if quiet:
        rows = [
            (plain_line(rule), _WORDS[statuses[rule]], _meaning(rule, catalogue)) for rule in quiet
        ]
        tables.append(Table(("rule", "status", "what it looks for"), rows, "Rules without issues"))
    return Section(
        key=KEY, title=_TITLE, finding=finding.strip(), status=worst(issues),
        advice="Each issue has its own section, with its evidence." if fired else "",
        figures=[
            Figure("rules", len(statuses)),
            Figure("issues", len(issues)),
            *(Figure(f"issues of severity {s}", _count(issues, s)) for s in SEVERITIES),
        ],
        charts=charts, tables=tables,
    )  # fmt: skip


def _fired(
    fired: list[str],
    found: dict[str, list[IssueFiring]],
    times: dict[str, int],
    catalogue: RuleCatalogue,
) -> Table:
    rows = []
    for rule in fired:
        issues = found[rule]
        remedy = next((issue.remedy for issue in issues if issue.remedy), "")
        steps = [issue.first_step for issue in issues if issue.first_step is not None]
        rows.append(
            (
                plain_line(rule), _gravest(issues), f"{times[rule]:,}",
                f"{min(steps):,}" if steps else "-", _meaning(issues[0].use, catalogue),
                plain_line(remedy),
            )
        )  # fmt: skip
    columns = ("rule", "severity", "fired", "first step", "what it looks for", "what to try")
    return Table(columns, rows, "Rules with issues", frozenset({2, 3}))


def _gravest(issues: list[IssueFiring]) -> Severity:
    return max((issue.severity for issue in issues), key=SEVERITIES.index)


def _count(issues: Sequence[IssueFiring], severity: str) -> int:
    return sum(issue.severity == severity for issue in issues)


def _meaning(rule: str, catalogue: RuleCatalogue) -> str:
    return catalogue.get(rule).meta.meaning if rule in catalogue else ""
