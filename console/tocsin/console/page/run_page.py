"""The page of a run: its story, its curves with issues marked, rules, deliveries, time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.console.page.overview import devices_text, loss_text, rate_text, stale_s
from tocsin.console.page.templating import Content
from tocsin.console.views.goodput import duration_text
from tocsin.console.views.issues import first_seen, state_text
from tocsin.console.views.stop_history import StopHistory, stop_history
from tocsin.console.views.why import Story, story_of
from tocsin.console.watch.state import WatchedRun, WatchState
from tocsin.schemas.compute_estimates import saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import REPEAT, STOPPED, Delivery
from tocsin.schemas.records.goodput import Goodput
from tocsin.schemas.records.issues import IssueFiring, gravest
from tocsin.schemas.records.run_view import RuleStatus, RunView
from tocsin.schemas.text import checkpoint_text, number_text, where_text

SHOWN_ISSUES: Final = 30
SHOWN_DELIVERIES: Final = 40

_STATUSES: Final[Mapping[RuleStatus, str]] = {
    "issues_found": "with issues",
    "error": "failed",
    "in_progress": "in progress",
    "waiting_for_input": "waiting for input",
    "no_issues_found": "no issues",
    "stopped": "stopped with the run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueLine:
    """An issue as it is listed."""

    issue: IssueFiring
    state: str
    first: str
    open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is known of a run at one moment, taken from the live state on its loop."""

    run: WatchedRun
    issues: Sequence[IssueLine]
    story: Story | None
    deliveries: Sequence[Delivery]
    stop: StopHistory | None
    now_ms: int
    trouble: str

    @property
    def view(self) -> RunView | None:
        """As the rules have published it last."""
        return self.run.seen.view

    @property
    def incarnation(self) -> str:
        """The training that is shown."""
        return self.run.seen.incarnation

    @property
    def raw_issues(self) -> Sequence[IssueFiring]:
        """The issues alone, in order of occurrence."""
        return [line.issue for line in self.issues]


def snapshot(
    state: WatchState, run_id: str, prices: PricesConfig, *, now_ms: int, trouble: str
) -> Snapshot | None:
    """What there is of that run; None: nothing."""
    run = state.run(run_id)
    if run is None:
        return None
    view = state.view
    own = [issue for issue in view.issues if issue.run_id == run_id]
    newest = [issue for issue in own if issue.incarnation == run.seen.incarnation]
    main_issue = gravest([i for i in newest if view.open(i)] or newest or own)
    published = run.seen.view
    commands = {key: seen for key, seen in view.commands.items() if seen.command.run_id == run_id}
    return Snapshot(
        run=run,
        issues=[
            IssueLine(
                issue=issue,
                state=state_text(view, issue),
                first=first_seen(issue),
                open=view.open(issue),
            )
            for issue in own
        ],
        story=None if main_issue is None else story_of(view, commands, main_issue, prices),
        deliveries=[one for one in view.deliveries if one.run_id == run_id],
        stop=None
        if published is None
        else stop_history(published, commands, published.incarnation, prices),
        now_ms=now_ms,
        trouble=trouble,
    )


