"""The page of an issue: evidence, start, consequences, who was told, and the answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tocsin.console.charts import Line, Mark, line_chart
from tocsin.console.page.run_charts import HEIGHT, WIDTH
from tocsin.console.page.run_page import moments_of, story_values
from tocsin.console.page.templating import Content
from tocsin.console.views.issues import state_text
from tocsin.console.views.why import Story, story_of
from tocsin.console.watch.state import WatchState
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import STOPPED
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.text import fact_text


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueShot:
    """What is known of an issue at one moment."""

    story: Story
    state: str
    running: bool
    stopping: bool
    trouble: str

    @property
    def issue(self) -> IssueFiring:
        """In its newest state."""
        return self.story.issue


def issue_shot(
    state: WatchState, issue_id: str, prices: PricesConfig, *, trouble: str
) -> IssueShot | None:
    """What there is of that issue; None: nothing."""
    view = state.view
    issue = next((one for one in view.issues if one.issue_id == issue_id), None)
    if issue is None:
        return None
    commands = {
        key: seen for key, seen in view.commands.items() if seen.command.run_id == issue.run_id
    }
    run = view.seen.get(issue.run_id)
    return IssueShot(
        story=story_of(view, commands, issue, prices),
        state=state_text(view, issue),
        running=run is not None and run.running,
        stopping=run is not None and run.stop is not None,
        trouble=trouble,
    )


def issue_content(shot: IssueShot) -> Content:
    """The page."""
    story, issue = shot.story, shot.issue
    return Content(
        "issue",
        {
            "trouble": shot.trouble,
            "issue": issue,
            "name": issue.rule if issue.rule == issue.use else f"{issue.rule} (of {issue.use})",
            "state": shot.state,
            "running": shot.running,
            "stopping": shot.stopping,
            "closed": issue.state == "resolved" or any(one.closes for one in story.feedback),
            "story": story_values(story),
            "evidence": [fact_text(fact) for fact in issue.evidence.facts],
            "also": issue.evidence.also[:16],
            "plot": evidence_plot(issue),
            "states": story.states,
            "feedback": story.feedback,
            "deliveries": [one for one in story.deliveries if one.occasion != STOPPED],
            "waiting": [one for one in story.deliveries if one.waits_for_people],
            "stop": story.stop,
            "moments": [] if story.stop is None else moments_of(story.stop),
            "silence": silence_matches(issue),
        },
    )


def evidence_plot(issue: IssueFiring) -> str:
    """The deciding series with its limit, as SVG; empty without one."""
    series = issue.evidence.series
    if series is None or not series.values:
        return ""
    last = series.steps[-1]
    return line_chart(
        [Line.from_values(series.name, list(map(float, series.steps)), list(series.values))],
        title=series.name,
        unit=series.unit,
        marks=[Mark(last, issue.severity, issue.reason)],
        limit=series.limit,
        x_name="step" if series.x is None else "time",
        x_unit=series.x,
        width=WIDTH * 1.5,
        height=HEIGHT * 1.25,
        heading=False,
    )


def silence_matches(issue: IssueFiring) -> Sequence[tuple[str, str]]:
    """What a silence may match: value of the choice, and its words."""
    return [
        ("both", f"{issue.rule} in this run"),
        ("run", "all of this run"),
        ("rule", f"{issue.rule} in all runs"),
    ]
