"""Which run or issue a person means: by its id, or by the beginning of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import SHORT_ID, IssueFiring, gravest
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line

SHORTEST: Final = 4
"""Characters of an issue's id that one must give at least."""

_NAMED: Final = 8


def choose_issue(view: RunsView, text: str) -> IssueFiring | RunView:
    """The issue of that id, or whose id begins so; else the one that the run of that id, or whose
    id begins so, is about; else that of a delivery, by the same.

    A run is about the worst of its newest training, else of any; the run itself is returned if
    there is none.

    Raises:
        ConfigurationError: there is no such issue or run, or there are several.
    """
    whole = next((issue for issue in view.issues if issue.issue_id == text), None)
    if whole is not None:
        return whole
    if (about := _about(view, text)) is not None:
        return about
    if len(text) >= SHORTEST and (begun := _begun(view.issues, text)) is not None:
        return begun
    if text and any(run.run_id.startswith(text) for run in view.runs):
        run = choose_run(view.runs, text)
        return _about(view, run.run_id) or run
    if len(text) >= SHORTEST and (issue := _delivered(view, text)) is not None:
        return issue
    if len(text) < SHORTEST:
        raise ConfigurationError(
            f"{_quoted(text)}: expected a run, or at least {SHORTEST} characters of an issue's id; "
            "`tocsin issues` lists them"
        )
    raise ConfigurationError(
        f"no issue, run or delivery {_quoted(text)} on this bus; `tocsin issues` lists the issues, "
        "`tocsin status` the runs; is it on another bus (--bus)?"
    )


def _about(view: RunsView, run_id: str) -> IssueFiring | RunView | None:
    """What there is to tell of that run; None if nothing is known of it."""
    run = view.run(run_id)
    own = [issue for issue in view.issues if issue.run_id == run_id]
    newest = [issue for issue in own if run is not None and issue.incarnation == run.incarnation]
    return gravest(newest or own) or run


def _delivered(view: RunsView, text: str) -> IssueFiring | None:
    """The issue of the one delivery or message whose id begins so; None if there is none.

    Raises:
        ConfigurationError: there are several.
    """
    begun = text.lower()
    about = {
        delivery.issue_id
        for delivery in view.deliveries
        if delivery.delivery_id.startswith(begun) or delivery.message_id.startswith(begun)
    }
    found = [issue for issue in view.issues if issue.issue_id in about]
    if len(found) > 1:
        named = _listed(issue.issue_id for issue in found)
        raise ConfigurationError(
            f"what {_quoted(text)} names is about {len(found)} issues: {named}; give one of these"
        )
    return found[0] if found else None


def _begun(issues: Sequence[IssueFiring], text: str) -> IssueFiring | None:
    """The one issue whose id begins so; None if there is none. Raises ConfigurationError."""
    found = [issue for issue in issues if issue.issue_id.startswith(text.lower())]
    if len(found) <= 1:
        return found[0] if found else None
    # As many characters as it takes to tell them apart.
    length = next(
        size
        for size in range(SHORT_ID, len(found[0].issue_id) + 1)
        if len({issue.issue_id[:size] for issue in found}) == len(found)
    )
    listed = _listed(
        f"{issue.issue_id[:length]} ({plain_line(issue.rule)} in {plain_line(issue.run_id)})"
        for issue in found
    )
    raise ConfigurationError(
        f"{len(found)} issues start with {_quoted(text)}: {listed}; give more of the id"
    )


def named(text: str, known: Iterable[str]) -> Sequence[str]:
    """The runs that a person may mean: the one with that id, else those whose ids begin so."""
    begun = sorted(run_id for run_id in known if text and run_id.startswith(text))
    return [text] if text in begun else begun


def ambiguous(text: str, run_ids: Sequence[str]) -> ConfigurationError:
    """The error that several runs may be meant."""
    listed = _listed(map(plain_line, run_ids))
    return ConfigurationError(
        f"{len(run_ids)} runs start with {_quoted(text)}: {listed}; give more of the id"
    )


def choose_run(runs: Sequence[RunView], text: str) -> RunView:
    """The run of that id, else the only one that runs whose id begins so, else the only one.

    Raises:
        ConfigurationError: there is no such run, or there are several.
    """
    whole = next((run for run in runs if run.run_id == text), None)
    if whole is not None:
        return whole
    begin_so = [run for run in runs if run.run_id.startswith(text)] if text else []
    alive = [run for run in begin_so if run.state == "running"]
    if len(alive or begin_so) == 1:
        return (alive or begin_so)[0]
    if begin_so:
        raise ambiguous(text, [run.run_id for run in alive or begin_so])
    running = [plain_line(run.run_id) for run in reversed(runs) if run.state == "running"]
    now = f"running now: {_listed(running)}" if running else "no run is active"
    raise ConfigurationError(
        f"no run {_quoted(text)} on this bus; {now}; `tocsin status` lists all; "
        "is it on another bus (--bus)?"
    )


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _quoted(text: str) -> str:
    return f"'{plain_line(text)}'"
