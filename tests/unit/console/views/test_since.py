"""`--since`: one meaning, in each command that reads."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from support.records.issues import NOW_MS, delivery, issue, runs_view
from tocsin.bus.port import EARLIEST, Outgoing, Partition
from tocsin.bus.urls import open_bus
from tocsin.console.views.bus_view import count_since
from tocsin.console.views.issues import IssueFilter, issues_json, no_issues_line
from tocsin.console.views.since import since_ms
from tocsin.console.views.status import print_status, status_json
from tocsin.console.views.topics import topics_json
from tocsin.console.views.why import story_facts, story_lines, story_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.feedback import FeedbackAcknowledged
from tocsin.schemas.records.run_view import RankView, RunView
from tocsin.schemas.topics import TopicSpec

HOUR_MS = 3_600_000


def run(run_id: str, heard_ms: int) -> RunView:
    ranks = (RankView(rank=0, last_heard_ms=heard_ms),)
    return RunView(run_id=run_id, incarnation="i", state="running", started_ms=1, ranks=ranks)


OLD = issue("old").model_copy(update={"at_ms": NOW_MS - HOUR_MS})
NEW = issue("new")
VIEW = runs_view(
    run("old", NOW_MS - HOUR_MS),
    run("new", NOW_MS),
    OLD,
    NEW,
    delivery(OLD, updated_ms=NOW_MS - HOUR_MS),
    delivery(NEW),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("2h", NOW_MS - 2 * HOUR_MS),
        ("1500ms", NOW_MS - 1500),
        ("3650d", NOW_MS - 3650 * 24 * HOUR_MS),
        ("2026-11-21T10:46:52.300Z", NOW_MS),
        ("2026-11-21 10:46:52.300Z", NOW_MS),
        ("2026-11-21T11:46:52.300+01:00", NOW_MS),
        ("2026-11-21T11:46:52.300 01:00", NOW_MS),
    ],
)
def test_a_time_or_a_duration_is_read(text: str | None, expected: int | None) -> None:
    assert since_ms(text, NOW_MS) == expected


@pytest.mark.parametrize("text", ["", "2", "yesterday", "2026-11-21", "2026-11-21T14:00:00", "4x"])
def test_anything_else_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--since .*: expected a duration like 30s"):
        since_ms(text, NOW_MS)


def test_what_has_not_changed_since_is_left_out() -> None:
    document = json.loads(status_json(VIEW.since(NOW_MS)))
    assert [one["run_id"] for one in document["runs"]] == ["new"]
    assert [one["run_id"] for one in document["issues"]] == ["new"]
    assert [one["run_id"] for one in document["deliveries"]] == ["new"]
    assert len(json.loads(status_json(VIEW.since(NOW_MS - HOUR_MS)))["issues"]) == 2


def test_an_answer_of_a_person_is_news_of_an_issue() -> None:
    answer = FeedbackAcknowledged.on(OLD, feedback_id="f", by="ana", at_ms=NOW_MS + 5)
    view = runs_view(run("old", 1), OLD, answer)
    assert [one.run_id for one in view.since(NOW_MS + 5).issues] == ["old"]
    assert view.since(NOW_MS + 5).feedback(OLD.issue_id) == [answer]
    assert view.since(NOW_MS + 6).issues == []


def test_issues_are_filtered_and_the_filter_is_told() -> None:
    wanted = IssueFilter(since_ms=NOW_MS)
    found = json.loads(issues_json(VIEW, wanted))["issues"]
    assert [one["run_id"] for one in found] == ["new"]
    none = IssueFilter(since_ms=NOW_MS + 1)
    assert "no issues that changed since 2026" in no_issues_line(VIEW, none, "embedded:x")


def test_a_status_of_nothing_new_says_since_when() -> None:
    out = io.StringIO()
    print_status(
        VIEW.since(NOW_MS + 1),
        bus_url="embedded:x.db",
        now_ms=NOW_MS,
        console=Console(file=out, width=200),
        since_ms=NOW_MS + 1,
    )
    assert out.getvalue().startswith("no run on embedded:x.db changed since 2026")


def test_a_story_since_a_time_has_what_happened_since() -> None:
    whole = story_facts(story_of(VIEW, {}, OLD))
    later = story_of(VIEW, {}, OLD, since_ms=NOW_MS)
    facts = story_facts(later)
    assert isinstance(whole["issue"], dict)
    assert isinstance(facts["issue"], dict)
    assert (len(whole["issue"]["states"]), facts["issue"]["states"]) == (1, [])
    assert (len(whole["issue"]["deliveries"]), facts["issue"]["deliveries"]) == (1, [])
    assert facts["issue"].keys() == whole["issue"].keys()
    assert "nothing in this time" in "\n".join(map(str, story_lines(later)))


async def test_records_that_were_written_since_are_counted(tmp_path: Path) -> None:
    spec = TopicSpec("t", 2, "delete")
    async with open_bus(f"embedded:{tmp_path / 'bus.db'}") as bus:
        await bus.init([spec])
        producer = await bus.producer()
        for number in (0, 1, 1):
            await producer.publish([Outgoing(Partition("t", number), b"k", b"v")])
        reader = await bus.reader({Partition("t", 1): EARLIEST})
        records = await reader.poll(timeout_s=5)
        assert await count_since(bus, [spec], 0) == {"t": 3}
        assert await count_since(bus, [spec], records[-1].append_ms + 60_000) == {"t": 0}
        states = await bus.show([spec])
        await producer.close()
        await reader.close()
    topics = json.loads(topics_json("embedded:x", states, counts={"t": 3}))["topics"]
    assert topics[0]["records_since"] == 3
    assert "records_since" not in json.loads(topics_json("embedded:x", states))["topics"][0]
