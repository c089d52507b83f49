"""The topics of a Kafka bus: what they should be like, creating and comparing them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import TopicAlreadyExistsError, for_code
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest

from tocsin.bus.kafka.errors import REQUEST_S, explained, translated
from tocsin.bus.kafka.permissions import Permission
from tocsin.bus.port import BusUnavailable, UnknownTopic, UnusableBus
from tocsin.schemas.topics import TopicSpec

_RESOURCES: Final = {"topic": 2, "group": 3}
_OPERATIONS: Final = {"Read": 3, "Write": 4, "Describe": 8}
_ANY: Final = 1
_LITERAL: Final = 3
_ALLOW: Final = 3
_HOSTS: Final = "*"

SETTLE_S: Final = 30.0
"""How long new topics may take until each partition has a leader."""

_SEGMENT_BYTES: Final = 16 * 1024 * 1024
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
        # By Kafka's defaults up to 1 GiB of each partition is never compacted, and half of the
        # rest: a worker that takes a partition over reads all of it.
        configs["segment.bytes"] = str(_SEGMENT_BYTES)
        configs["min.cleanable.dirty.ratio"] = "0.1"
    elif spec.retention_ms is not None:
        configs["retention.ms"] = str(spec.retention_ms)
    return configs


@dataclass(frozen=True, slots=True)
class FoundTopic:
    """A topic as the brokers describe it."""

    partitions: int
    replication: int
    leaderless: tuple[int, ...] = ()
    """The partitions that no broker leads now."""

    configs: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    """Which of `configs` were set for this topic, and are no defaults."""


def replicas(brokers: int, wanted: int | None = None) -> int:
    """How many replicas topics get. Raises UnusableBus: there are not so many brokers."""
    if wanted is None:
        return min(_REPLICAS, brokers)
    if not 1 <= wanted <= brokers:
        raise UnusableBus(
            f"replication {wanted}: expected 1 to {brokers}, as many as there are brokers now"
        )
    return wanted


def differences(spec: TopicSpec, found: FoundTopic, replication: int) -> tuple[str, ...]:
    """Sentences on what is not as expected."""
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
    """The topics of these that exist. Creates nothing, whatever the brokers' setting for that.

    Raises:
        BusUnavailable, UnusableBus.
    """
    if not names:
        return {}
    with translated("describing topics"):
        async with asyncio.timeout(REQUEST_S):
            while True:
                own: dict[str, frozenset[str]]
                # Our clients create none by asking: see `corrections`.
                described: list[dict[str, Any]] = await admin.describe_topics(sorted(names))
                present = [t for t in described if t["error_code"] == 0]
                named = [t["topic"] for t in present]
                try:
                    settings, own = await _configs(admin, named) if configs else ({}, {})
                    break
                except UnknownTopic:
                    # Of several brokers one does not know yet what another one does.
                    await asyncio.sleep(0.05)
    return {
        topic["topic"]: FoundTopic(
            partitions=len(topic["partitions"]),
            replication=min((len(p["replicas"]) for p in topic["partitions"]), default=0),
            leaderless=tuple(
                sorted(p["partition"] for p in topic["partitions"] if p["leader"] < 0)
            ),
            configs=settings.get(topic["topic"], {}),
            own=own.get(topic["topic"], frozenset()),
        )
        for topic in present
    }


_OF_TOPIC: Final = 1
"""Where a setting comes from, in the brokers' terms: it was set for this topic."""


async def _configs(
    admin: AIOKafkaAdminClient, names: Sequence[str]
) -> tuple[dict[str, dict[str, str]], dict[str, frozenset[str]]]:
    """The settings by topic, and which of them are the topic's own."""
    if not names:
        return {}, {}
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    found: dict[str, dict[str, str]] = {}
    own: dict[str, frozenset[str]] = {}
    for response in await admin.describe_configs(resources):
        for error_code, message, _type, name, entries, *_ in response.resources:
            if error_code:
                raise explained(
                    for_code(error_code)(message), f"reading the configuration of {name}"
                )
            found[name] = {entry[0]: entry[1] for entry in entries}
            # Brokers of before 1.1 report only whether it is a default.
            own[name] = frozenset(
                entry[0]
                for entry in entries
                if (entry[3] == _OF_TOPIC if len(entry) > 5 else not entry[3])
            )
    return found, own


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """One of a topic, as it was and as it is now."""

    topic: str
    name: str
    before: str
    value: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.name} was {self.before}, is {self.value}"


