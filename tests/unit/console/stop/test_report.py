"""What stops did, or would have done: by rule, once for each training."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from support.issue_records import NOW_MS, delivery, feedback, issue, runs_view, view
from tocsin.console.stop.report import report_json, report_table, stops_of_rules
from tocsin.schemas.records.deliveries import Delivery, DeliveryState, HeldBy
from tocsin.schemas.records.feedback import FeedbackAcknowledged, FeedbackFalseAlarm
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import RankView, RunView

HOUR_MS = 3_600_000


def stop(
    about: IssueFiring, state: DeliveryState = "suppressed", held: HeldBy | None = "shadow"
) -> Delivery:
    return delivery(about, "stop", state=state, held=held, reason="a test says so")


def ended(run: str, after_h: float, *, ranks: int) -> RunView:
    return view(run, ended=True).model_copy(
        update={
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
    assert rule.rank_hours == pytest.approx(4 * 2.5 + 1.0)


def test_a_run_that_still_runs_counts_to_what_was_last_heard() -> None:
    running = view("run-1").model_copy(
        update={"ranks": (RankView(rank=0, last_heard_ms=NOW_MS + HOUR_MS),)}
    )
    (rule,) = stops_of_rules(runs_view(running, issue("run-1"), stop(issue("run-1"))))

    assert rule.rank_hours == pytest.approx(1.0)


def test_for_people_and_for_programs() -> None:
    rules = stops_of_rules(runs_view(ended("run-1", 2.0, ranks=2), stop(issue("run-1"))))

    out = io.StringIO()
    Console(file=out, width=100).print(report_table(rules))
    assert out.getvalue().split()[-7:] == ["nonfinite", "0", "1", "0", "0", "0", "4.0"]
    facts = json.loads(report_json(rules))
    assert facts["version"] == 1
    assert facts["rules"][0]["rank_hours"] == 4.0
    assert "estimate" in facts["method"]
