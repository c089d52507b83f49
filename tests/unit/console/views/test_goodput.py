"""Where the time of a run went, and what a stop has saved, for people and for programs."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from support.records.issues import NOW_MS, runs_view, view
from tocsin.console.views.goodput import duration_text, goodput_line
from tocsin.console.views.status import print_status, status_json
from tocsin.console.views.why import run_story_facts, run_story_lines
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.goodput import Goodput, Outlook
from tocsin.schemas.records.run_view import StopView

GOODPUT = Goodput(
    wall_s=11_520, incarnations=2, productive_s=8_000, redone_s=2_000, starting_s=1_500, down_s=20
)
STOPPED = view(
    ended=True, stop=StopView(state="exited", command_id="d-stop", states={"exited": NOW_MS})
).model_copy(
    update={
        "outcome": "stopped",
        "started_ms": NOW_MS - 1_000,
        "ended_ms": NOW_MS,
        "last_step": 999,
        "devices": {"NVIDIA H100": 8},
        "goodput": GOODPUT,
        "outlook": Outlook(total_steps=4_600, step_s=1.0),
    }
)
PRICES = PricesConfig(per_hour={"H100": 2.0})
SAVED = "an estimated 8 GPU-hours (8 x H100, 3,600 of 4,600 steps left at 1 s each), about 16 USD"


def test_the_parts_of_the_time_in_one_line() -> None:
    assert goodput_line(GOODPUT) == (
        "3.2 h in 2 incarnations: 69 % productive, 17 % lost and redone, 13 % starting, 0.17 % down"
    )
    assert goodput_line(Goodput(wall_s=5, starting_s=5)) == "5 s: 0 % productive, 100 % starting"
    assert goodput_line(Goodput()) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.04 s"), (119, "119 s"), (600, "10 min"), (11_520, "3.2 h"), (216_000, "2.5 d")],
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_status_tells_both() -> None:
    known = runs_view(STOPPED)
    out = io.StringIO()
    console = Console(file=out, width=300)
    print_status(known, bus_url="embedded:x", now_ms=NOW_MS, console=console, prices=PRICES)

    assert f"time of run-1: {goodput_line(GOODPUT)}\n" in out.getvalue()
    assert f"saved by the stop of run-1: {SAVED}\n" in out.getvalue()
    (facts,) = json.loads(status_json(known, prices=PRICES))["runs"]
    assert facts["goodput"]["redone_s"] == 2_000
    assert facts["saved"]["estimate"] == pytest.approx(8.0)


def test_why_tells_what_the_stop_has_saved() -> None:
    lines = [line.plain for line in run_story_lines(STOPPED, {}, PRICES)]
    assert f"  saved: {SAVED}" in lines
    stop = json.loads(json.dumps(run_story_facts(STOPPED, {}, PRICES)))["stop"]
    assert stop["saved"]["cost"] == pytest.approx(16.0)

    unknown = STOPPED.model_copy(update={"outlook": None})
    lines = [line.plain for line in run_story_lines(unknown, {}, PRICES)]
    why = "neither the planned steps nor a time limit of the job are known"
    assert f"  saved: not known: {why}" in lines
