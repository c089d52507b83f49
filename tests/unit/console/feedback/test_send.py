"""`tocsin ack`, `resolve` and `false-alarm`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from support.records.feedback import publish_issue
from support.records.issues import issue
from tocsin.console.__main__ import app
from tocsin.console.context import read_context
from tocsin.schemas.records.feedback import FeedbackFalseAlarm

RUN = CliRunner()


def test_the_commands_say_what_they_did(tmp_path: Path) -> None:
    bus = f"embedded:{tmp_path / 'bus.db'}"
    asyncio.run(publish_issue(read_context(None, bus, environ={})))
    short = issue().short_id

    said = RUN.invoke(app, ["ack", short, "--by", "ana", "--bus", bus])
    assert said.output.startswith("critical nonfinite in run run-1: acknowledged by ana; it is not")
    said = RUN.invoke(app, ["resolve", short, "--why", "lower rate", "--bus", bus, "--json"])
    facts = json.loads(said.output)["feedback"]
    assert (facts["verdict"], facts["why"]) == ("resolved", "lower rate")
    assert "@" in facts["by"]
    said = RUN.invoke(app, ["false-alarm", "run-1", "--bus", bus])
    assert "counts in `tocsin issues --precision`" in said.output
    said = RUN.invoke(app, ["issues", "--precision", "--bus", bus])
    assert said.output.splitlines()[1].split() == ["nonfinite", "1", "0", "1", "0%"]


def test_a_long_reason_of_the_issue_leaves_the_answer_readable() -> None:
    long = issue().model_copy(update={"reason": "x" * 4096})
    given = FeedbackFalseAlarm.on(long, feedback_id="f", by="ana", at_ms=1, why="y" * 4096)
    reason = given.closed_issue().reason
    assert len(reason) == 4096
    assert "xx… (false alarm by ana: yy" in reason
    assert reason.endswith("y…)")
