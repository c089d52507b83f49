"""`tocsin why`: one issue from its first sign to what became of it, for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.text import Text

from tocsin.console.views.issues import SEVERITY_STYLE, printed_facts
from tocsin.console.views.receivers import Suspended, suspended_lines, suspended_receivers
from tocsin.console.views.sparkline import Bucket, sparkline
from tocsin.console.views.stop_history import (
    StopHistory,
    history_facts,
    history_lines,
    job_text,
    stop_history,
)
from tocsin.schemas.compute_estimates import NO_PRICES
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import ACKNOWLEDGED, LATE, REPEAT, STOPPED, Delivery
from tocsin.schemas.records.feedback import Feedback
from tocsin.schemas.records.issues import IssueFiring, Series
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView, StateSeen
from tocsin.schemas.text import (
    checkpoint_text,
    fact_text,
    number_text,
    place_text,
    plain_line,
    still,
    time_text,
    unit_suffix,
    where_text,
)

_DRAWN: Final = 40
_LAST: Final = 6
_NAMED: Final = 8
_LABEL: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """An issue and all that belongs to it. `stop` is that of the issue's incarnation, if any, and
    `suspended` are the receivers that are left alone.
    """

    issue: IssueFiring
    states: Sequence[StateSeen] = ()
    feedback: Sequence[Feedback] = ()
    deliveries: Sequence[Delivery] = ()
    stop: StopHistory | None = None
    cause: IssueFiring | None = None
    consequences: Sequence[IssueFiring] = ()
    suspended: Mapping[str, Suspended] = field(default_factory=dict)
    whole: bool = True
    """Whether all of it is printed, and not only what happened since a time."""


def story_of(
    view: RunsView,
    commands: Mapping[str, CommandSeen],
    issue: IssueFiring,
    prices: PricesConfig = NO_PRICES,
    *,
    since_ms: int = 0,
) -> Story:
    """Put together what the bus holds of it; `prices` are for estimates.

    States, answers and deliveries from before `since_ms` are left out.
    """
    run = view.run(issue.run_id)
    feedback, deliveries = view.feedback(issue.issue_id), view.deliveries_of(issue.issue_id)
    return Story(
        issue=issue,
        states=[seen for seen in view.states(issue.issue_id) if seen.at_ms >= since_ms],
        feedback=[one for one in feedback if one.at_ms >= since_ms],
        deliveries=[one for one in deliveries if one.updated_ms >= since_ms],
        stop=None if run is None else stop_history(run, commands, issue.incarnation, prices),
        cause=next((one for one in view.issues if one.issue_id == issue.consequence_of), None),
        consequences=[one for one in view.issues if one.consequence_of == issue.issue_id],
        suspended=suspended_receivers(view.deliveries),
        whole=not since_ms,
    )


def story_facts(story: Story) -> dict[str, object]:
    """An issue's explanation as JSON values: `version`, `issue` and `stop` (or null).

    `issue` is as in `tocsin issues --json`, with `consequences`: the ids of what it caused.
    """
    issue = {
        **printed_facts(story.issue, story.states, story.feedback, story.deliveries),
        "consequences": [one.issue_id for one in story.consequences],
    }
    stop = None if story.stop is None else history_facts(story.stop)
    return {"version": 1, "issue": issue, "stop": stop}


def story_lines(story: Story) -> list[Text]:
    """Line by line, in paragraphs with a heading each; no line has line breaks."""
    issue = story.issue
    name = issue.rule if issue.rule == issue.use else f"{issue.rule} (of {issue.use})"
    title = Text.assemble(
        (issue.severity, SEVERITY_STYLE[issue.severity]),
        f": {plain_line(name)} in run {plain_line(issue.run_id)}, {issue.state}",
    )
    lines = [title, Text(plain_line(issue.reason) or f"{plain_line(name)} fired")]
    for heading, paragraph in paragraphs(story):
        lines += _shown(heading, paragraph)
    lines += [Text(), Text(f"issue {issue.issue_id}", style="dim")]
    return lines


def run_story_lines(
    run: RunView,
    commands: Mapping[str, CommandSeen],
    prices: PricesConfig = NO_PRICES,
) -> list[Text]:
    """A run in which nothing was found: that, and how it was stopped if a person did so."""
    run_id = plain_line(run.run_id)
    lines = [Text(f"no issues in run {run_id} ({run.outcome or run.state})")]
    history = stop_history(run, commands, run.incarnation, prices)
    if history is not None:
        lines += _shown("The stop", history_lines(history))
    return lines


def _shown(heading: str, paragraph: Sequence[str]) -> list[Text]:
    """What a run says goes through here: none of it may steer a terminal."""
    lines = [Text("  " + still(line)) for line in paragraph]
    return [Text(), Text(heading, style="bold"), *lines]


def run_story_facts(
    run: RunView,
    commands: Mapping[str, CommandSeen],
    prices: PricesConfig = NO_PRICES,
) -> dict[str, object]:
    """A run's explanation as JSON values; `issue` is null."""
    history = stop_history(run, commands, run.incarnation, prices)
    stop = None if history is None else history_facts(history)
    return {"version": 1, "issue": None, "stop": stop}


