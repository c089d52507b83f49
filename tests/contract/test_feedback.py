"""What a person answers to an issue is on either bus for all who read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.buses import World
from support.configured_buses import context_on
from support.records.feedback import publish_issue
from support.records.issues import issue
from tocsin.console.context import CommandContext
from tocsin.console.feedback.send import Answer, give_feedback
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.records.feedback import FeedbackFalseAlarm


@pytest.fixture
def context(world: World, tmp_path: Path) -> CommandContext:
    return context_on(world, tmp_path)


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
