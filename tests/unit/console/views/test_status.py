"""What `tocsin status` and `tocsin bus show` print."""

from __future__ import annotations

import io
import json

from rich.console import Console

from support.records.issues import NOW_MS, issue, runs_view
from tocsin.bus.port import TopicState
from tocsin.console.views.issues import IssueFilter, first_seen, issue_table
from tocsin.console.views.status import ago, print_status, status_json
from tocsin.console.views.topics import print_topics, topics_json
from tocsin.console.views.why import story_lines, story_of
from tocsin.schemas.records.deliveries import Attempt, Delivery
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import time_text
from tocsin.schemas.topics import Topics

RUN = RunView(
    run_id="run-1",
    incarnation="i",
    state="running",
    started_ms=NOW_MS - 90_000,
    last_step=1234,
    last_loss=float("nan"),
    issues=1,
)
DELIVERY = Delivery(
    delivery_id="d",
    issue_id=issue().issue_id,
    run_id="run-1",
    incarnation="i",
    rule="nonfinite",
    issue_state="firing",
    action="hook",
    kind="webhook",
    state="delivered",
    reason="204 No Content",
    created_ms=NOW_MS,
    updated_ms=NOW_MS,
    give_up_ms=NOW_MS,
    event={"data": {"secret": "not shown"}},
)
VIEW = runs_view(RUN, issue(), DELIVERY)


def printed(view: RunsView) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    print_status(view, bus_url="embedded:x.db", now_ms=NOW_MS, console=console)
    return out.getvalue()


def test_a_run_its_issues_and_what_was_done_are_shown() -> None:
    text = printed(VIEW)
    for word in ("run-1", "running", "1,234", "nan", "90 s ago", "critical", "hook: delivered"):
        assert word in text
    assert "step 3" in text


def test_how_the_rules_stand_is_told_of_the_newest_run() -> None:
    rules = {
        "loss_spike": "issues_found",
        "nonfinite": "in_progress",
        "overfit": "waiting_for_input",
        "dead_relu": "waiting_for_input",
        "mine": "error",
    }
    runs = [
        RUN.model_copy(update={"run_id": f"run-{i}", "started_ms": NOW_MS + i, "rules": rules})
        for i in range(7)
    ]
    lines = printed(runs_view(*runs, issue())).splitlines()
    told = [line for line in lines if line.startswith("rules of")]
    assert told == [
        "rules of run-6: 1 in progress, 2 waiting for input, found by loss_spike, failed mine"
    ]
    assert "rules and times of another run: tocsin status RUN" in lines
    both = printed(runs_view(*runs[:2], issue())).splitlines()
    assert len([line for line in both if line.startswith("rules of")]) == 2
    assert not any("another run" in line for line in both)
    assert not any("rules of" in line for line in printed(VIEW).splitlines())


def test_text_from_a_run_is_no_markup() -> None:
    odd = issue().model_copy(update={"reason": "[red]not[/] a colour"})
    assert "[red]not[/] a colour" in printed(runs_view(RUN, odd))


def test_status_lists_what_the_issues_list() -> None:
    """Line for line, but for the ids: the last columns of both."""
    out = io.StringIO()
    Console(file=out, width=200).print(issue_table(VIEW, IssueFilter(), ids=True))
    listed = [line.split()[1:] for line in out.getvalue().splitlines()]
    assert listed == [line.split() for line in printed(VIEW).splitlines()[2:4]]


def test_an_empty_bus_says_what_to_try() -> None:
    assert "tocsin run" in printed(runs_view())


def test_json_has_the_same_facts_without_payloads() -> None:
    facts = json.loads(status_json(VIEW))
    assert facts["version"] == 1
    assert facts["runs"][0]["last_loss"] == "NaN"
    assert facts["issues"][0]["state"] == "firing"
    assert facts["deliveries"][0]["state"] == "delivered"
    assert "not shown" not in status_json(VIEW)


def test_where_an_issue_began_in_few_words() -> None:
    assert first_seen(issue()) == "step 3"
    several = issue().model_copy(update={"world_size": 4, "first_rank": 2})
    assert first_seen(several) == "step 3, rank 2"
    timed = issue().model_copy(update={"first_step": None, "onset_ms": 3_600_000})
    assert first_seen(timed) == "01:00:00 UTC"


def test_how_long_ago_has_one_unit() -> None:
    seconds = {0: "0 s", 119: "119 s", 120: "2 min", 7_200: "2 h", 200_000: "2 d"}
    for age, text in seconds.items():
        assert ago(0, age * 1000) == f"{text} ago"


def test_topics_that_are_missing_or_differ_say_what_to_do() -> None:
    specs = Topics().specs()
    states = [
        TopicState(specs[0], exists=True, records=5, size_bytes=2_500_000),
        TopicState(specs[1], exists=True, records=0, size_bytes=None, differs=("retention [x]",)),
        TopicState(specs[2], exists=False, records=0, size_bytes=None),
    ]
    out = io.StringIO()
    print_topics("kafka://a:1", states, Console(file=out, width=200))
    text = out.getvalue()
    assert "2.5 MB" in text
    assert "tocsin.state.v1: retention [x]" in text
    assert "tocsin bus init" in text
    facts = json.loads(topics_json("kafka://a:1", states))
    narrow = io.StringIO()
    print_topics("kafka://a:1", states, Console(file=narrow, width=80))
    assert all(state.spec.name in narrow.getvalue() for state in states)
    assert len(narrow.getvalue().splitlines()) == len(text.splitlines())
    assert [topic["exists"] for topic in facts["topics"]] == [True, True, False]


def test_a_receiver_that_is_left_alone_is_shown_with_what_waits_for_it() -> None:
    tried = Attempt(at_ms=NOW_MS, result="503 Service Unavailable", retry=True, duration_ms=20)
    failed = DELIVERY.model_copy(
        update={
            "state": "pending",
            "reason": "503 Service Unavailable",
            "attempts": 1,
            "last_attempts": (tried,),
            "next_attempt_ms": NOW_MS + 500,
            "suspended_until_ms": NOW_MS + 30_000,
        }
    )
    waits = failed.model_copy(
        update={"delivery_id": "e", "issue_times": 2, "last_attempts": (), "attempts": 0}
    )
    view = runs_view(RUN, issue(), failed, waits)
    line = "receiver hook fails, its circuit is open: 2 deliveries wait; one is attempted after "
    assert f"{line}{time_text(NOW_MS + 30_000)}" in printed(view)
    assert json.loads(status_json(view))["suspended_receivers"] == {
        "hook": {"until_ms": NOW_MS + 30_000, "waiting": 2}
    }
    story = "\n".join(map(str, story_lines(story_of(view, {}, view.issues[0]))))
    assert line in story

    later = tried.model_copy(update={"at_ms": NOW_MS + 30_100})
    works = waits.model_copy(
        update={"state": "delivered", "last_attempts": (later,), "suspended_until_ms": None}
    )
    assert "circuit" not in printed(runs_view(RUN, issue(), failed, works))