def run_content(
    shot: Snapshot,
    charts: Mapping[str, object],
    prices: PricesConfig,
    newest: tuple[int, float] | None = None,
) -> Content:
    """The page, with the charts that were drawn for it, and the last step and loss in them.

    The view of a run, which has both too, comes every few seconds.
    """
    run, view = shot.run, shot.view
    deliveries = [one for one in shot.deliveries if one.occasion not in (REPEAT, STOPPED)]
    goodput = None if view is None else view.goodput
    saved = None if view is None else saved_by_stop(view, prices)
    return Content(
        "run",
        {
            "trouble": shot.trouble,
            "run_id": run.seen.run_id,
            "state": run.state,
            "facts": list(facts_of(run, shot.now_ms, newest)),
            "labels": {} if view is None else view.labels,
            "stale_s": stale_s(run, shot.now_ms),
            "unjudged": view is None,
            "running": run.seen.running,
            "story": None if shot.story is None else story_values(shot.story),
            "issues": list(reversed(shot.issues))[:SHOWN_ISSUES],
            "issue_count": len(shot.issues),
            "rules": [] if view is None else rule_groups(view.rules),
            "rule_count": 0 if view is None else len(view.rules),
            "deliveries": list(reversed(deliveries))[:SHOWN_DELIVERIES],
            "delivery_count": len(deliveries),
            "waiting": [one for one in shot.deliveries if one.waits_for_people],
            "stop": shot.stop,
            "moments": [] if shot.stop is None else moments_of(shot.stop),
            "goodput": None if goodput is None else goodput_facts(goodput),
            "saved": "" if saved is None else saved.text,
            "capture": None if view is None else view.capture,
            "command": "" if view is None else view.command,
            "node": "" if view is None else view.node,
            "charts": charts,
        },
    )


def facts_of(
    run: WatchedRun, now_ms: int, newest: tuple[int, float] | None
) -> Sequence[tuple[str, str]]:
    """The facts under the run's name: what, and how much."""
    view, step, loss = run.seen.view, run.step, run.loss
    if newest is not None and (step is None or newest[0] > step):
        step, loss = newest
    found: list[tuple[str, str]] = [("step", "-" if step is None else f"{step:,}")]
    if run.seen.running:
        rate = run.per_s(now_ms)
        found.append(("steps", "-" if rate is None else rate_text(rate)))
    found.append(("loss", "-" if loss is None else loss_text(loss)))
    if view is not None:
        found.append(("ranks", str(len(view.ranks) or 1)))
        if view.devices:
            found.append(("devices", devices_text(view.devices)))
        if view.capture is not None:
            found.append(("overhead", view.capture.overhead_text))
        if view.exit_code is not None:
            found.append(("exit code", str(view.exit_code)))
    return found


def story_values(story: Story) -> Mapping[str, object]:
    """The story of an issue: cause, where it began, what followed, what was done, what to try."""
    issue = story.issue
    good = issue.last_good_checkpoint
    return {
        "issue": issue,
        "open": issue.state != "resolved" and not any(one.closes for one in story.feedback),
        "answered": story.feedback[-1].text if story.feedback else "",
        "where": where_text(issue),
        "explanation": issue.evidence.explanation,
        "cause": story.cause,
        "cause_why": issue.evidence.cause,
        "consequences": story.consequences[:6],
        "more": max(0, len(story.consequences) - 6),
        "followed": max(issue.evidence.followed, len(issue.evidence.also)),
        "done": [one for one in story.deliveries if one.occasion not in (REPEAT, STOPPED)][:8],
        "remedy": issue.remedy,
        "checkpoint": "" if good is None else checkpoint_text(good),
    }


def rule_groups(rules: Mapping[str, RuleStatus]) -> Sequence[tuple[str, str, Sequence[str]]]:
    """Status, its words, and the rules in it; those that found something first."""
    groups = []
    for status, words in _STATUSES.items():
        names = sorted(name for name, found in rules.items() if found == status)
        if names:
            groups.append((status, words, names))
    return groups


def moments_of(history: StopHistory) -> Sequence[tuple[str, int, str]]:
    """State, time, and the time since the one before."""
    found: list[tuple[str, int, str]] = []
    before: int | None = None
    for state, at_ms in history.moments:
        since = "" if before is None else f"+{number_text(max(0, at_ms - before))} ms"
        found.append((state.replace("_", " "), at_ms, since))
        before = at_ms
    return found


def goodput_facts(goodput: Goodput) -> Mapping[str, str]:
    """The wall time and the productive share in words."""
    share = goodput.share
    return {
        "wall": duration_text(goodput.wall_s),
        "share": "-" if share is None else f"{100 * share:.0f} %",
        "incarnations": f"{goodput.incarnations:,}",
    }
