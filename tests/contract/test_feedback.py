"""What a person answers to an issue is on either bus for all who read it."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from support.feedback import publish_issue
from support.issue_records import issue
from tocsin.console.context import CommandContext, read_context
from tocsin.console.feedback.send import Answer, give_feedback
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.records.feedback import FeedbackFalseAlarm


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def context(request: pytest.FixtureRequest, tmp_path: Path) -> CommandContext:
    """Of a configuration with a bus of its own."""
    url = f"embedded:{tmp_path / 'bus.db'}"
    if request.param == "kafka":
        url = request.getfixturevalue("kafka_url")
    file = tmp_path / "tocsin.yaml"
    prefix = f"t{uuid.uuid4().hex[:8]}"
    file.write_text(f'version: 1\nbus: {{url: "{url}", prefix: {prefix}}}\n', encoding="utf-8")
    return read_context(file, None, environ={})


async def test_an_answer_is_on_the_bus_for_all_who_read_it(context: CommandContext) -> None:
    await publish_issue(context)
    asked = Answer(
        issue=issue().issue_id[:6], kind=FeedbackFalseAlarm, by="ana@node", why="a\nwarm-up"
    )

    given = await give_feedback(context, asked, now_ms=5)

    async with context.open_bus(create=False) as bus:
        view = await read_view(bus, context.topics)
        of_run = await read_view(bus, context.topics, "run-1")
    assert list(view.feedback(issue().issue_id)) == [given]
    assert list(of_run.feedback(issue().issue_id)) == [given]
    assert not view.open(view.issues[0])
    assert view.issues[0].state == "firing"
