"""`tocsin bus init` on Kafka, by its command: what it creates, reports and changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import NewTopic
from typer.testing import CliRunner, Result

from support.buses import World
from support.servers.kafka_broker import running_cluster, skip_or_fail, unavailable
from support.waiting import wait_until
from tocsin.bus.port import UnusableBus
from tocsin.console.__main__ import app
from tocsin.schemas.topics import Topics

pytestmark = pytest.mark.kafka

Found = dict[str, tuple[int, set[int], dict[str, str]]]
"""What the brokers have: partitions, numbers of copies, and settings, by topic."""


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of three brokers."""
    if (reason := unavailable()) is not None:
        skip_or_fail(reason)
    with running_cluster(tmp_path_factory.mktemp("three"), 3) as brokers:
        yield f"kafka://{','.join(broker.server for broker in brokers)}"


class Administrator:
    """Types the command for the topics of a prefix of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.world = World("kafka", url)
        self.topics = Topics(self.world.prefix)
        self._config = folder / "tocsin.yaml"
        self._config.write_text(
            f"version: 1\nbus: {{url: '{url}', prefix: {self.topics.prefix}}}\n"
        )

    def types(self, *words: str) -> Result:
        command = ["bus", *words, "--config", str(self._config)]
        return CliRunner().invoke(app, command, env={"COLUMNS": "200"})

    def reads(self, *words: str) -> dict[str, Any]:
        """What it prints as JSON: topics by name, and what was changed."""
        done = self.types(*words, "--json")
        assert done.exit_code == 0, (done.output, done.exception)
        facts: dict[str, Any] = json.loads(done.output)
        return facts | {"topics": {topic["name"]: topic for topic in facts["topics"]}}

    def described(self) -> Found:
        """What a broker knows of them."""

        async def describe() -> Found:
            admin = await self.world._admin()
            own = [n for n in await admin.list_topics() if n.startswith(f"{self.world.prefix}.")]
            topics: list[dict[str, Any]] = await admin.describe_topics(own) if own else []
            await admin.close()
            return {
                topic["topic"]: (
                    len(topic["partitions"]),
                    {len(partition["replicas"]) for partition in topic["partitions"]},
                    await self.world.configuration(topic["topic"]),
                )
                for topic in topics
            }

        return asyncio.run(describe())

    def creates(self, topic: str, *, partitions: int, copies: int, **settings: str) -> None:
        """A topic as somebody else would make it."""
        configs = {name.replace("_", "."): value for name, value in settings.items()}

        async def create() -> None:
            admin = await self.world._admin()
            await admin.create_topics([NewTopic(topic, partitions, copies, topic_configs=configs)])
            await admin.close()

        asyncio.run(create())
        # Of several brokers, each notices by itself.
        wait_until(lambda: topic in self.described(), what=f"{topic} is known")


@pytest.mark.torture
def test_three_copies_are_made_on_three_brokers_and_made_once(
    cluster_url: str, tmp_path: Path
) -> None:
    admin = Administrator(cluster_url, tmp_path)
    made = admin.types("init", "--replication", "3")
    assert made.exit_code == 0, made.output
    specs = {spec.name: spec for spec in admin.topics.specs()}
    lines = [line.split() for line in made.output.splitlines()]
    assert [words[0] for words in lines if words[-1] == "ok"] == list(specs)
    assert "to change" not in made.output

    wait_until(lambda: admin.described().keys() == specs.keys(), what="all are known")
    found = admin.described()
    for name, (partitions, copies, settings) in found.items():
        assert (partitions, copies) == (specs[name].partitions, {3}), name
        assert settings["min.insync.replicas"] == "2", name
        assert settings["message.timestamp.type"] == "LogAppendTime", name
        assert settings["cleanup.policy"] == specs[name].cleanup, name

    for words in (["--replication", "3"], ["--replication", "3", "--apply"], ["--apply"], []):
        facts = admin.reads("init", *words)
        assert facts["changed"] == []
        assert not any(topic["differs"] for topic in facts["topics"].values())
    assert admin.described() == found, "nothing has changed"


@pytest.mark.torture
def test_other_settings_on_three_brokers_are_reported_and_changed_where_asked_for(
    cluster_url: str, tmp_path: Path
) -> None:
    admin = Administrator(cluster_url, tmp_path)
    issues, runs = admin.topics.issues, admin.topics.runs

    def keeps(found: Found) -> str:
        return found[issues][2]["retention.ms"]

    admin.creates(issues, partitions=12, copies=3, retention_ms="5000", segment_ms="777777")
    admin.creates(runs, partitions=48, copies=1)
    before = admin.described()

    reported = admin.types("init", "--replication", "3")
    assert reported.exit_code == 0, reported.output
    text = reported.output.splitlines()
    (spec,) = [spec for spec in admin.topics.specs() if spec.name == issues]
    assert f"{issues}: retention.ms is 5000, expected {spec.retention_ms}" in text
    assert f"{issues}: min.insync.replicas is 1, expected 2" in text
    assert f"{runs}: replication is 1, expected 3" in text
    assert text[-1].endswith("tocsin bus init --apply")
    assert {name: admin.described()[name] for name in before} == before, "not without --apply"

    applied = admin.reads("init", "--replication", "3", "--apply")
    assert f"{issues}: retention.ms was 5000, is {spec.retention_ms}" in applied["changed"]
    assert applied["topics"][issues]["differs"] == []
    assert all(line.startswith((f"{issues}: ", f"{runs}: ")) for line in applied["changed"])
    wait_until(lambda: keeps(admin.described()) == str(spec.retention_ms), what="it is changed")
    after = admin.described()
    assert after[issues][2]["segment.ms"] == "777777", "what else was set stays"
    assert after[runs][:2] == (48, {1}), "copies are not made by it"
    assert "replication is 1, expected 3" in applied["topics"][runs]["differs"]
    assert admin.reads("init", "--replication", "3", "--apply")["changed"] == []
    assert admin.described() == after


def test_more_copies_than_there_are_brokers_are_an_error_and_nothing_is_made(
    kafka_url: str, tmp_path: Path
) -> None:
    admin = Administrator(kafka_url, tmp_path)
    for words in (["--replication", "3"], ["--replication", "3", "--apply"]):
        refused = admin.types("init", *words)
        assert isinstance(refused.exception, UnusableBus)
        assert str(refused.exception) == (
            "replication 3: expected 1 to 1, as many as there are brokers now"
        )
    assert admin.described() == {}
