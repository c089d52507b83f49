"""The overview: all runs, first those that need a person. Pure.

Ten thousand runs are one list on the server; a page of it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import urlencode

from tocsin.console.page.templating import Content
from tocsin.console.views.issues import first_seen
from tocsin.console.watch.state import WatchedRun, WatchState
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import IssueFiring, Severity, root_of
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import number_text, plain_line

ROWS: Final = 50
"""Runs on a page."""

STALE_MS: Final = 40_000
"""A running run that said nothing for so long is shown as one that may hang."""

_DAY_MS: Final = 86_400_000
_LABELS: Final = 6

Group = Literal["needs you", "running", "over"]
Filter = Literal["all", "needs", "running", "ended", "lost"]
FILTERS: Final[Mapping[Filter, str]] = {
    "all": "All",
    "needs": "Needs a person",
    "running": "Running",
    "ended": "Ended",
    "lost": "Lost",
}

GROUPS: Final[Mapping[Group, str]] = {
    "needs you": "Needs a person",
    "running": "Running",
    "over": "Ended",
}

_GRAVITY: Final[Mapping[Severity, int]] = {"critical": 2, "warning": 1, "info": 0}


@dataclass(frozen=True, slots=True)
class Query:
    """What a viewer wants to see of the runs."""

    text: str = ""
    only: Filter = "all"
    page: int = 1

    @property
    def encoded(self) -> str:
        """As the query of an address; empty for the first page of all."""
        given = {"q": self.text, "only": self.only, "page": str(self.page)}
        usual = {"q": "", "only": "all", "page": "1"}
        return urlencode({name: value for name, value in given.items() if value != usual[name]})

    @property
    def url(self) -> str:
        """Where the list of that query is."""
        return f"/?{self.encoded}" if self.encoded else "/"

    @property
    def words(self) -> tuple[str, ...]:
        """What each run that is shown has somewhere."""
        return tuple(self.text.lower().split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Why a run is where it is in the list: the less `rank`, the further up."""

    rank: int
    why: str

    @property
    def person(self) -> bool:
        """Whether somebody should look."""
        return self.rank < _HEALTHY


