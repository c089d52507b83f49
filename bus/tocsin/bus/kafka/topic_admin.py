"""The topics of a Kafka bus: what they should be like, creating and comparing them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code

from tocsin.bus.kafka.errors import REQUEST_S, explained, translated
from tocsin.bus.port import UnusableBus
from tocsin.schemas.topics import TopicSpec

_SETTLE_S: Final = 5.0
"""How long new topics may take until each partition has a leader."""

_REPLICAS: Final = 3
_IN_SYNC: Final = 2


def topic_configs(spec: TopicSpec, replication: int) -> dict[str, str]:
    """The configuration of a topic with so many replicas."""
    configs = {
        "cleanup.policy": spec.cleanup,
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(spec.max_record_bytes),
        "min.insync.replicas": str(min(_IN_SYNC, replication)),
    }
    if spec.cleanup == "compact":
        configs["delete.retention.ms"] = str(spec.tombstone_ms)
    elif spec.retention_ms is not None:
        configs["retention.ms"] = str(spec.retention_ms)
    return configs


@dataclass(frozen=True, slots=True)
class FoundTopic:
    """A topic as the brokers describe it."""

    partitions: int
    replication: int
    led: bool
    configs: Mapping[str, str] = field(default_factory=dict)


def differences(spec: TopicSpec, found: FoundTopic, brokers: int) -> tuple[str, ...]:
    """Sentences on what is not as expected."""
    replication = min(_REPLICAS, brokers)
    facts = [
        ("partitions", str(found.partitions), str(spec.partitions)),
        ("replication", str(found.replication), str(replication)),
    ]
    facts += [
        (name, found.configs.get(name, "not set"), expected)
        for name, expected in topic_configs(spec, replication).items()
    ]
    return tuple(
        f"{name} is {is_}, expected {expected}" for name, is_, expected in facts if is_ != expected
    )


async def find_topics(
    admin: AIOKafkaAdminClient, names: Sequence[str], *, configs: bool = False
) -> dict[str, FoundTopic]:
    """The topics of these that exist. Creates nothing, whatever the brokers' auto-creation says.

    Raises:
        BusUnavailable, UnusableBus.
    """
    if not names:
        return {}
    with translated("describing topics"):
        async with asyncio.timeout(REQUEST_S):
            # All of them: a request that names a topic makes a broker with auto-creation create it.
            described: list[dict[str, Any]] = await admin.describe_topics()
            present = [t for t in described if t["topic"] in names and t["error_code"] == 0]
            settings = await _configs(admin, [t["topic"] for t in present]) if configs else {}
    return {
        topic["topic"]: FoundTopic(
            partitions=len(topic["partitions"]),
            replication=min((len(p["replicas"]) for p in topic["partitions"]), default=0),
            led=all(p["leader"] >= 0 for p in topic["partitions"]),
            configs=settings.get(topic["topic"], {}),
        )
        for topic in present
    }


async def _configs(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, dict[str, str]]:
    if not names:
        return {}
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    found: dict[str, dict[str, str]] = {}
    for response in await admin.describe_configs(resources):
        for error_code, message, _type, name, entries, *_ in response.resources:
            if error_code:
                raise explained(
                    for_code(error_code)(message), f"reading the configuration of {name}"
                )
            found[name] = {entry[0]: entry[1] for entry in entries}
    return found


async def create_topics(admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec]) -> None:
    """Create those that are missing and wait until they can be written to.

    Raises:
        BusUnavailable, UnusableBus.
    """
    names = [spec.name for spec in specs]
    there = await find_topics(admin, names)
    missing = [spec for spec in specs if spec.name not in there]
    if not missing:
        return
    replication = min(_REPLICAS, await count_brokers(admin))
    with translated("creating topics"):
        async with asyncio.timeout(REQUEST_S):
            response = await admin.create_topics(
                [
                    NewTopic(
                        spec.name,
                        spec.partitions,
                        replication,
                        topic_configs=topic_configs(spec, replication),
                    )
                    for spec in missing
                ]
            )
    for name, code, *rest in response.topic_errors:
        # Somebody else may have created it in the meantime.
        if code and for_code(code) is not TopicAlreadyExistsError:
            reason = rest[0] if rest and rest[0] else for_code(code).__name__
            raise UnusableBus(f"cannot create topic {name!r}: {reason}")
    async with asyncio.timeout(_SETTLE_S):
        while True:
            found = await find_topics(admin, names)
            if len(found) == len(names) and all(topic.led for topic in found.values()):
                return
            await asyncio.sleep(0.05)


async def count_brokers(admin: AIOKafkaAdminClient) -> int:
    """How many brokers the cluster has now. Raises BusUnavailable."""
    with translated("describing the cluster"):
        async with asyncio.timeout(REQUEST_S):
            cluster: dict[str, Any] = await admin.describe_cluster()
    return len(cluster["brokers"])
