"""The permissions that `tocsin bus acls` prints are those of the page on Kafka's security."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from tocsin.bus.kafka.permissions import ROLES, Role, permissions
from tocsin.console.__main__ import app
from tocsin.schemas.topics import Topics

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "secure-kafka.md"
WORKING: tuple[Role, ...] = ("trainer", "rules", "actions", "archive", "operator")
LOOKING: tuple[Role, ...] = ("trainer", "reader", "stopper")


def test_the_table_of_the_page_is_what_the_code_gives() -> None:
    lines = PAGE.read_text().splitlines()
    for role in WORKING:
        (row,) = [line for line in lines if line.startswith(f"| **{role}**")]
        cells = row.strip("|").split("|")
        columns = ((1, "Write", "topic"), (2, "Read", "topic"), (3, "Read", "group"))
        for cell, operation, resource in columns:
            told = set(re.findall(r"`P([.-][a-z0-9.-]+)`", cells[cell]))
            given = {
                one.name.removeprefix("vision")
                for one in permissions(Topics("vision"), role, "User:x")
                if (one.operation, one.resource) == (operation, resource)
            }
            assert given == told, (role, operation)


def test_nobody_but_workers_and_operators_writes_issues_states_or_views() -> None:
    topics = Topics("vision")
    guarded = {topics.issues, topics.state, topics.runs, topics.actions}
    for role in LOOKING:
        assert role in ROLES
        writes = {p.name for p in permissions(topics, role, "User:x") if p.operation == "Write"}
        assert not writes & guarded
    operator = {p.name for p in permissions(topics, "operator", "User:x") if p.operation == "Write"}
    assert not operator & {topics.state, topics.runs}


def test_the_command_prints_what_an_administrator_types() -> None:
    words = ["bus", "acls", "--trainer", "User:t", "--bus", "kafka://b1:9092,b2:9092"]
    text = CliRunner().invoke(app, words).output
    assert (
        "kafka-acls.sh --bootstrap-server b1:9092,b2:9092 --add --allow-principal 'User:t' "
        "--operation Write --topic 'tocsin.telemetry.v1'"
    ) in text.splitlines()
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert facts["applied"] is False
    assert len(facts["acls"]) == len(text.splitlines())
    wrong = CliRunner().invoke(app, ["bus", "acls", "--trainer", "t", "--bus", "kafka://b:9092"])
    assert "expected a principal such as User:ana" in str(wrong.exception)
    file = CliRunner().invoke(app, ["bus", "acls", "--trainer", "User:t", "--bus", "embedded:b.db"])
    assert "no permissions but those of its file" in str(file.exception)