def paragraphs(story: Story) -> Iterator[tuple[str, list[str]]]:
    """A story by its headings; what anybody has named is plain text, but not escaped."""
    issue, evidence = story.issue, story.issue.evidence
    began = [where_text(issue)]
    if issue.onset_ms:
        began.append(time_text(issue.onset_ms))
    if evidence.explanation:
        began.append(evidence.explanation)
    yield "Where it started", began
    shown = [fact_text(fact) for fact in evidence.facts]
    if evidence.series is not None and evidence.series.values:
        shown += _series_lines(evidence.series)
    if shown:
        yield "Evidence", [line.rstrip() for line in shown]
    if followed := list(_followed_lines(story)):
        yield "What followed", followed
    if issue.consequence_of is not None:
        why = [plain_line(evidence.cause)] if evidence.cause else []
        yield "Caused by", [_other(issue.consequence_of, story.cause), *why]
    if issue.remedy:
        yield "What to try", [plain_line(issue.remedy)]
    if (good := issue.last_good_checkpoint) is not None:
        yield "Good checkpoint", [checkpoint_text(good)]
    if story.states:
        yield "History", [_state_line(seen) for seen in story.states]
    if story.feedback:
        yield "What people answered", [_feedback_line(one) for one in story.feedback]
    yield "What was done", list(_done_lines(story))
    if story.stop is not None:
        heading = "The stop"
        if not story.stop.is_for(issue.issue_id, [d.delivery_id for d in story.deliveries]):
            heading = "The stop of this run, requested for another reason"
        yield heading, history_lines(story.stop)


def _series_lines(series: Series) -> Iterator[str]:
    unit = unit_suffix(series.unit)
    limit = "" if series.limit is None else f"  limit {number_text(series.limit)}{unit}"
    name = plain_line(series.name)
    yield f"{name}  {_drawn(series.values)}{limit}"
    last = list(zip(series.steps, series.values, strict=True))[-_LAST:]
    listed = ", ".join(f"{number_text(value)}{unit} ({place_text(series, x)})" for x, value in last)
    yield f"{name}, last values: {listed}"


def _drawn(values: Sequence[float]) -> str:
    buckets = [Bucket() for _ in values[-_DRAWN:]]
    for bucket, value in zip(buckets, values[-_DRAWN:], strict=True):
        bucket.add(value)
    return sparkline(buckets)


def _followed_lines(story: Story) -> Iterator[str]:
    evidence = story.issue.evidence
    also = [plain_line(name) for name in evidence.also[:_NAMED]]
    count = max(evidence.followed, len(evidence.also))
    if count:
        rest = count - len(also)
        named = ", ".join(also) + (f" and {rest:,} more" if also and rest else "")
        yield f"{count:,} more affected" + (f": {named}" if named else "")
    for one in story.consequences[:_NAMED]:
        yield _other(one.issue_id, one)
    if len(story.consequences) > _NAMED:
        yield f"and {len(story.consequences) - _NAMED:,} more issues"


def _other(issue_id: str, issue: IssueFiring | None) -> str:
    if issue is None:
        return f"issue {plain_line(issue_id)}, no longer on this bus"
    return (
        f"{issue.severity} {plain_line(issue.rule)}: {plain_line(issue.reason)} "
        f"(tocsin why {issue.short_id})"
    )


def _state_line(seen: StateSeen) -> str:
    at = "" if seen.step is None else f"  at step {seen.step:,}"
    when = time_text(seen.at_ms) if seen.at_ms else "at an unknown time"
    return f"{when}  {seen.state}{at}"


def _occasion(delivery: Delivery) -> str:
    """What sets a delivery apart from the first one to its receiver; empty for that."""
    if delivery.occasion == REPEAT:
        return f"repeat {delivery.repeat:,}"
    if delivery.occasion in (ACKNOWLEDGED, LATE, STOPPED):
        return delivery.occasion
    return "" if delivery.issue_state == "firing" else delivery.issue_state


def _feedback_line(feedback: Feedback) -> str:
    return f"{time_text(feedback.at_ms)}  {plain_line(feedback.text)}"


def _done_lines(story: Story) -> Iterator[str]:
    if not story.deliveries:
        yield (
            "no notice was sent and nothing was stopped: the configuration requests neither"
            if story.whole
            else "nothing in this time"
        )
        return
    for delivery in story.deliveries:
        what = _occasion(delivery)
        about = f" ({what})" if what else ""
        attempts = (
            f", {delivery.attempts:,} attempt{'s' * (delivery.attempts != 1)}"
            if delivery.attempts
            else ""
        )
        yield (
            f"{plain_line(delivery.action) + about:<{_LABEL}}{delivery.state}: "
            f"{plain_line(delivery.reason)}{attempts}"
        )
        by = plain_line(delivery.decided_by) or "unknown"
        yield f"{'':<{_LABEL}}decided by {by}"
        if (backend := delivery.backend) is not None:
            yield f"{'':<{_LABEL}}{job_text(backend)}"
            yield f"{'':<{_LABEL}}permitted by {plain_line(backend.permitted_by)}"
        if delivery.group:
            yield f"{'':<{_LABEL}}in one message with others of {plain_line(delivery.group)}"
        if delivery.state != "delivered" or delivery.attempts > 1:
            for attempt in delivery.last_attempts:
                result = plain_line(attempt.result)
                took = f"after {attempt.duration_ms:,} ms"
                yield f"{'':<{_LABEL}}{time_text(attempt.at_ms)}  {result} {took}"
        if delivery.next_attempt_ms is not None:
            yield f"{'':<{_LABEL}}{time_text(delivery.next_attempt_ms)}  next attempt"
    waited_for = {one.action for one in story.deliveries if not one.final}
    yield from suspended_lines(
        {name: one for name, one in story.suspended.items() if name in waited_for}
    )
