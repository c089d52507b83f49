"""What is answered about runs, issues, deliveries and stops. The values are plain JSON.

`tocsin mcp` answers with the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

from tocsin.console.api.described import VERSION
from tocsin.console.api.paging import page_of, time_of
from tocsin.console.api.problems import ProblemError
from tocsin.console.api.requests import (
    ListDeliveries,
    ListIssues,
    ListRuns,
    ListStops,
    Nothing,
    Request,
    SinceAlone,
)
from tocsin.console.api.source import DataSource
from tocsin.console.stop.report import report_facts, stops_of_rules
from tocsin.console.views.issues import IssueFilter, delivery_facts, issue_facts
from tocsin.console.views.receivers import suspended_receivers
from tocsin.console.views.selection import choose_issue, choose_run
from tocsin.console.views.since import since_ms
from tocsin.console.views.status import run_facts
from tocsin.console.views.stop_history import history_facts, stop_history
from tocsin.console.views.why import story_facts, story_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import SEVERITIES, IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView

Facts = Mapping[str, object]
"""An answer as JSON values."""

_VERSIONED: Final[Facts] = {"version": VERSION}


async def list_runs(request: Request[ListRuns]) -> Facts:
    """The runs, the last started first. Raises ProblemError, and as the source does."""
    source, asked = request.source, request.asked
    from_ms = _since(asked.since, request.now_ms)
    view = _changed(await source.view(), from_ms)
    key, _, value = (asked.label or "").partition("=")
    wanted = [
        run
        for run in view.runs
        if asked.state in (None, run.state) and (not key or run.labels.get(key) == value)
    ]
    page = page_of(
        wanted,
        lambda run: (run.started_ms, run.run_id),
        limit=asked.limit,
        cursor=asked.cursor,
    )
    return _listing(
        "runs",
        page.next,
        [run_facts(run, source.prices, source.policy) for run in page.items],
        request.now_ms,
    )


async def get_run(request: Request[Nothing]) -> Facts:
    """One run, by its id or the beginning of it."""
    run = await find_run(request.source, request.about)
    archived = run.run_id in await request.source.archived()
    commands = await request.source.commands(run.run_id)
    seen = (await request.source.view(run.run_id)).seen.get(run.run_id)
    views = [] if seen is None else sorted(seen.views.values(), key=lambda one: one.started_ms)
    history = stop_history(run, commands, run.incarnation, request.source.prices)
    return {
        **_VERSIONED,
        "run": run_facts(run, request.source.prices, request.source.policy),
        "incarnations": [one.incarnation for one in views] or [run.incarnation],
        "archived": archived,
        "stop": None if history is None else history_facts(history),
    }


async def get_rules(request: Request[Nothing]) -> Facts:
    """How the rules of a run stand."""
    run = await find_run(request.source, request.about)
    view = await request.source.view(run.run_id)
    found: dict[str, list[IssueFiring]] = {}
    for issue in view.issues:
        if issue.run_id == run.run_id:
            found.setdefault(issue.rule, []).append(issue)
    return {
        **_VERSIONED,
        "run_id": run.run_id,
        "incarnation": run.incarnation,
        "rules": [
            {
                "rule": rule,
                "status": status,
                "issues": len(found.get(rule, ())),
                "worst_severity": _worst(found.get(rule, ())),
            }
            for rule, status in sorted(run.rules.items())
        ],
    }


async def get_goodput(request: Request[Nothing]) -> Facts:
    """Where the time of a run went."""
    run = await find_run(request.source, request.about)
    goodput = run.goodput
    return {
        **_VERSIONED,
        "run_id": run.run_id,
        "goodput": None if goodput is None else goodput.model_dump(mode="json"),
        "productive_share": None if goodput is None else goodput.share,
    }


async def list_issues(request: Request[ListIssues]) -> Facts:
    """The issues, the last that occurred first."""
    source, asked = request.source, request.asked
    run_id = await _named(source, asked.run)
    view = await source.view(run_id)
    wanted = IssueFilter(
        run_id=run_id,
        rule=asked.rule,
        severity=asked.severity,
        state=asked.state,
        since_ms=_since(asked.since, request.now_ms),
    )
    issues = [issue for issue in view.issues if wanted.wants(issue, view)]
    page = page_of(
        issues,
        lambda issue: (issue.onset_ms, issue.issue_id),
        limit=asked.limit,
        cursor=asked.cursor,
    )
    return _listing(
        "issues", page.next, [issue_facts(view, issue) for issue in page.items], request.now_ms
    )


async def get_issue(request: Request[Nothing]) -> Facts:
    """The story of an issue, by its id, at least its first four characters, or its run."""
    view = await request.source.view()
    try:
        found = choose_issue(view, request.about)
    except ConfigurationError as error:
        raise ProblemError("unknown", str(error)) from None
    if isinstance(found, RunView):
        raise ProblemError("unknown", f"no issue was found in run {found.run_id}")
    commands = await request.source.commands(found.run_id)
    view = await request.source.view(found.run_id)
    return story_facts(story_of(view, commands, found, request.source.prices))


async def list_deliveries(request: Request[ListDeliveries]) -> Facts:
    """Notices and stops, the last decided first."""
    source, asked = request.source, request.asked
    from_ms = _since(asked.since, request.now_ms)
    run_id = await _named(source, asked.run)
    view = await source.view(run_id)
    wanted = [
        one
        for one in view.deliveries
        if run_id in (None, one.run_id)
        and asked.issue in (None, one.issue_id)
        and asked.state in (None, one.state)
        and (from_ms is None or one.updated_ms >= from_ms)
    ]
    page = page_of(
        wanted,
        lambda one: (one.created_ms, one.key),
        limit=asked.limit,
        cursor=asked.cursor,
    )
    return _listing("deliveries", page.next, [*map(delivery_facts, page.items)], request.now_ms)


async def list_stops(request: Request[ListStops]) -> Facts:
    """The stops of runs in their newest incarnation, the last requested first."""
    source, asked = request.source, request.asked
    run_id = await _named(source, asked.run)
    view = _changed(await source.view(run_id), _since(asked.since, request.now_ms))
    wanted = [run for run in view.runs if run.stop and run_id in (None, run.run_id)]
    page = page_of(
        wanted,
        lambda run: (_requested_ms(run), run.run_id),
        limit=asked.limit,
        cursor=asked.cursor,
    )
    stops = []
    for run in page.items:
        commands: Mapping[str, CommandSeen] = await source.commands(run.run_id)
        history = stop_history(run, commands, run.incarnation, source.prices)
        if history is not None:
            names = {"run_id": run.run_id, "incarnation": run.incarnation}
            stops.append({**history_facts(history), **names})
    return _listing("stops", page.next, stops, request.now_ms)


async def get_stops_report(request: Request[SinceAlone]) -> Facts:
    """What stops did, rule by rule, as `tocsin stops report --json`."""
    source, asked = request.source, request.asked
    since = _since(asked.since, request.now_ms) or 0
    rules = stops_of_rules(await source.view(), source.prices, since_ms=since)
    return report_facts(rules, source.prices)


async def list_suspended_receivers(request: Request[Nothing]) -> Facts:
    """Receivers that fail, so that their deliveries are paused, by name."""
    view = await request.source.view()
    found = suspended_receivers(view.deliveries)
    facts = [{"receiver": name, **asdict(one)} for name, one in found.items()]
    return {**_VERSIONED, "as_of": time_of(request.now_ms), "suspended_receivers": facts}


async def list_refused_configurations(request: Request[Nothing]) -> Facts:
    """Configurations that workers refuse: the earlier ones are in effect. By worker."""
    view = await request.source.view()
    facts = [one.model_dump(mode="json") for one in view.refused]
    return {**_VERSIONED, "as_of": time_of(request.now_ms), "refused_configurations": facts}


async def find_run(source: DataSource, text: str) -> RunView:
    """The run of that id, else the one whose id begins so.

    Raises:
        ProblemError: there is none, or there are several.
    """
    view = await source.view(text)
    if (found := view.run(text)) is not None:
        return found
    try:
        return choose_run((await source.view()).runs, text)
    except ConfigurationError as error:
        raise ProblemError("unknown", str(error)) from None


async def _named(source: DataSource, text: str | None) -> str | None:
    """The id of the run that a list is asked of; None: of all.

    Raises ProblemError for a run that is not known: an empty list would say that all is well.
    """
    if text is None or any(issue.run_id == text for issue in (await source.view(text)).issues):
        return text
    return (await find_run(source, text)).run_id


def _listing(key: str, cursor: str | None, entries: Sequence[Facts], now_ms: int) -> Facts:
    return {**_VERSIONED, "as_of": time_of(now_ms), "next": cursor, key: list(entries)}


def _since(text: str | None, now_ms: int) -> int | None:
    try:
        return since_ms(text, now_ms, name="since")
    except ConfigurationError as error:
        raise ProblemError("wrong_request", str(error)) from None


def _changed(view: RunsView, from_ms: int | None) -> RunsView:
    return view if from_ms is None else view.since(from_ms)


def _worst(issues: Sequence[IssueFiring]) -> str | None:
    return max((issue.severity for issue in issues), key=SEVERITIES.index, default=None)


def _requested_ms(run: RunView) -> int:
    return 0 if run.stop is None else min(run.stop.states.values(), default=run.started_ms)
