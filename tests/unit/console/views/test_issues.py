"""What `tocsin issues` and `tocsin why` print, and which issue a person means."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from support.records.issues import (
    NOW_MS,
    delivery,
    feedback,
    incarnation,
    issue,
    runs_view,
    view,
)
from tocsin.console.views.issues import IssueFilter, issue_table, issues_json, no_issues_line
from tocsin.console.views.precision import precision_json, precision_of_rules, precision_table
from tocsin.console.views.selection import choose_issue, choose_run
from tocsin.console.views.why import (
    Story,
    run_story_facts,
    run_story_lines,
    story_facts,
    story_lines,
    story_of,
)
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.deliveries import Attempt, Delivery
from tocsin.schemas.records.feedback import (
    FeedbackAcknowledged,
    FeedbackFalseAlarm,
    FeedbackResolved,
)
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, IssueOngoing, Series, Subject
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView
from tocsin.schemas.records.stops.commands import StopRequested

LOSS = issue(rule="loss_spike", severity="warning", resolved=True)
FIRING = issue().model_copy(
    update={
        "step": 1200,
        "subject": Subject(kind="tensor", name="blocks.3.qkv", collection="gradients"),
        "first_step": 1200,
        "first_rank": 1,
        "world_size": 2,
        "onset_ms": NOW_MS,
        "remedy": "Lower the learning rate.",
        "consequence_of": LOSS.issue_id,
        "last_good_checkpoint": Checkpoint(path="/data/1000.pt", step=1000),
        "evidence": Evidence(
            facts=(Fact(name="nans", value=12.0), Fact(name="ratio", value=41.25, limit=20.0)),
            series=Series(
                name="loss", unit="percent", steps=(7, 8, 9), values=(1.0, 2.0, float("nan")),
                limit=1.5,
            ),
            followed=9,
            also=("a", "b"),
            explanation="The first in backward order.",
        ),
    }
)  # fmt: skip
NAN = IssueOngoing.model_validate(FIRING.model_dump() | {"step": 1300, "at_ms": NOW_MS + 300_000})
STOP = Delivery(
    delivery_id="d-stop", issue_id=NAN.issue_id, run_id="run-1", incarnation=NAN.incarnation,
    rule="nonfinite", issue_state="firing", action="stop", kind="stop", state="delivered",
    reason="the job left", decided_by="tocsin.yaml:14:3", created_ms=NOW_MS, updated_ms=NOW_MS,
    give_up_ms=NOW_MS, attempts=1,
)  # fmt: skip
HOOK = STOP.model_copy(
    update={
        "delivery_id": "d-hook", "action": "hook", "state": "pending", "reason": "503",
        "attempts": 2, "next_attempt_ms": NOW_MS + 60_000,
        "last_attempts": (Attempt(at_ms=NOW_MS, result="503 Busy", retry=True, duration_ms=12),),
        "event": {"data": {"secret": "not shown"}},
    }
)  # fmt: skip
COMMAND = StopRequested(
    command_id="d-stop", run_id="run-1", incarnation=incarnation(), issue_id=NAN.issue_id,
    reason="NaN", requested_by="actions@node-1", requested_ms=NOW_MS, not_after_ms=NOW_MS + 1,
    nonce="n",
)  # fmt: skip
COMMANDS = {"d-stop": CommandSeen(COMMAND, NOW_MS + 100)}
STOPPED = StopView(
    state="exited", command_id="d-stop", issue_id=NAN.issue_id, step=1203, how="edge",
    exit_code=79,
    states={"acknowledged": NOW_MS + 104, "left": NOW_MS + 110, "exited": NOW_MS + 250},
)  # fmt: skip
VIEW = runs_view(
    view(ended=True, stop=STOPPED).model_copy(update={"outcome": "stopped"}),
    LOSS, FIRING, NAN, STOP, HOOK,
)  # fmt: skip


def listed(wanted: IssueFilter, known: RunsView = VIEW) -> list[str]:
    table = issue_table(known, wanted)
    out = io.StringIO()
    Console(file=out, width=300).print(table)
    return [line.strip() for line in out.getvalue().splitlines()]


def told(story: Story) -> str:
    return "\n".join(line.plain for line in story_lines(story))


def test_what_people_answered_is_shown_and_closes_an_issue() -> None:
    acked = feedback(FeedbackAcknowledged, NAN)
    known = runs_view(view(), LOSS, FIRING, NAN, acked)
    assert "ongoing, acknowledged" in listed(IssueFilter(state="open"), known)[1]
    assert "acknowledged by ana@node" in told(story_of(known, {}, NAN))

    known.add(feedback(FeedbackFalseAlarm, NAN, "a \x1b[31mwarm-up"))
    known.add(feedback(FeedbackFalseAlarm, NAN, "sent twice"))
    assert "ongoing, false alarm" in listed(IssueFilter(state="resolved"), known)[2]
    assert issue_table(known, IssueFilter(state="open")) is None
    text = told(story_of(known, {}, NAN))
    assert "false alarm by ana@node: a" in text
    assert "sent twice" not in text
    assert "\x1b" not in text
    (facts,) = [
        one for one in json.loads(issues_json(known, IssueFilter()))["issues"] if one["feedback"]
    ]
    assert [one["verdict"] for one in facts["feedback"]] == ["acknowledged", "false alarm"]
    assert facts["feedback"][1]["issue_id"] == NAN.issue_id

    known.add(NAN.model_copy(update={"times": 2}))
    assert known.open(known.issues[1])
    assert known.verdict(known.issues[1]) is None


def test_repeats_and_groups_are_explained_and_not_listed() -> None:
    repeat = HOOK.model_copy(
        update={"delivery_id": "d-r", "occasion": "repeat", "repeat": 2, "group": "run=run-1"}
    )
    known = runs_view(view(), FIRING, HOOK, repeat)
    text = told(story_of(known, {}, FIRING))
    assert "hook (repeat 2) pending: 503, 2 attempts" in text
    assert "in one message with others of run=run-1" in text
    assert listed(IssueFilter(), known)[1].endswith("  hook: pending")


def test_the_precision_of_a_rule_is_that_of_the_issues_that_people_answered() -> None:
    found = [issue(rule="loss_spike", episode=str(number)) for number in range(4)]
    known = runs_view(
        *found,
        issue(),
        feedback(FeedbackAcknowledged, found[0]),
        feedback(FeedbackFalseAlarm, found[0]),
        feedback(FeedbackResolved, found[1]),
        feedback(FeedbackAcknowledged, found[2]),
    )
    spike, nan = precision_of_rules(known, IssueFilter())
    assert (spike.rule, spike.fired, spike.confirmed, spike.false_alarms) == ("loss_spike", 4, 2, 1)
    assert spike.precision == pytest.approx(2 / 3)
    assert (nan.rule, nan.fired, nan.precision) == ("nonfinite", 1, None)
    assert precision_of_rules(known, IssueFilter(rule="nonfinite")) == [nan]
    out = io.StringIO()
    Console(file=out, width=80).print(precision_table([spike, nan]))
    assert [line.split() for line in out.getvalue().splitlines()[1:]] == [
        ["loss_spike", "4", "2", "1", "67%"],
        ["nonfinite", "1", "0", "0", "-"],
    ]
    assert json.loads(precision_json([nan]))["rules"][0]["precision"] is None


def test_issues_are_listed_with_what_was_done() -> None:
    head, loss, nan = listed(IssueFilter())
    columns = ["issue", "run", "severity", "rule", "state", "first", "reason", "done"]
    assert head.split() == columns
    assert loss.split()[:5] == [LOSS.issue_id[:8], "run-1", "warning", "loss_spike", "resolved"]
    assert "step 1,200, rank 1" in nan
    assert nan.endswith("stop: delivered, hook: pending")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (IssueFilter(severity="critical"), NAN),
        (IssueFilter(rule="loss_spike"), LOSS),
        (IssueFilter(state="open"), NAN),
        (IssueFilter(state="resolved"), LOSS),
        (IssueFilter(run_id="run-1", state="open"), NAN),
    ],
)
def test_issues_can_be_chosen(wanted: IssueFilter, found: IssueFiring) -> None:
    facts = json.loads(issues_json(VIEW, wanted))
    assert facts["version"] == 1
    assert [one["issue_id"] for one in facts["issues"]] == [found.issue_id]
    assert len(listed(wanted)) == 2


def test_where_there_is_nothing_one_line_helps() -> None:
    wanted = IssueFilter(run_id="run-1", rule="overfit", severity="info", state="open")
    assert issue_table(VIEW, wanted) is None
    words = "no issues in run run-1 of rule overfit of severity info that are open"
    assert no_issues_line(VIEW, wanted, "b") == f"{words}; 2 without this filter"
    assert "tocsin run" in no_issues_line(runs_view(), IssueFilter(), "embedded:x.db")
    assert no_issues_line(runs_view(view()), IssueFilter(), "b") == "no issues in 1 run"


def test_the_story_has_all_that_is_known() -> None:
    text = told(story_of(VIEW, COMMANDS, NAN))
    for said in (
        "critical: nonfinite in run run-1, ongoing",
        "gradients of blocks.3.qkv, rank 1, step 1,200",
        "The first in backward order.",
        "ratio 41.25 (limit 20)",
        "loss  ▁█x  limit 1.5 %",
        "1 % (step 7), 2 % (step 8), NaN % (step 9)",
        "9 more affected: a, b and 7 more",
        f"warning loss_spike: {LOSS.reason} (tocsin why {LOSS.issue_id[:8]})",
        "Lower the learning rate.",
        "/data/1000.pt (step 1,000)",
        "ongoing  at step 1,300",
        "delivered: the job left, 1 attempt",
        "decided by tocsin.yaml:14:3",
        "pending: 503, 2 attempts",
        "503 Busy after 12 ms",
        "requested by actions@node-1: NaN",
        f"issue {NAN.issue_id}",
    ):
        assert said in text, text
    steps = re.findall(r"(acknowledged|left at step 1,203|exited cleanly with 79) +(.*)", text)
    assert steps == [
        ("acknowledged", "4 ms later"),
        ("left at step 1,203", "6 ms later"),
        ("exited cleanly with 79", "140 ms later"),
    ]


def test_the_values_of_a_second_are_not_called_those_of_a_step() -> None:
    series = Series(name="memory", x="s", unit="bytes", steps=(0, 1200), values=(1.0, 2.0))
    grown = LOSS.model_copy(update={"evidence": Evidence(series=series)})
    text = told(story_of(runs_view(grown), {}, grown))
    assert "memory, last values: 1 bytes (at 0 s), 2 bytes (at 1,200 s)" in text


def test_the_story_of_a_cause_names_what_it_caused() -> None:
    text = told(story_of(VIEW, COMMANDS, LOSS))
    assert f"(tocsin why {NAN.issue_id[:8]})" in text
    assert "no notice was sent and nothing was stopped" in text
    assert "The stop of this run, requested for another reason" in text


def test_the_story_as_json_has_the_same_facts_without_payloads() -> None:
    document = json.dumps(story_facts(story_of(VIEW, COMMANDS, NAN)))
    facts = json.loads(document)
    assert facts["version"] == 1
    assert [seen["state"] for seen in facts["issue"]["states"]] == ["firing", "ongoing"]
    assert facts["issue"]["evidence"]["series"]["values"] == [1.0, 2.0, "NaN"]
    assert facts["stop"]["states"]["exited"] == NOW_MS + 250
    assert facts["stop"]["requested_by"] == "actions@node-1"
    assert "not shown" not in document


def test_text_from_a_run_moves_no_cursor() -> None:
    hostile = NAN.model_copy(update={"reason": "a\x1b[2Jb\nc", "remedy": "[red]x[/]\x07"})
    text = told(story_of(runs_view(hostile), {}, hostile))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "a [2Jb c" in text
    assert "[red]x[/]" in text


def test_a_run_without_issues_tells_who_stopped_it() -> None:
    by_ana = COMMAND.model_copy(update={"requested_by": "ana@node-1", "issue_id": None})
    commands = {"d-stop": CommandSeen(by_ana, NOW_MS)}
    text = "\n".join(line.plain for line in run_story_lines(VIEW.runs[0], commands))
    assert text.startswith("no issues in run run-1 (stopped)")
    assert "requested by ana@node-1: NaN" in text
    facts = json.loads(json.dumps(run_story_facts(VIEW.runs[0], commands)))
    assert (facts["issue"], facts["stop"]["exit_code"]) == (None, 79)
    assert run_story_facts(view(), {})["stop"] is None


def test_an_issue_is_meant_by_its_id_its_beginning_or_its_run() -> None:
    for text in (NAN.issue_id, NAN.issue_id[:8], NAN.issue_id[:4].upper()):
        assert choose_issue(VIEW, text) == NAN, text
    # Of a run: where its story began.
    assert choose_issue(VIEW, "run-1") == LOSS
    assert choose_issue(runs_view(view()), "run-1") == view()
    later = issue(training=1, severity="warning")
    again = runs_view(view(training=1), NAN, later)
    assert choose_issue(again, "run-1") == later


def test_an_issue_is_meant_by_the_beginning_of_its_runs_id() -> None:
    other = view("vit-1")
    known = runs_view(*VIEW.runs, other, view("vit-2", ended=True), *VIEW.issues)
    for text in ("r", "run", "run-"):
        assert choose_issue(known, text) == LOSS, text
    assert choose_issue(known, "vit") == other
    short = view(NAN.issue_id[:4] + "-run")
    assert choose_issue(runs_view(short, *VIEW.issues), NAN.issue_id[:4]) == NAN
    with pytest.raises(ConfigurationError, match="2 runs start with 'vit': vit-1, vit-2"):
        choose_issue(runs_view(view("vit-1"), view("vit-2")), "vit")
    with pytest.raises(ConfigurationError, match="at least 4 characters"):
        choose_issue(known, "")


def test_an_issue_is_meant_by_the_id_of_a_delivery_or_message_about_it() -> None:
    alone = delivery(LOSS)
    both = [delivery(one, "chat", sent_as="0e5f" + "1" * 28) for one in (LOSS, NAN)]
    known = runs_view(*VIEW.issues, alone, *both)
    for text in (alone.delivery_id, alone.delivery_id[:6].upper(), both[0].delivery_id):
        assert choose_issue(known, text) == LOSS, text
    assert choose_issue(known, both[1].delivery_id) == NAN
    with pytest.raises(ConfigurationError, match=f"is about 2 issues: .*{NAN.issue_id}"):
        choose_issue(known, "0e5f")


def test_what_cannot_be_meant_says_what_to_try() -> None:
    twin = LOSS.model_copy(update={"issue_id": NAN.issue_id[:12] + "0" * 24})
    twins = runs_view(NAN, twin)
    with pytest.raises(ConfigurationError, match=r"2 issues start with .*give more of the id"):
        choose_issue(twins, NAN.issue_id[:6])
    with pytest.raises(ConfigurationError, match="at least 4 characters"):
        choose_issue(VIEW, NAN.issue_id[:3])
    with pytest.raises(ConfigurationError, match="`tocsin issues` lists"):
        choose_issue(VIEW, "no-such-run")


def test_a_run_is_meant_by_the_beginning_of_its_id() -> None:
    runs = [view("gpt-1", ended=True), view("gpt-2"), view("gpt-2b", ended=True), view("res-1")]
    assert choose_run(runs, "gpt-2").run_id == "gpt-2"
    assert choose_run(runs, "gpt").run_id == "gpt-2"
    assert choose_run(runs, "gpt-1").run_id == "gpt-1"
    with pytest.raises(ConfigurationError, match="running now: res-1, gpt-2"):
        choose_run(runs, "vit")
    with pytest.raises(ConfigurationError, match="2 runs start with 'gpt': gpt-1, gpt-2b"):
        choose_run([runs[0], runs[2]], "gpt")
    with pytest.raises(ConfigurationError, match="no run is active"):
        choose_run([], "")