_HEALTHY: Final = 50


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of one run beside itself: its issues, and its stops that wait."""

    open: Sequence[IssueFiring] = ()
    unanswered: Sequence[IssueFiring] = ()
    waiting: Sequence[Delivery] = ()

    @property
    def newest(self) -> IssueFiring | None:
        """The issue to name: the gravest that nobody has answered, the newest of these; or what it
        follows from, if that is open.
        """
        gravest = max(
            self.unanswered or self.open,
            key=lambda issue: (_GRAVITY[issue.severity], issue.onset_ms),
            default=None,
        )
        return None if gravest is None else root_of(gravest, self.open)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run as it is listed."""

    run_id: str
    group: Group
    state: str
    stale_s: int | None
    need: str
    step: str
    rate: str
    loss: str
    loss_is_bad: bool
    ranks: int
    devices: str
    labels: Sequence[str]
    more_labels: int
    node: str
    issue: IssueFiring | None
    issue_where: str
    issues_open: int
    waiting: bool
    stop: str
    since_ms: int
    spark: str = ""

    def with_spark(self, svg: str) -> Row:
        """This row with its loss as SVG."""
        return replace(self, spark=svg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A page of the list, and what there is beside it."""

    runs: Sequence[WatchedRun]
    found: Mapping[str, Found]
    needs: Mapping[str, Need]
    counts: Mapping[Filter, int]
    matching: int
    pages: int
    page: int


def overview(state: WatchState, query: Query, now_ms: int) -> Overview:
    """The runs that are asked for, in their order."""
    found = found_in(state.view)
    needs: dict[str, Need] = {}
    counts: dict[Filter, int] = dict.fromkeys(FILTERS, 0)
    chosen: list[WatchedRun] = []
    for run in state.ordered_runs():
        run_id = run.seen.run_id
        about = found.get(run_id, _NOTHING)
        need = needs[run_id] = need_of(run, about, now_ms)
        kinds = tuple(_kinds(run, need))
        for kind in kinds:
            counts[kind] += 1
        if query.only in kinds and _matches(run, about, query.words):
            chosen.append(run)
    # Of equal need the order stays: running ones by their start, the others by their end.
    chosen.sort(key=lambda run: needs[run.seen.run_id].rank)
    pages = max(1, math.ceil(len(chosen) / ROWS))
    page = min(max(1, query.page), pages)
    return Overview(
        runs=chosen[(page - 1) * ROWS : page * ROWS],
        found=found,
        needs=needs,
        counts=counts,
        matching=len(chosen),
        pages=pages,
        page=page,
    )


def found_in(view: RunsView) -> Mapping[str, Found]:
    """The open issues of each run that has some, and the stops that wait for people."""
    issues: dict[str, list[IssueFiring]] = {}
    for issue in view.issues:
        if view.open(issue):
            issues.setdefault(issue.run_id, []).append(issue)
    waiting: dict[str, list[Delivery]] = {}
    for delivery in view.deliveries:
        if delivery.waits_for_people:
            waiting.setdefault(delivery.run_id, []).append(delivery)
    return {
        run_id: Found(
            issues.get(run_id, ()),
            [one for one in issues.get(run_id, ()) if view.verdict(one) is None],
            waiting.get(run_id, ()),
        )
        for run_id in issues.keys() | waiting.keys()
    }


def need_of(run: WatchedRun, found: Found, now_ms: int) -> Need:
    """How much a run needs a person, and why."""
    grave = {issue.severity for issue in found.unanswered}
    if found.waiting:
        return Need(rank=0, why="a stop waits for your answer")
    if run.seen.running:
        if "critical" in grave:
            return Need(rank=1, why="critical, and nobody has answered")
        if stale_s(run, now_ms) is not None:
            return Need(rank=3, why="no data")
        if "warning" in grave:
            return Need(rank=5, why="a warning that nobody has answered")
        return Need(rank=_HEALTHY, why="")
    recent = now_ms - run.ended_ms < _DAY_MS
    if recent and run.state == "lost":
        return Need(rank=2, why="lost: it ended without a word")
    if recent and "critical" in grave:
        return Need(rank=4, why="critical, and nobody has answered")
    if recent and run.state == "failed":
        return Need(rank=6, why="failed")
    return Need(rank=_HEALTHY + 10, why="")


def stale_s(run: WatchedRun, now_ms: int) -> int | None:
    """For how many seconds a running run has been silent; None: it speaks, or has ended."""
    heard_ms = run.last_heard_ms
    if not run.seen.running or not 0 < heard_ms < now_ms - STALE_MS:
        return None
    return (now_ms - heard_ms) // 1000


def row_of(run: WatchedRun, overview: Overview, now_ms: int) -> Row:
    """How a run is listed."""
    view = run.seen.view
    found = overview.found.get(run.seen.run_id, _NOTHING)
    need = overview.needs[run.seen.run_id]
    rate = run.per_s(now_ms) if run.seen.running else None
    loss, step = run.loss, run.step
    labels = [] if view is None else [f"{key}={value}" for key, value in view.labels.items()]
    newest = found.newest
    return Row(
        run_id=run.seen.run_id,
        group="needs you" if need.person else "running" if run.seen.running else "over",
        state=run.state,
        stale_s=stale_s(run, now_ms),
        need=need.why,
        step="-" if step is None else f"{step:,}",
        rate="" if rate is None else rate_text(rate),
        loss="-" if loss is None else loss_text(loss),
        loss_is_bad=loss is not None and not math.isfinite(loss),
        ranks=0 if view is None else len(view.ranks),
        devices="" if view is None else devices_text(view.devices),
        labels=labels[:_LABELS],
        more_labels=max(0, len(labels) - _LABELS),
        node="" if view is None else view.node,
        issue=newest,
        issue_where="" if newest is None else first_seen(newest),
        issues_open=len(found.open),
        waiting=bool(found.waiting),
        stop="" if view is None or view.stop is None else view.stop.state.replace("_", " "),
        since_ms=run.seen.started_ms if run.seen.running else run.ended_ms,
    )


def loss_text(loss: float) -> str:
    """A loss in four digits: `0.05584`, `NaN`."""
    return f"{loss:.4g}" if math.isfinite(loss) else number_text(loss)


def rate_text(per_s: float) -> str:
    """Steps a second: `12.5/s`, `0.031/s`."""
    return f"{per_s:,.3g}/s" if per_s < 100 else f"{per_s:,.0f}/s"


def devices_text(devices: Mapping[str, int]) -> str:
    """`8 x H100`; empty on a CPU."""
    return ", ".join(f"{count} x {plain_line(name)}" for name, count in devices.items())


def _kinds(run: WatchedRun, need: Need) -> Iterable[Filter]:
    yield "all"
    if need.person:
        yield "needs"
    if run.seen.running:
        yield "running"
    elif run.state == "lost":
        yield "lost"
    else:
        yield "ended"


def _matches(run: WatchedRun, found: Found, words: Sequence[str]) -> bool:
    if not words:
        return True
    view = run.seen.view
    parts = [run.seen.run_id, run.state, *(issue.rule for issue in found.open)]
    if view is not None:
        parts += [f"{key}={value}" for key, value in view.labels.items()]
        parts += [view.node, *view.devices]
    text = "\n".join(parts).lower()
    return all(word in text for word in words)


_NOTHING: Final = Found()


def overview_content(rows: Sequence[Row], found: Overview, query: Query, trouble: str) -> Content:
    """The page of the list."""
    groups: dict[str, list[str]] = {}
    items: dict[str, tuple[str, object]] = {}
    for row in rows:
        # A row that comes into another group is another region: the frame is sent anew.
        name = f"run {row.group} {row.run_id}"
        items[name] = ("overview_row", row)
        groups.setdefault(GROUPS[row.group], []).append(name)
    return Content(
        "overview",
        {
            "trouble": trouble,
            "filters": FILTERS,
            "urls": {name: Query(query.text, name).url for name in FILTERS},
            "only": query.only,
            "counts": found.counts,
            "groups": list(groups.items()),
            "matching": found.matching,
            "page": found.page,
            "pages": found.pages,
            "previous": replace(query, page=found.page - 1).url,
            "next": replace(query, page=found.page + 1).url,
        },
        items,
    )
