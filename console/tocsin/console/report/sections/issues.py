"""The issues, each with the series that decided and its story."""

from __future__ import annotations

from typing import Final

from tocsin.console.charts import Line, Mark, line_chart
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Paragraph, Section, not_captured
from tocsin.console.report.sections.shared import HOW_JUDGED, NOT_JUDGED, worst
from tocsin.console.views.why import Story, paragraphs, story_of
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.issues import SEVERITIES, IssueFiring
from tocsin.schemas.text import counted, fact_text, plain_line

KEY: Final = "issues"
_MAX_ISSUES: Final = 50
_ELSEWHERE: Final = {
    "The stop", "The stop of this run, requested for another reason", "What to try",
}  # fmt: skip


def issues(numbers: RunNumbers, prices: PricesConfig) -> Section:
    """One part for each issue, causes before consequences, the gravest first."""
    found = sorted(
        numbers.issues(),
        key=lambda i: (i.consequence_of is not None, -SEVERITIES.index(i.severity), i.onset_ms),
    )
    view = numbers.run.view
    if not found and (view is None or not view.rules):
        return not_captured(KEY, "Issues", NOT_JUDGED, HOW_JUDGED)
    if not found:
        return Section(
            key=KEY, title="Issues", finding="No rule has found an issue.", status="good"
        )
    every = numbers.run.runs_view
    parts = [_part(story_of(every, every.commands, issue, prices)) for issue in found[:_MAX_ISSUES]]
    counts = [
        f"{number:,} {severity}"
        for severity in reversed(SEVERITIES)
        if (number := sum(issue.severity == severity for issue in found))
    ]
    finding = f"{counted(len(found), 'issue')}: {', '.join(counts)}."
    if len(found) > _MAX_ISSUES:
        finding += f" The first {_MAX_ISSUES} are shown, causes first; `tocsin issues` lists all."
    return Section(key=KEY, title="Issues", finding=finding, status=worst(found), parts=parts)


def _part(story: Story) -> Section:
    issue = story.issue
    charts = _evidence(issue)
    shown = []
    for heading, lines in paragraphs(story):
        if heading == "Evidence" and charts:
            # The chart shows the series.
            lines = [fact_text(fact) for fact in issue.evidence.facts]
        if lines and heading not in _ELSEWHERE:
            shown.append(Paragraph(heading, [plain_line(line) for line in lines]))
    return Section(
        key=f"issue-{issue.short_id}",
        title=f"{plain_line(issue.rule)}, {issue.state}",
        finding=plain_line(issue.reason),
        advice=plain_line(issue.remedy),
        status=issue.severity,
        charts=charts,
        paragraphs=shown,
    )


def _evidence(issue: IssueFiring) -> list[str]:
    series = issue.evidence.series
    if series is None or len(series.values) < 2:
        return []
    marks = []
    if series.x is None and issue.first_step is not None:
        marks.append(Mark(issue.first_step, issue.severity, issue.rule))
    seconds = series.x == "s"
    return [
        line_chart(
            [Line.from_values(series.name, series.steps, series.values)],
            title=f"Evidence: {series.name}", unit=series.unit, limit=series.limit, marks=marks,
            x_name="time" if seconds else "step", x_unit="s" if seconds else None, height=200,
        )
    ]  # fmt: skip
