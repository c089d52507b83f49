"""What stops did, or would have done: by rule, once for each training."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from support.records.issues import NOW_MS, delivery, feedback, issue, runs_view, view
from tocsin.console.stop.report import report_facts, report_table, stops_of_rules
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.deliveries import Delivery, DeliveryState, HeldBy
from tocsin.schemas.records.feedback import FeedbackAcknowledged, FeedbackFalseAlarm
from tocsin.schemas.records.goodput import Outlook
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RankView, RunView

HOUR_MS = 3_600_000


def stop(
    about: IssueFiring, state: DeliveryState = "suppressed", held: HeldBy | None = "shadow"
) -> Delivery:
    return delivery(about, "stop", state=state, held=held, reason="a test says so")


def ended(run: str, after_h: float, *, ranks: int) -> RunView:
    return view(run, ended=True).model_copy(
        update={
            "world_size": ranks,
            "ended_ms": NOW_MS + round(after_h * HOUR_MS),
            "ranks": tuple(RankView(rank=n, last_heard_ms=NOW_MS) for n in range(ranks)),
        }
    )


def test_each_training_counts_once_and_the_rest_of_its_time_is_added_up() -> None:
    first, again = issue("run-1"), issue("run-1", episode="2")
    limited, stopped = issue("run-2"), issue("run-3")
    known = runs_view(
        ended("run-1", 2.5, ranks=4),
        ended("run-2", 1.0, ranks=1),
        ended("run-3", 0.1, ranks=8),
        *(first, again, limited, stopped),
        stop(first),
        stop(again),
        stop(limited, held="limit"),
        stop(stopped, "delivered", None),
        # It was too late for these: nothing was decided against them.
        stop(issue("run-4"), "suppressed", None),
        feedback(FeedbackFalseAlarm, first),
        feedback(FeedbackAcknowledged, stopped),
    )

    (rule,) = stops_of_rules(known)

    assert (rule.rule, rule.stopped, rule.shadow, rule.not_sent) == ("nonfinite", 1, 1, 1)
    assert (rule.confirmed, rule.false_alarms) == (1, 1)
    assert rule.would_save_hours == pytest.approx(4 * 2.5 + 1.0)
    assert rule.wrong_hours == pytest.approx(4 * 2.5)
    assert (rule.saved_hours, rule.saved_unknown) == (0, 1)
    assert rule.wrong_share == 0.5


def test_what_stops_have_saved_and_what_it_costs() -> None:
    planned = {
        "outcome": "stopped",
        "devices": {"NVIDIA H100": 8},
        "last_step": 999,
        "outlook": Outlook(total_steps=4_600, step_s=1.0),
    }
    right, wrong = issue("run-1"), issue("run-2")
    known = runs_view(
        ended("run-1", 0.0, ranks=8).model_copy(update=planned),
        ended("run-2", 0.5, ranks=8).model_copy(update={"devices": {"NVIDIA H100": 8}}),
        *(right, wrong, stop(right, "delivered", None), stop(wrong)),
        feedback(FeedbackFalseAlarm, wrong),
    )
    prices = PricesConfig(currency="EUR", per_hour={"H100": 2.0})

    (rule,) = rules = stops_of_rules(known, prices)

    assert rule.saved_hours == pytest.approx(8.0)
    assert [rule.would_save_hours, rule.wrong_hours] == pytest.approx([4.0, 4.0])
    assert rule.cost == pytest.approx(24.0)
    out = io.StringIO()
    Console(file=out, width=120).print(report_table(rules, prices))
    header, row = out.getvalue().splitlines()
    assert header.split()[-4:] == ["would", "save", "wrong", "EUR"]
    assert row.split()[-10:] == ["1", "(100", "%)", "8.0", "h", "4.0", "h", "4.0", "h", "24"]
    assert report_facts(rules, prices)["currency"] == "EUR"


@pytest.mark.parametrize(
    ("outcome", "stopped"),
    [("completed", 0), ("failed", 0), ("stopped", 1), ("interrupted", 1), (None, 1)],
)
def test_a_run_that_ended_by_itself_was_not_stopped(outcome: str | None, stopped: int) -> None:
    run = ended("run-1", 1.0, ranks=1).model_copy(update={"outcome": outcome})
    rules = stops_of_rules(runs_view(run, issue("run-1"), stop(issue("run-1"), "delivered", None)))
    assert sum(rule.stopped for rule in rules) == stopped


def test_a_run_that_still_runs_counts_to_what_was_last_heard() -> None:
    running = view("run-1").model_copy(
        update={"ranks": (RankView(rank=0, last_heard_ms=NOW_MS + HOUR_MS),)}
    )
    (rule,) = stops_of_rules(runs_view(running, issue("run-1"), stop(issue("run-1"))))

    assert rule.would_save_hours == pytest.approx(1.0)


def test_for_people_and_for_programs() -> None:
    rules = stops_of_rules(runs_view(ended("run-1", 2.0, ranks=2), stop(issue("run-1"))))

    out = io.StringIO()
    Console(file=out, width=100).print(report_table(rules))
    row = ["nonfinite", "0", "1", "0", "0", "0", "0.0", "h", "4.0", "h", "0.0", "h"]
    assert out.getvalue().split()[-12:] == row
    facts = json.loads(json.dumps(report_facts(rules)))
    assert facts["version"] == 1
    assert facts["rules"][0]["would_save_hours"] == 4.0
    assert "estimate" in facts["method"]
