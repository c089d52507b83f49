"""No text of a run steers the terminal in which it is shown, or is taken for markup."""

from __future__ import annotations

import io
import unicodedata
from typing import TypeVar

import pytest
from pydantic import BaseModel
from rich.console import Console, RenderableType

from support.records import poison
from support.records.issues import (
    NOW_MS,
    TOPICS,
    incarnation,
    issue,
    issue_record,
    record,
    runs_view,
    view,
)
from support.records.issues import view_record as run_record
from tocsin.bus.port import Outgoing, Record
from tocsin.console.views.issues import IssueFilter, issue_table
from tocsin.console.views.selection import choose_issue
from tocsin.console.views.status import print_status
from tocsin.console.views.why import run_story_lines, story_lines, story_of
from tocsin.console.watch.frame import Situation, draw
from tocsin.console.watch.state import WatchState
from tocsin.emitter.launch import messages
from tocsin.emitter.launch.summary import StopFigures, Summary
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.deliveries import Attempt, Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import Evidence, Fact, Series
from tocsin.schemas.records.run_view import StopView
from tocsin.schemas.records.runs import CaptureFigures
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView
from tocsin.schemas.records.stops.commands import (
    StopAcknowledged,
    StopEscalated,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.topics import issue_partition

HOSTILE = "\x1b[2J\x1b]0;x\x07[red]m[/red]\x9b1A\u202e\u200b\r\n"
"""Clears the screen, sets a title, is a colour for rich, moves the cursor, turns what follows."""

M = TypeVar("M", bound=BaseModel)


def poisoned(model: M) -> M:
    """With `HOSTILE` in front of each text that may hold anything."""
    return poison.poisoned(model, HOSTILE)


WHO = {"run_id": "run-1", "incarnation": incarnation(), "command_id": "d-stop"}
FOUND = issue().model_copy(
    update={
        "first_rank": 1,
        "world_size": 2,
        "onset_ms": NOW_MS,
        "remedy": "Lower it.",
        "labels": {"team": "vision"},
        "last_good_checkpoint": Checkpoint(path="/data/1.pt", step=1),
        "evidence": Evidence(
            facts=(Fact(name="a", value="b", unit="c"), Fact(name="d", value=1.0, unit="e")),
            series=Series(name="loss", unit="f", steps=(1,), values=(2.0,), limit=3.0),
            followed=2,
            also=(f"{HOSTILE}g",),
            explanation="h",
        ),
    }
)
CAUSE = issue(rule="loss_spike")
DELIVERY = Delivery(
    delivery_id="d-stop", issue_id=FOUND.issue_id, run_id="run-1", incarnation=incarnation(),
    rule="nonfinite", issue_state="firing", action="hook", kind="webhook", state="rejected",
    reason="400", decided_by="tocsin.yaml:1:1", created_ms=NOW_MS, updated_ms=NOW_MS,
    give_up_ms=NOW_MS, attempts=1,
    last_attempts=(Attempt(at_ms=NOW_MS, result="400", retry=False, duration_ms=1),),
)  # fmt: skip
STOP = StopView(
    state="exited", command_id="d-stop", reason="i", how="j", exit_code=79,
    states={"acknowledged": NOW_MS, f"{HOSTILE}k": NOW_MS, "exited": NOW_MS},
)  # fmt: skip
COMMAND = StopRequested.model_validate(
    {**WHO, "reason": "l", "requested_by": "m", "requested_ms": 1, "not_after_ms": 2, "nonce": "n"}
)
RUN = view(stop=STOP).model_copy(
    update={
        "labels": {f"{HOSTILE}o": "p"},
        "node": "q",
        "command": "r",
        "rules": {f"{HOSTILE}s": "issues_found", f"{HOSTILE}t": "error"},
        "capture": CaptureFigures(overhead_percent=1.0, records=1, dropped=1, degraded=("u",)),
    }
)


@pytest.fixture
def bus() -> RunsView:
    caused = FOUND.model_copy(update={"consequence_of": CAUSE.issue_id})
    issues = [poisoned(CAUSE), poisoned(caused)]
    return runs_view(poisoned(RUN), *issues, poisoned(DELIVERY))


@pytest.fixture
def commands() -> dict[str, CommandSeen]:
    return {"d-stop": CommandSeen(poisoned(COMMAND), NOW_MS)}


def harmless(text: str) -> str:
    """The text, in which nothing but its own line breaks is left."""
    bad = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\n"]
    assert not bad, text
    assert "[red]m[/red]" in text
    return text


def printed(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=2_000).print(table)
    return out.getvalue()


def test_what_is_poisoned(bus: RunsView) -> None:
    found = bus.issues[1]
    for text in (found.rule, found.reason, found.remedy, found.subject.name, found.labels["team"]):
        assert text.startswith(HOSTILE)
    fact, series = found.evidence.facts[0], found.evidence.series
    assert series is not None
    for name in (fact.name, fact.value, fact.unit, series.name, series.unit):
        assert str(name).startswith(HOSTILE)
    assert all(d.action.startswith(HOSTILE) for d in bus.deliveries)
    assert found.run_id == "run-1", "ids are refused, so they stay"


def test_status(bus: RunsView) -> None:
    out = io.StringIO()
    console = Console(file=out, width=2_000)
    print_status(bus, bus_url="embedded:x", now_ms=NOW_MS, console=console)
    assert len(harmless(out.getvalue()).splitlines()) == 2 + 3 + 1 + 1
    empty = io.StringIO()
    console = Console(file=empty, width=2_000)
    print_status(runs_view(), bus_url="embedded:[red]x[/]", now_ms=0, console=console)
    assert "embedded:[red]x[/]" in empty.getvalue()


def test_issues(bus: RunsView) -> None:
    table = issue_table(bus, IssueFilter())
    assert table is not None
    assert len(harmless(printed(table)).splitlines()) == 3


def test_why(bus: RunsView, commands: dict[str, CommandSeen]) -> None:
    for found in bus.issues:
        lines = [line.plain for line in story_lines(story_of(bus, commands, found))]
        assert "\n" not in harmless("".join(lines))
    lines = [line.plain for line in run_story_lines(bus.runs[0], commands)]
    assert "\n" not in harmless("".join(lines))


def test_an_id_that_is_not_clear(bus: RunsView) -> None:
    twin = bus.issues[1].model_copy(update={"issue_id": FOUND.issue_id[:12] + "0" * 24})
    with pytest.raises(ConfigurationError) as raised:
        choose_issue(runs_view(bus.issues[1], twin), FOUND.issue_id[:6])
    assert "\n" not in harmless(str(raised.value))


def test_watch(bus: RunsView) -> None:
    state = WatchState(TOPICS)
    (delivery,) = bus.deliveries
    told = Event.wrap(delivery, id="1", source="/actions", time_ms=NOW_MS)
    place = issue_partition("run-1")
    written: list[Outgoing] = [run_record(bus.runs[0]), *map(issue_record, bus.issues)]
    written.append(record(told, TOPICS.actions, place, delivery.key))
    for out in written:
        state.apply(Record(out.partition, 0, NOW_MS, out.key, out.value, out.headers))
    frame = draw(state, Situation("embedded:x", HOSTILE), now_ms=NOW_MS, width=2_000, height=100)
    assert len(harmless(frame.plain).splitlines()) == len(frame.lines)


def test_the_lines_of_the_launcher(bus: RunsView) -> None:
    (delivery,) = bus.deliveries
    firing, command = bus.issues[1], poisoned(COMMAND)
    resolved = issue(resolved=True).model_copy(
        update={"rule": firing.rule, "reason": firing.reason, "subject": firing.subject}
    )
    summary = Summary(
        run_id="run-1", outcome="stopped", exit_code=79, steps=3, judged_steps=3, duration_s=1.0,
        issues=[firing], rules={}, stop=StopFigures(command=command), capture=None,
    )  # fmt: skip
    acknowledged = StopAcknowledged.model_validate({**WHO, "role": "launcher"})
    escalated = StopEscalated.model_validate({**WHO, "how": "SIGTERM", "reason": "x"})
    refused = StopRefused.model_validate({**WHO, "why": "expired", "reason": "x"})
    lines = [
        messages.issue_line(firing),
        messages.issue_line(resolved),
        messages.delivery_line(delivery),
        messages.stop_line(acknowledged, command=command),
        messages.stop_line(poisoned(escalated)),
        messages.stop_line(poisoned(refused)),
        messages.end_line(summary),
        messages.left_over_line([delivery], True, 15, "embedded:x"),
        messages.unwatched_line(HOSTILE),
    ]
    for line in lines:
        assert line is not None
        assert "\n" not in harmless(line)
