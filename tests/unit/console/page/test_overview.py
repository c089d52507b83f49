"""In which order runs are listed, which are, and how each is told."""

from __future__ import annotations

import math

import pytest

from support.records.issues import NOW_MS, TOPICS, delivery, feedback, issue, view
from tocsin.console.page.overview import (
    ROWS,
    STALE_MS,
    Filter,
    Query,
    overview,
    overview_content,
    row_of,
)
from tocsin.console.page.sparks import spark_svg
from tocsin.console.page.templating import rendered
from tocsin.console.watch.state import WatchState
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.feedback import FeedbackAcknowledged
from tocsin.schemas.records.run_view import RankView, RunView

HOUR_MS = 3_600_000
EVERYTHING = Query()


def run(name: str, *, ended: bool = False, heard_ms: int = NOW_MS, **changes: object) -> RunView:
    fields: dict[str, object] = {
        "started_ms": NOW_MS - HOUR_MS,
        "ranks": (RankView(rank=0, last_heard_ms=heard_ms),),
    }
    if ended:
        fields |= {"ended_ms": NOW_MS - 1_000, "outcome": "completed"}
    return view(name, ended=ended).model_copy(update=fields | changes)


def state_of(*data: Data) -> WatchState:
    state = WatchState(TOPICS, limit=20_000)
    for one in data:
        state.view.add(one, append_ms=NOW_MS)
    return state


def names(state: WatchState, query: Query = EVERYTHING) -> list[str]:
    return [one.seen.run_id for one in overview(state, query, NOW_MS).runs]


CRITICAL = issue("critical")
ASKED = issue("asks", "loss_diverged")
ALL = (
    run("fine"),
    run("ended", ended=True),
    run("warned"),
    issue("warned", "loss_spike", severity="warning"),
    run("silent", heard_ms=NOW_MS - STALE_MS - 1_000),
    run("failed", ended=True, outcome="failed"),
    run("lost", state="lost"),
    run("critical"),
    CRITICAL,
    run("asks"),
    ASKED,
    delivery(ASKED, "stop", approval={"why": "mode: ask", "until_ms": NOW_MS + HOUR_MS}),
)


def test_what_needs_a_person_is_first() -> None:
    assert names(state_of(*ALL)) == [
        "asks", "critical", "lost", "silent", "warned", "failed", "fine", "ended",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("only", "count"), [("all", 8), ("needs", 6), ("running", 5), ("ended", 2), ("lost", 1)]
)
def test_each_filter_has_its_runs_and_says_how_many(only: Filter, count: int) -> None:
    found = overview(state_of(*ALL), Query(only=only), NOW_MS)
    assert len(found.runs) == found.matching == found.counts[only] == count


def test_an_answered_issue_needs_nobody_but_is_still_named() -> None:
    state = state_of(run("critical"), CRITICAL, feedback(FeedbackAcknowledged, CRITICAL))
    found = overview(state, Query(), NOW_MS)
    assert found.counts["needs"] == 0
    row = row_of(found.runs[0], found, NOW_MS)
    assert row.issue is not None
    assert row.issue.issue_id == CRITICAL.issue_id


def test_what_ended_long_ago_needs_nobody() -> None:
    old = run("old", ended=True, ended_ms=NOW_MS - 30 * HOUR_MS, outcome="failed")
    assert overview(state_of(old), Query(), NOW_MS).counts["needs"] == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["a", "b"]),
        ("vision", ["a"]),
        ("TEAM=vision node", ["a"]),
        ("team=", ["a", "b"]),
        ("nonfinite", ["b"]),
        ("h100", ["b"]),
        ("vision speech", []),
        ("running", ["a", "b"]),
    ],
)
def test_the_search_finds_names_labels_nodes_devices_and_rules(text: str, found: list[str]) -> None:
    state = state_of(
        run("a", labels={"team": "vision"}, node="node-1"),
        run("b", labels={"team": "speech"}, devices={"H100": 8}),
        issue("b"),
    )
    assert sorted(names(state, Query(text))) == found


def test_many_runs_are_pages_and_each_run_is_on_one_of_them() -> None:
    state = state_of(*(run(f"r{n:05}", ended=True) for n in range(2 * ROWS + 10)))
    seen: list[str] = []
    for page in (1, 2, 3):
        found = overview(state, Query(page=page), NOW_MS)
        assert (found.page, found.pages) == (page, 3)
        seen += [one.seen.run_id for one in found.runs]
    assert len(set(seen)) == len(seen) == 2 * ROWS + 10
    assert overview(state, Query(page=99), NOW_MS).page == 3


def test_a_query_is_an_address() -> None:
    assert Query().url == "/"
    assert Query("a b", "needs", 2).url == "/?q=a+b&only=needs&page=2"


def test_a_row_tells_what_it_knows() -> None:
    state = state_of(
        run(
            "r1", last_step=1_200, last_loss=math.nan, devices={"H100": 8},
            labels={f"k{n}": "v" for n in range(9)}, heard_ms=NOW_MS - 41_000,
        ),
        issue("r1"),
        issue("r1", "loss_spike", severity="warning"),
    )  # fmt: skip
    seen = state.run("r1")
    assert seen is not None
    seen.progress.views.advance(1_200, math.nan, NOW_MS)
    found = overview(state, Query(), NOW_MS)
    row = row_of(found.runs[0], found, NOW_MS)
    assert (row.step, row.loss, row.loss_is_bad) == ("1,200", "NaN", True)
    assert (row.devices, row.stale_s, row.issues_open) == ("8 x H100", 41, 2)
    assert (len(row.labels), row.more_labels) == (6, 3)
    assert row.issue is not None
    assert row.issue.rule == "nonfinite", "the gravest"


def test_a_run_that_comes_into_another_group_is_another_region() -> None:
    def regions(state: WatchState) -> list[str]:
        found = overview(state, Query(), NOW_MS)
        rows = [row_of(one, found, NOW_MS) for one in found.runs]
        return list(rendered(overview_content(rows, found, Query(), ""), csrf="x").regions)

    before = regions(state_of(run("r1")))
    assert regions(state_of(run("r1", last_step=3))) == before
    assert regions(state_of(run("r1"), issue("r1"))) != before


def test_a_sparkline_needs_two_points_and_shows_nan() -> None:
    assert spark_svg((1.0,)) == ""
    assert "gap" in spark_svg((1.0, 0.5, math.nan))
