"""`tocsin replay` of what is on either bus, of a span of time."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path

from typer.testing import CliRunner

from support.buses import World, next_millisecond
from support.configured_buses import context_on
from support.records.feedback import publish_issue
from tocsin.console.__main__ import app
from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import read_view

CONFIG = """\
receivers:
  chat: {type: webhook, url: "https://chat.example.com/x"}
rules:
  - nonfinite: [stop, chat]
"""


def test_the_issues_of_a_span_are_replayed_and_nothing_is_written(
    world: World, tmp_path: Path
) -> None:
    context = context_on(world, tmp_path, CONFIG)

    async def publish() -> str:
        await publish_issue(context, "run-1")
        await next_millisecond()
        between = datetime.fromtimestamp(time.time(), UTC)
        await next_millisecond()
        await publish_issue(context, "run-2")
        return between.isoformat(timespec="milliseconds")

    between = asyncio.run(publish())

    assert replayed(tmp_path) == [
        ("run-1", "stop", "stopped"), ("run-1", "chat", "sent"),
        ("run-2", "stop", "stopped"), ("run-2", "chat", "sent"),
    ]  # fmt: skip
    assert replayed(tmp_path, "--to", between) == [
        ("run-1", "stop", "stopped"), ("run-1", "chat", "sent"),
    ]  # fmt: skip
    assert replayed(tmp_path, "--from", between) == [
        ("run-2", "stop", "stopped"), ("run-2", "chat", "sent"),
    ]  # fmt: skip
    assert replayed(tmp_path, "--from", between, "--to", between) == []
    assert asyncio.run(entries(context)) == 0


def replayed(folder: Path, *options: str) -> list[tuple[str, str, str]]:
    """What would have been done, as the command prints it."""
    words = ["replay", "--config", str(folder / "tocsin.yaml"), "--json", *options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    found = json.loads(done.output)["deliveries"]
    return [(one["run"], one["action"], one["result"]) for one in found]


async def entries(context: CommandContext) -> int:
    """How many entries the ledger has."""
    async with context.open_bus(create=False) as bus:
        return len((await read_view(bus, context.topics)).deliveries)