async def find_settled(
    admin: AIOKafkaAdminClient, names: Sequence[str], changed: Sequence[ChangedSetting] = ()
) -> dict[str, FoundTopic]:
    """As `find_topics` with settings, of topics that exist, as soon as the broker that is asked
    knows of all of them and of what was changed a moment ago: of several, one may not yet. At the
    latest after `SETTLE_S`.

    Raises:
        BusUnavailable, UnusableBus.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        found = await find_topics(admin, names, configs=True)
        settled = found.keys() >= set(names) and all(
            found[one.topic].configs.get(one.name) == one.value for one in changed
        )
        if settled or time.monotonic() >= deadline_s:
            return found
        await asyncio.sleep(0.05)


async def apply_settings(
    admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec], replication: int
) -> list[ChangedSetting]:
    """Give topics that exist the settings that they should have; returns those changed.

    Partitions and replicas stay as they are: other partitions would move the keys, and other
    replicas move the data. What else was set for a topic stays, too.

    Raises:
        BusUnavailable, UnusableBus.
    """
    changed: list[ChangedSetting] = []
    for name, topic in (await find_topics(admin, [s.name for s in specs], configs=True)).items():
        spec = next(one for one in specs if one.name == name)
        wanted = topic_configs(spec, min(replication, topic.replication))
        other = {key: value for key, value in wanted.items() if topic.configs.get(key) != value}
        if not other:
            continue
        # The request replaces all that was set for the topic.
        settings = {key: topic.configs[key] for key in topic.own} | wanted
        with translated(f"changing the settings of {name}"):
            async with asyncio.timeout(REQUEST_S):
                responses = await admin.alter_configs(
                    [ConfigResource(ConfigResourceType.TOPIC, name, settings)]
                )
        for response in responses:
            for code, message, *_ in response.resources:
                if code:
                    raise explained(for_code(code)(message), f"changing the settings of {name}")
        changed += [
            ChangedSetting(name, key, topic.configs.get(key, "not set"), value)
            for key, value in other.items()
        ]
    return changed


async def grant(admin: AIOKafkaAdminClient, wanted: Sequence[Permission]) -> list[Permission]:
    """Give these rights; those that are there stay. Returns which of them were missing.

    Raises:
        BusUnavailable, UnusableBus: the brokers have no authorizer, or this user may not do it.
    """
    # aiokafka has the requests, and no calls for them.
    client = admin._client
    there = set()
    for principal in dict.fromkeys(one.principal for one in wanted):
        there |= await _granted(client, principal)
    missing = [
        one
        for one in wanted
        if (one.principal, _RESOURCES[one.resource], one.name, _OPERATIONS[one.operation])
        not in there
    ]
    for one in missing:
        request = CreateAclsRequest(
            _RESOURCES[one.resource],
            one.name,
            _LITERAL,
            one.principal,
            _HOSTS,
            _OPERATIONS[one.operation],
            _ALLOW,
        )
        doing = f"granting {one.operation} on {one.resource} {one.name} to {one.principal}"
        with translated(doing):
            async with asyncio.timeout(REQUEST_S):
                node = client.cluster.controller.nodeId
                response = await client.send(node, request)
        for code, message, *_ in response.creation_responses:
            if code:
                raise explained(for_code(code)(message), doing)
    return missing


async def _granted(client: AIOKafkaClient, principal: str) -> set[tuple[str, int, str, int]]:
    """The rights of a principal: principal, kind of resource, its name, operation."""
    doing = f"reading the permissions of {principal}"
    request = DescribeAclsRequest(_ANY, None, _LITERAL, principal, _HOSTS, _ANY, _ALLOW)
    with translated(doing):
        async with asyncio.timeout(REQUEST_S):
            response = await client.send(client.cluster.controller.nodeId, request)
    if response.error_code:
        raise explained(for_code(response.error_code)(response.error_message), doing)
    return {
        (principal, kind, name, operation)
        for kind, name, *_, acls in response.resources
        for _principal, _host, operation, _permission in acls
    }


async def create_topics(
    admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec], *, replication: int | None = None
) -> None:
    """Create those that are missing and wait until they can be written to.

    Raises:
        BusUnavailable, UnusableBus.
    """
    names = [spec.name for spec in specs]
    there = await find_topics(admin, names)
    missing = [spec for spec in specs if spec.name not in there]
    if not missing:
        return
    replication = replicas(await count_brokers(admin), replication)
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
    await _settle(admin, names)


async def _settle(admin: AIOKafkaAdminClient, names: Sequence[str]) -> None:
    """Wait until these can be written to. Raises BusUnavailable: one cannot in time."""
    unsettled = list(names)
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while unsettled:
                found = await find_topics(admin, names)
                unsettled = [text for name in names if (text := _unsettled(name, found.get(name)))]
                if unsettled:
                    await asyncio.sleep(0.05)
    if unsettled:
        others = f" and {len(unsettled) - 1} more topics" if len(unsettled) > 1 else ""
        raise BusUnavailable(
            f"the topics were created, but are not ready after {SETTLE_S:g} s: "
            f"{unsettled[0]}{others}: check that all brokers are up, then run "
            "'tocsin bus init' again"
        )


def _unsettled(name: str, topic: FoundTopic | None) -> str | None:
    """Why a topic cannot be written to yet; None if it can."""
    if topic is None:
        return f"no broker has metadata of {name}"
    if topic.leaderless:
        first, *rest = topic.leaderless
        more = f" (and {len(rest)} more)" if rest else ""
        return f"partition {first} of {name}{more} has no leader"
    return None


async def count_brokers(admin: AIOKafkaAdminClient) -> int:
    """How many brokers the cluster has now. Raises BusUnavailable."""
    with translated("describing the cluster"):
        async with asyncio.timeout(REQUEST_S):
            cluster: dict[str, Any] = await admin.describe_cluster()
    return len(cluster["brokers"])
