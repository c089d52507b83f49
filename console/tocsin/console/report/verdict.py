"""The first paragraph of a report: what became of the run, what was found, what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.section import Figure, Section, Status
from tocsin.console.report.sections.shared import worst
from tocsin.console.views.goodput import duration_text
from tocsin.schemas.compute_estimates import saved_by_stop
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.issues import IssueFiring, gravest
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import RunStarted
from tocsin.schemas.text import counted, number_text, plain_line, share_text, time_text

_ENDS: Final = {
    "completed": "completed",
    "failed": "failed",
    "stopped": "was stopped",
    "interrupted": "was interrupted",
}
_MAX_HINTS: Final = 3
_JUDGED: Final = frozenset({"warning", "info", "critical"})


def verdict(
    numbers: RunNumbers, sections: Sequence[Section], prices: PricesConfig, now_ms: int
) -> str:
    """One paragraph: the end, the issues, the stop, what costs time, what to do first."""
    view, issues = numbers.run.view, numbers.issues()
    sentences = [_end(numbers, view, now_ms), _found(issues, view), _elsewhere(numbers)]
    if view is not None and (saved := saved_by_stop(view, prices)) is not None:
        sentences.append(f"The stop saved {saved.text}." if saved.hours is not None else "")
    training = next((one for one in sections if one.key == "training"), None)
    if training is not None and training.status != "not_captured":
        sentences.append(training.finding)
    if view is not None and view.goodput is not None and view.goodput.share is not None:
        sentences.append(f"{share_text(100 * view.goodput.share)} % of its time was productive.")
    sentences.append(_next(issues, sections))
    return " ".join(filter(None, sentences))


def status_of(numbers: RunNumbers) -> Status:
    """The gravest of the run: of its issues, and of its end."""
    view, issues = numbers.run.view, numbers.issues()
    judged = issues or (view is not None and view.rules)
    found: Status = worst(issues) if judged else "plain"
    bad_end = view is not None and (view.state == "lost" or view.outcome == "failed")
    return "warning" if bad_end and found in ("good", "info", "plain") else found


def facts(numbers: RunNumbers, now_ms: int) -> list[Figure]:
    """What the run is: times, places, versions."""
    run, view = numbers.run, numbers.run.view
    found = [Figure("run", run.run_id), Figure("incarnation", run.incarnation)]
    started = [event for event in numbers.events() if isinstance(event, RunStarted)]
    trainers = [one for one in started if one.role == "trainer"]
    if view is not None:
        end = view.outcome or view.state
        code = "" if view.exit_code is None else f", exit code {view.exit_code}"
        found.append(Figure("state", f"{end}{code}"))
        if view.started_ms:
            found.append(Figure("started", time_text(view.started_ms)))
            found.append(Figure("duration", _lasted_s(view, now_ms), "s"))
        if view.ended_ms:
            found.append(Figure("ended", time_text(view.ended_ms)))
        if view.last_step is not None:
            first = numbers.first_step()
            if first <= 1:
                found.append(Figure("steps", view.last_step + 1 - first))
            found.append(Figure("last step", view.last_step))
        if view.last_loss is not None:
            found.append(Figure("last loss", view.last_loss))
        found.append(Figure("ranks", max(view.world_size, len(view.ranks), 1)))
        if view.capture is not None:
            capture = view.capture
            if capture.is_short:
                found.append(Figure("time of capture", capture.spent_s, "s"))
            else:
                found.append(Figure("overhead of capture", capture.overhead_percent, "percent"))
            if view.capture.dropped:
                found.append(Figure("records that were dropped", view.capture.dropped))
    one = next(iter(reversed(trainers or started)), None)
    labels = dict(view.labels) if view is not None else {}
    if one is not None:
        labels = labels or dict(one.labels)
        nodes = dict.fromkeys(plain_line(each.node) for each in started if each.node)
        found += [
            Figure("nodes", ", ".join(nodes)),
            Figure("command", plain_line(next((s.command for s in started if s.command), ""))),
            Figure("commit", plain_line(one.git_commit or "")),
            Figure("optimizer", plain_line(one.optimizer or "")),
            Figure("parameters", one.parameters) if one.parameters else Figure("parameters", ""),
            Figure(
                "versions",
                plain_line(", ".join(f"{name} {v}" for name, v in one.versions.items())),
            ),
        ]
        devices = ", ".join(f"{n:,} x {plain_line(name)}" for name, n in one.devices.items())
        found.append(Figure("devices of a rank", devices))
    found.append(
        Figure("labels", plain_line(", ".join(f"{key}={value}" for key, value in labels.items())))
    )
    return [figure for figure in found if figure.value != ""]


def _end(numbers: RunNumbers, view: RunView | None, now_ms: int) -> str:
    run_id = plain_line(numbers.run.run_id)
    if view is None:
        return f"Run {run_id} has sent numbers, but no rule has judged it."
    first, last = numbers.first_step(), view.last_step
    lasted = duration_text(_lasted_s(view, now_ms)) if view.started_ms else ""
    steps, since, begin = "no step", f" in {lasted}" if lasted else "", ""
    if last is not None and first <= 1:
        steps = counted(last + 1 - first, "step")
    elif last is not None:
        # It was resumed, or its older numbers are kept no longer.
        steps, since = f"step {last:,}", f", {lasted} after its start" if lasted else ""
        begin = f" Its numbers begin at step {first:,}."
    if view.state == "running":
        return f"Run {run_id} is running: {steps}{since} so far.{begin}"
    if view.state == "lost":
        return f"Run {run_id} was lost: after {steps} there were no more records.{begin}"
    how = _ENDS.get(view.outcome or "", "ended")
    code = ""
    if view.outcome == "failed" and view.exit_code is not None:
        code = f" with exit code {view.exit_code}"
    return f"Run {run_id} {how}{code} after {steps}{since}.{begin}"


def _lasted_s(view: RunView, now_ms: int) -> float:
    """How long it has run: until its end, or until a lost run was last heard of."""
    end_ms = view.ended_ms
    if end_ms is None and view.state == "lost":
        end_ms = max((rank.last_heard_ms for rank in view.ranks), default=None)
    return max(0, (now_ms if end_ms is None else end_ms) - view.started_ms) / 1000


def _found(issues: Sequence[IssueFiring], view: RunView | None) -> str:
    main = gravest(issues)
    if main is None:
        return "No rule found an issue." if view is not None and view.rules else ""
    kind = f"The main finding is {main.severity}"
    if main.severity == "info":
        kind = "The rules found nothing worse than this, worth knowing"
    text = f"{kind}: {plain_line(main.reason).rstrip('.')}."
    others = len(issues) - 1
    follow = sum(issue.consequence_of == main.issue_id for issue in issues)
    if others:
        text += f" There {'is' if others == 1 else 'are'} {counted(others, 'other issue')}"
        text += f", {follow:,} of them a consequence of it." if follow else "."
    return text


def _elsewhere(numbers: RunNumbers) -> str:
    """A report is about one incarnation: who reads it must know of issues of the others."""
    others = len(numbers.run.issues()) - len(numbers.issues())
    if not others:
        return ""
    run_id = plain_line(numbers.run.run_id)
    has = f"Other incarnations of the run have {counted(others, 'issue')}"
    return f"This report is about one incarnation. {has}: `tocsin issues {run_id}`."


def _next(issues: Sequence[IssueFiring], sections: Sequence[Section]) -> str:
    """What to do first: by the main finding, else by the sections that found something."""
    main = gravest([issue for issue in issues if issue.severity != "info"])
    if main is not None and main.remedy:
        text = f"What to try: {plain_line(main.remedy).rstrip('.')}."
        if (good := main.last_good_checkpoint) is not None:
            text += f" The checkpoint to resume from is {plain_line(good.path)}"
            text += f" (step {number_text(good.step)})."
        return text
    hints = [one.title for one in sections if one.status in _JUDGED and one.advice]
    if not hints:
        return ""
    return f"Worth a look: {', '.join(hints[:_MAX_HINTS])}."
