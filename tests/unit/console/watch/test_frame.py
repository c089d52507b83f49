"""The picture of `tocsin watch`, at several sizes."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from itertools import product

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from support.records.issues import (
    NOW_MS,
    TOPICS,
    incarnation,
    issue,
    issue_record,
    record,
    view,
    view_record,
)
from support.records.steps import steps
from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.console.watch.frame import Frame, Situation, draw
from tocsin.console.watch.layout import Plan, fit
from tocsin.console.watch.state import WatchState
from tocsin.console.watch.text import grid
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RankView, RunView, StopView
from tocsin.schemas.records.runs import CaptureFigures
from tocsin.schemas.records.wire import Meta
from tocsin.schemas.topics import issue_partition

HERE = Situation("embedded:/home/ana/gpt/.tocsin/bus.db")


def put(state: WatchState, out: Outgoing, at_ms: int = NOW_MS) -> None:
    state.apply(Record(out.partition, 0, at_ms, out.key, out.value, out.headers))


def delivery(run: str, action: str, **changes: object) -> Outgoing:
    made = Delivery(
        delivery_id=f"{run}-{action}",
        issue_id=issue(run).issue_id,
        run_id=run,
        incarnation=incarnation(run),
        rule="nonfinite",
        issue_state="firing",
        action=action,
        kind="webhook",
        state="delivered",
        reason="204 No Content",
        created_ms=NOW_MS,
        updated_ms=NOW_MS,
        give_up_ms=NOW_MS,
    ).model_copy(update=changes)
    event = Event.wrap(made, id=made.key, source="/actions", time_ms=NOW_MS)
    return record(event, TOPICS.actions, issue_partition(run), made.key)


def found(run: str = "run-1", episode: str = "1") -> IssueFiring:
    return issue(run, episode=episode).model_copy(update={"onset_ms": NOW_MS - 5_000})


def losing(run: str, step: int, loss: float, **changes: object) -> RunView:
    told = {
        "last_step": step,
        "last_loss": loss,
        "started_ms": NOW_MS - 90_000,
        "node": "node-17",
        "labels": {"team": "vision"},
        "ranks": (RankView(rank=0, last_step=step, last_heard_ms=NOW_MS - 2_000),),
        "rules": {
            "nonfinite": "in_progress",
            "loss_spike": "in_progress",
            "x": "waiting_for_input",
        },
        "capture": CaptureFigures(overhead_percent=0.31, records=9, dropped=0),
    }
    return view(run).model_copy(update=told | changes)


def one_run(loss: float = 2.0) -> WatchState:
    state = WatchState(TOPICS)
    for i in range(30):
        told = losing("run-1", 10 * i, 5.0 - i / 10 if i < 29 else loss)
        put(state, view_record(told), NOW_MS - 1_000 * (29 - i))
    return state


def a_bad_run() -> WatchState:
    state = one_run(math.nan)
    stop = StopView(state="exited", command_id="c", step=3, how="edge", exit_code=79)
    told = losing(
        "run-1", 291, math.nan, state="ended", outcome="stopped", exit_code=79, stop=stop,
        issues=1, ended_ms=NOW_MS - 5_000, rules={"nonfinite": "issues_found", "x": "stopped"},
    )  # fmt: skip
    put(state, view_record(told))
    put(state, issue_record(found()))
    put(state, delivery("run-1", "hook"))
    put(state, delivery("run-1", "mail", state="pending", reason="503 Service Unavailable",
                        attempts=2, next_attempt_ms=NOW_MS + 12_000))  # fmt: skip
    return state


def many(runs: int, issues: int = 0, running: int = 3) -> WatchState:
    state = WatchState(TOPICS)
    for i in range(runs):
        name = f"a-rather-long-name-of-a-run-{i:03}"
        changes = {} if i < running else {"state": "ended", "ended_ms": NOW_MS - 1_000 * i}
        put(state, view_record(losing(name, 100_000 + i, 1.0, **changes)))
        if i < issues:
            put(state, issue_record(found(name, episode=str(i))))
            put(state, delivery(name, "a-receiver"))
    return state


def picture(state: WatchState, width: int = 80, height: int = 24, at: Situation = HERE) -> Frame:
    frame = draw(state, at, now_ms=NOW_MS, width=width, height=height)
    lines = frame.plain.split("\n")
    assert len(lines) <= height, frame.plain
    assert max(cell_len(line) for line in lines) <= width, frame.plain
    return frame


def test_a_healthy_run_says_how_far_it_is() -> None:
    text = picture(one_run()).plain
    for words in (
        "1 running, 0 ended", "run-1", "running", "290", "10", "2", "90 s", "█", "▁",
        "rules: 2 in progress, 1 waiting for input", "team=vision", "overhead 0.3 %",
        "issues  none so far", "deliveries  none so far",
    ):  # fmt: skip
        assert words in text, text


def test_a_run_gone_bad_shows_what_was_found_and_done() -> None:
    text = picture(a_bad_run()).plain
    for words in (
        "0 running, 1 ended", "stopped", "nan", "x", "stop exited cleanly at step 3, exit code 79",
        "found by nonfinite", "issues  1 open", "5 s  critical  nonfinite  step 3",
        "NaN in the loss at step 1", "deliveries  1 pending, 1 delivered", "204 No Content",
        "attempt 3 in 12 s: 503 Service Unavailable",
    ):  # fmt: skip
        assert words in text, text


@pytest.fixture(scope="module")
def states() -> list[WatchState]:
    return [WatchState(TOPICS), one_run(), a_bad_run(), many(40, 20), many(100, 0, 60)]


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 120, 250])
@pytest.mark.parametrize("height", [1, 3, 8, 24, 60])
def test_it_fits_each_size(states: list[WatchState], width: int, height: int) -> None:
    for state in states:
        for at in (HERE, replace(HERE, trouble="bus away for 3 s, trying again: it is gone")):
            picture(state, width, height, at)


def test_a_narrow_picture_keeps_name_state_and_loss() -> None:
    text = picture(a_bad_run(), width=40).plain
    for words in ("run-1", "stopped", "nan", "nonfinite", "hook"):
        assert words in text, text


def test_many_runs_are_cut_with_the_running_ones_first() -> None:
    text = picture(many(40, 20, running=3)).plain
    lines = text.split("\n")
    shown = [line for line in lines if line.startswith("a-rather-lon")]
    assert [line.split()[:2] for line in shown[:3]] == [
        [f"a-rather-lon…of-a-run-{i:03}", "running"] for i in range(3)
    ]
    assert f"… and {40 - len(shown)} more runs" in text
    assert "issues  20 open" in text
    assert "more issues" in text
    assert "deliveries  20 delivered" in text


def test_the_least_important_goes_first() -> None:
    heights = range(40, 6, -1)
    pictures = [picture(many(5, 5), height=height).plain for height in heights]

    def last_with(words: str) -> int:
        return min(h for h, text in zip(heights, pictures, strict=True) if words in text)

    assert last_with("issues  5 open") < last_with("deliveries  5 delivered")
    assert last_with("run-002  running") <= 10
    assert last_with("critical") < last_with("rules: 2 in progress")


def test_all_is_shown_where_there_is_room() -> None:
    text = picture(many(30, 30), width=120, height=1_000).plain
    assert "more" not in text
    assert text.count("NaN in the loss") == 30


def test_nothing_yet_says_what_it_waits_for() -> None:
    assert "no runs yet; waiting for: tocsin run" in picture(WatchState(TOPICS)).plain
    assert "no run gpt-7 yet" in picture(WatchState(TOPICS, "gpt-7")).plain
    kafka = Situation("kafka://kafka-1:9092")
    assert "and tocsin rules" in picture(WatchState(TOPICS), at=kafka).plain


def test_a_run_that_goes_on_while_no_rules_worker_does_is_pointed_at() -> None:
    state = one_run()
    for second in range(0, 80, 10):
        state.apply(steps("run-1", {300 + second: 1.0}, at_ms=NOW_MS + 1_000 * second))
        now_ms = NOW_MS + 1_000 * second
        text = draw(state, HERE, now_ms=now_ms, width=120, height=24).plain
        assert ("does 'tocsin rules' run?" in text) == (second > 60), second


def test_trouble_is_said_and_the_rest_stays() -> None:
    at = replace(HERE, trouble="bus away for 3 s, trying again: /x/bus.db was deleted")
    text = picture(one_run(), at=at).plain
    assert "/x/bus.db was deleted" in text
    assert "run-1" in text


def test_records_of_another_release_are_said_to_be_unread() -> None:
    state = one_run()
    place = Partition(TOPICS.issues, 0)
    put(state, Outgoing(place, b"k", b"{}", Meta("tocsin.of.next.year").headers()))
    assert "1 record could not be read" in picture(state).plain


def test_a_run_that_is_silent_says_so() -> None:
    state = one_run()
    frame = draw(state, HERE, now_ms=NOW_MS + 60_000, width=80, height=24)
    assert "no data for 62 s" in frame.plain


def test_text_of_a_run_cannot_steer_the_terminal() -> None:
    state = one_run()
    nasty = issue().model_copy(update={"reason": "\x1b[2J\x1b]0;owned\x07 [bold]and\nso on"})
    put(state, issue_record(nasty))
    told = losing("run-1", 400, 1.0, labels={"a\x1b[31m": "b\r"})
    put(state, view_record(told))
    text = picture(state, width=120).plain
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]and so on" in text


def test_wide_characters_are_counted_as_wide() -> None:
    state = one_run()
    put(state, issue_record(issue().model_copy(update={"reason": "損失は発散しました" * 20})))
    picture(state, width=41)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_rich_shows_it_line_by_line_in_colour_and_without(
    states: list[WatchState], width: int
) -> None:
    for state in states:
        frame = picture(state, width)
        shown = {}
        for kind in ("terminal", "no colour", "pipe"):
            out = io.StringIO()
            console = Console(
                file=out,
                width=width,
                height=24,
                force_terminal=kind != "pipe",
                color_system="256" if kind != "pipe" else None,
                no_color=kind == "no colour",
                legacy_windows=False,
            )
            console.print(frame, end="")
            shown[kind] = out.getvalue()
        assert shown["pipe"].rstrip("\n").split("\n") == [line.plain for line in frame.lines]
        assert "\x1b" not in shown["pipe"]
        assert re.search(r"\x1b\[[0-9;]*3[0-7]", shown["no colour"]) is None
        assert re.sub(r"\x1b\[[0-9;]*m", "", shown["terminal"]) == shown["pipe"]
    assert "\x1b[1;31mnan" in shown_in_colour(a_bad_run(), width)


def shown_in_colour(state: WatchState, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="standard")
    console.print(picture(state, width), end="")
    return out.getvalue()


def test_a_plan_is_never_higher_than_it_may_be() -> None:
    for runs, others, height in product((0, 1, 4, 50), (0, 1, 6, 90), range(8, 60)):
        there = Plan(runs=runs, running=runs // 2, issues=others, deliveries=others, fixed=3)
        plan = fit(there, height)
        assert plan.lines <= height or plan.run_rows <= 1, (runs, others, height, plan)


def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    rows = [(Text("a"), Text(""), Text("longer text")), (Text("bb"), Text(""), Text("x"))]
    assert [line.plain for line in grid(rows, (5, 5, 6))] == ["a   longe…", "bb  x"]
