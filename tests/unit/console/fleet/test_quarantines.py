"""`tocsin bus quarantine list` and `release`."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

from typer.testing import CliRunner

from support.issue_records import NOW_MS, issue, issue_record, view, view_record
from tocsin.bus.port import EARLIEST, Partition
from tocsin.console.__main__ import app
from tocsin.console.context import CommandContext, read_context
from tocsin.console.publication import publish
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.issues import Evidence, Fact, Subject
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.records.wire import read_event
from tocsin.schemas.topics import telemetry_partition

RUN = CliRunner()


def failed_in(run: str, state: str = "running") -> list[object]:
    told = issue(run, "rule_failed").model_copy(
        update={
            "onset_ms": NOW_MS,
            "subject": Subject(kind="rule", name="loss_spike"),
            "evidence": Evidence(facts=(Fact(name="error", value="ValueError: a bug"),)),
        }
    )
    seen = view(run).model_copy(
        update={"state": state, "rules": {"loss_spike": "error", "nonfinite": "in_progress"}}
    )
    return [issue_record(told), view_record(seen)]


async def fill(context: CommandContext, *records: object) -> None:
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        await publish(bus, records)  # type: ignore[arg-type]


async def releases(context: CommandContext, run: str) -> list[object]:
    async with context.open_bus(create=False) as bus:
        reader = await bus.reader(
            {Partition(context.topics.telemetry, telemetry_partition(run)): EARLIEST}
        )
        events = [read_event(record) for record in await reader.poll(timeout_s=0.1)]
        return [event.data for event in events if isinstance(event, Event)]


def moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


def test_what_failed_is_listed_and_let_go(tmp_path: Path) -> None:
    bus = f"embedded:{tmp_path / 'bus.db'}"
    context = read_context(None, bus, environ={})
    asyncio.run(fill(context, *failed_in("run-1"), *failed_in("run-2", "ended")))

    listed = RUN.invoke(app, ["bus", "quarantine", "list", "--json", "--bus", bus])
    found = json.loads(listed.output)["quarantines"]
    assert {(one["run_id"], one["rule"], one["why"]) for one in found} == {
        ("run-1", "loss_spike", "ValueError: a bug"),
        ("run-2", "loss_spike", "ValueError: a bug"),
    }
    words = ["bus", "quarantine", "list", "--bus", bus, "--since"]
    since = RUN.invoke(app, [*words, moment(NOW_MS), "--json"])
    assert len(json.loads(since.output)["quarantines"]) == 2
    later = RUN.invoke(app, [*words, moment(NOW_MS + 60_000)])
    assert later.output == "no rule was quarantined since\n"
    table = RUN.invoke(app, ["bus", "quarantine", "list", "--bus", bus]).output
    assert "loss_spike" in table

    words = ["bus", "quarantine", "release"]
    said = RUN.invoke(app, [*words, "run-1", "loss_spike", "--by", "ana", "--bus", bus])
    assert said.output.startswith("loss_spike is tried again in run run-1")
    (data,) = asyncio.run(releases(context, "run-1"))
    assert isinstance(data, RuleReleased)
    assert (data.rule, data.by, data.incarnation) == (
        "loss_spike",
        "ana",
        issue("run-1").incarnation,
    )

    wrong = RUN.invoke(app, [*words, "run-1", "nonfinite", "--bus", bus]).exception
    assert isinstance(wrong, ConfigurationError)
    assert "quarantined there: loss_spike" in str(wrong)
    over = RUN.invoke(app, [*words, "run-2", "loss_spike", "--bus", bus]).exception
    assert "has ended" in str(over)


def test_a_bus_without_failures_says_so(tmp_path: Path) -> None:
    bus = f"embedded:{tmp_path / 'bus.db'}"
    asyncio.run(fill(read_context(None, bus, environ={}), view_record(view("run-1"))))
    said = RUN.invoke(app, ["bus", "quarantine", "list", "--bus", bus])
    assert said.output == "no rule is quarantined\n"
