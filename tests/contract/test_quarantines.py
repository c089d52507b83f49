"""`tocsin bus quarantine list` and `release`, on either bus."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.buses import World
from support.configured_buses import context_on
from support.records.issues import NOW_MS, issue, issue_record, view, view_record
from support.records.on_bus import data_of
from tocsin.bus.port import Outgoing
from tocsin.console.__main__ import app
from tocsin.console.context import CommandContext
from tocsin.console.publication import publish
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.issues import Evidence, Fact, Subject
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.topics import Topics, telemetry_partition

RUN = CliRunner()


def failed_in(run: str, state: str = "running") -> list[Outgoing]:
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


async def fill(context: CommandContext, *records: Outgoing) -> None:
    def own(record: Outgoing) -> Outgoing:
        topic = record.partition.topic.replace(Topics().prefix, context.topics.prefix, 1)
        return replace(record, partition=record.partition._replace(topic=topic))

    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        await publish(bus, [own(record) for record in records])


async def releases(context: CommandContext, run: str) -> list[Data]:
    async with context.open_bus(create=False) as bus:
        return await data_of(bus, context.topics.telemetry, telemetry_partition(run))


def moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


@pytest.fixture
def context(world: World, tmp_path: Path) -> CommandContext:
    return context_on(world, tmp_path)


@pytest.fixture
def on_it(context: CommandContext, tmp_path: Path) -> list[str]:
    """Options of a command that is for this bus."""
    return ["--config", str(tmp_path / "tocsin.yaml")]


def test_what_failed_is_listed_and_let_go(context: CommandContext, on_it: list[str]) -> None:
    asyncio.run(fill(context, *failed_in("run-1"), *failed_in("run-2", "ended")))

    listed = RUN.invoke(app, ["bus", "quarantine", "list", "--json", *on_it])
    found = json.loads(listed.output)["quarantines"]
    assert {(one["run_id"], one["rule"], one["why"]) for one in found} == {
        ("run-1", "loss_spike", "ValueError: a bug"),
        ("run-2", "loss_spike", "ValueError: a bug"),
    }
    words = ["bus", "quarantine", "list", *on_it, "--since"]
    since = RUN.invoke(app, [*words, moment(NOW_MS), "--json"])
    assert len(json.loads(since.output)["quarantines"]) == 2
    later = RUN.invoke(app, [*words, moment(NOW_MS + 60_000)])
    assert later.output == "no rule was quarantined since\n"
    table = RUN.invoke(app, ["bus", "quarantine", "list", *on_it]).output
    assert "loss_spike" in table

    words = ["bus", "quarantine", "release"]
    said = RUN.invoke(app, [*words, "run-1", "loss_spike", "--by", "ana", *on_it])
    assert said.output.startswith("loss_spike is tried again in run run-1")
    (data,) = asyncio.run(releases(context, "run-1"))
    assert isinstance(data, RuleReleased)
    assert (data.rule, data.by, data.incarnation) == (
        "loss_spike",
        "ana",
        issue("run-1").incarnation,
    )

    wrong = RUN.invoke(app, [*words, "run-1", "nonfinite", *on_it]).exception
    assert isinstance(wrong, ConfigurationError)
    assert "quarantined there: loss_spike" in str(wrong)
    over = RUN.invoke(app, [*words, "run-2", "loss_spike", *on_it]).exception
    assert "has ended" in str(over)


def test_a_bus_without_failures_says_so(context: CommandContext, on_it: list[str]) -> None:
    asyncio.run(fill(context, view_record(view("run-1"))))
    said = RUN.invoke(app, ["bus", "quarantine", "list", *on_it])
    assert said.output == "no rule is quarantined\n"
