"""The Kafka bus, through aiokafka: for a fleet.

`init` is what creates topics; nothing else here does, whatever the brokers' setting for
auto-creation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

# First: its error names the extra that is missing, if one is.
from tocsin.bus.kafka.errors import CLOSE_S, REQUEST_S, translated

# isort: split
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import create_conn
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from tocsin.bus.kafka import topic_admin
from tocsin.bus.kafka.clients import (
    CONSUMER_OPTIONS,
    MEMBER_OPTIONS,
    PRODUCER_OPTIONS,
    KafkaProducer,
    KafkaReader,
    own_threads,
    stop,
)
from tocsin.bus.kafka.consumer import (
    HEARTBEAT_S,
    POLL_INTERVAL_S,
    REBALANCE_S,
    SESSION_S,
    KafkaConsumer,
)
from tocsin.bus.kafka.corrections import correct
from tocsin.bus.kafka.permissions import Permission
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import (
    AssignmentListener,
    BusClosed,
    BusUnavailable,
    From,
    Partition,
    TopicState,
    UnknownTopic,
)
from tocsin.schemas.topics import TopicSpec

_STARTING_S: Final = 0.2
"""How often a broker that names none is asked again."""


class _Granted:
    """A lease on a bus where nobody asks."""

    async def release(self) -> None:
        """Nothing to give back."""


def own_assignor() -> type[StickyPartitionAssignor]:
    """An assignor of one member: the class remembers what its member owned, and a process may be
    a member of several groups."""
    return type("OwnAssignor", (StickyPartitionAssignor,), {})


class KafkaBus:
    """One Kafka cluster.

    `session_s` is the silence after which a group member counts as dead, `request_s` how long an
    answer of the brokers is waited for.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        security: KafkaSecurity | None = None,
        session_s: float = SESSION_S,
        request_s: float = REQUEST_S,
    ) -> None:
        self._servers = tuple(servers)
        self._security = security or KafkaSecurity()
        self._session_s = session_s
        self._request_s = request_s
        self._admin: AIOKafkaAdminClient | None = None
        self._connection: dict[str, Any] = {}
        self._partitions: dict[str, int] = {}
        self._parts: list[KafkaProducer | KafkaReader] = []

    @property
    def url(self) -> str:
        """How to reach it, without secrets: `embedded:PATH` or `kafka://HOST:PORT`."""
        return f"kafka://{','.join(self._servers)}"

    @property
    def notice(self) -> str | None:
        """One line for a person, when the bus is not where one would look; None otherwise."""
        return None

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableBus or BusUnavailable."""
        own_threads.add_current()
        security = self._security
        self._connection = {
            "bootstrap_servers": list(self._servers),
            "client_id": "tocsin",
            "security_protocol": security.protocol,
            "ssl_context": security.ssl_context(),
        }
        if security.mechanism is not None:
            self._connection |= {
                "sasl_mechanism": security.mechanism,
                "sasl_plain_username": security.username,
                "sasl_plain_password": security.password,
            }
        admin = AIOKafkaAdminClient(
            request_timeout_ms=int(self._request_s * 1_000), **self._connection
        )
        try:
            await self._start(admin)
        except BusUnavailable:
            await self._explain_refusal()
            raise
        self._admin = admin
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all that was made of this bus."""
        admin, self._admin = self._admin, None
        if admin is None:
            return
        await asyncio.gather(*(part.close() for part in self._parts))
        self._parts.clear()
        await _close_admin(admin)

    async def init(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Create the topics that are missing; never change one that exists."""
        admin = self._open()
        await topic_admin.create_topics(admin, specs)
        found = await topic_admin.find_settled(admin, [spec.name for spec in specs])
        return await self._states(specs, found, None)

    async def set_up(
        self, specs: Sequence[TopicSpec], *, replication: int | None, apply: bool
    ) -> tuple[Sequence[TopicState], Sequence[str]]:
        """As `init`, with so many replicas; with `apply` topics that exist get the settings that
        they should have. Their state afterwards, and what was changed of topics that were there.

        Raises:
            UnusableBus: there are not so many brokers, or this user may not do it.
        """
        admin = self._open()
        await topic_admin.create_topics(admin, specs, replication=replication)
        copies = topic_admin.replicas(await topic_admin.count_brokers(admin), replication)
        changed = await topic_admin.apply_settings(admin, specs, copies) if apply else ()
        found = await topic_admin.find_settled(admin, [spec.name for spec in specs], changed)
        return await self._states(specs, found, replication), [str(one) for one in changed]

    async def grant(self, wanted: Sequence[Permission]) -> Sequence[Permission]:
        """Give these rights, and return those that were missing. Raises UnusableBus: there is no
        authorizer, or we may not."""
        return await topic_admin.grant(self._open(), wanted)

    async def show(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Compare the topics with what they should be. The size is not asked for: it takes a right
        that few have."""
        names = [spec.name for spec in specs]
        found = await topic_admin.find_topics(self._open(), names, configs=True)
        return await self._states(specs, found, None)

    async def _states(
        self,
        specs: Sequence[TopicSpec],
        found: Mapping[str, topic_admin.FoundTopic],
        replication: int | None,
    ) -> Sequence[TopicState]:
        brokers = await topic_admin.count_brokers(self._open())
        copies = topic_admin.replicas(brokers, replication)
        records = await self._count(found)
        return tuple(
            TopicState(spec, False, 0, None)
            if spec.name not in found
            else TopicState(
                spec,
                True,
                records[spec.name],
                None,
                topic_admin.differences(spec, found[spec.name], copies),
            )
            for spec in specs
        )

    async def producer(self) -> KafkaProducer:
        """A new producer."""
        self._open()

        async def make() -> AIOKafkaProducer:
            client = AIOKafkaProducer(
                request_timeout_ms=int(self._request_s * 1_000),
                **PRODUCER_OPTIONS,
                **self._connection,
            )
            await self._start(client)
            return client

        producer = KafkaProducer(
            await make(), make, self._require_partitions, request_s=self._request_s
        )
        self._keep(producer)
        return producer

    async def reader(self, start: Mapping[Partition, From]) -> KafkaReader:
        """A reader of these partitions from these places."""
        self._open()
        await self._require_partitions(list(start))
        client = AIOKafkaConsumer(**CONSUMER_OPTIONS, **self._connection)
        await self._start(client)
        reader = KafkaReader(client, self._require, request_s=self._request_s)
        self._keep(reader)
        try:
            await reader.start(start)
        except BaseException:
            await reader.close()
            raise
        return reader

    async def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        listener: AssignmentListener | None = None,
        only: Sequence[Partition] | None = None,
        member: str | None = None,
    ) -> KafkaConsumer:
        """A member of `group`, which begins at the committed offset, else at the earliest
        record."""
        self._open()
        if only is not None:
            await self._require_partitions(only)
        client = AIOKafkaConsumer(
            group_id=group,
            group_instance_id=None if only is not None else member,
            session_timeout_ms=int(self._session_s * 1_000),
            heartbeat_interval_ms=int(min(HEARTBEAT_S, self._session_s / 3) * 1_000),
            max_poll_interval_ms=int(POLL_INTERVAL_S * 1_000),
            rebalance_timeout_ms=int(REBALANCE_S * 1_000),
            partition_assignment_strategy=(own_assignor(),),
            **MEMBER_OPTIONS,
            **self._connection,
        )
        await self._start(client)
        consumer = KafkaConsumer(
            client, self._require, topics=topics, listener=listener, request_s=self._request_s
        )
        self._keep(consumer)
        try:
            if only is None:
                await consumer.subscribe()
            else:
                consumer.assign(only)
        except BaseException:
            await consumer.close()
            raise
        return consumer

    async def lease(self, name: str) -> _Granted:
        """Claim `name`, or None while somebody else holds it."""
        self._open()
        return _Granted()

    async def leased(self, name: str) -> bool:
        """Whether somebody who lives holds `name`."""
        self._open()
        return False

    def _open(self) -> AIOKafkaAdminClient:
        if self._admin is None:
            raise BusClosed(f"the bus {self.url} is not open")
        return self._admin

    def _keep(self, part: KafkaProducer | KafkaReader) -> None:
        """To be closed with the bus, unless it was closed before."""
        self._parts = [*(kept for kept in self._parts if not kept.closed), part]

    async def _start(
        self, client: AIOKafkaAdminClient | AIOKafkaProducer | AIOKafkaConsumer
    ) -> None:
        inner = client.client if isinstance(client, AIOKafkaProducer) else client._client
        correct(inner)
        try:
            with translated(f"connecting to {self.url}"):
                async with asyncio.timeout(self._request_s):
                    await client.start()
                    # A broker that was just started, or woken up, names none. The client has only
                    # this connection then, and would be without any for good once it is lost.
                    while not inner.cluster.brokers():
                        await asyncio.sleep(_STARTING_S)
                        await inner.force_metadata_update()
        except BaseException:
            if isinstance(client, AIOKafkaAdminClient):
                await _close_admin(client)
            else:
                await stop(client)
            raise

    async def _explain_refusal(self) -> None:
        """Raise UnusableBus if a broker is there and refuses us: aiokafka's bootstrap only logs
        that.
        """
        for server in self._servers:
            host, _, port = server.rpartition(":")
            with suppress(BusUnavailable), translated(f"connecting to {server}"):
                async with asyncio.timeout(CLOSE_S):
                    options = {
                        k: v for k, v in self._connection.items() if k != "bootstrap_servers"
                    }
                    connection = await create_conn(host.strip("[]"), int(port), **options)
                    connection.close()

    async def _require(self, topics: Sequence[str]) -> None:
        missing = [topic for topic in topics if topic not in self._partitions]
        if not missing:
            return
        found = await topic_admin.find_topics(self._open(), missing)
        self._partitions |= {name: topic.partitions for name, topic in found.items()}
        unknown = [topic for topic in missing if topic not in found]
        if unknown:
            raise UnknownTopic(
                f"the bus has no topic {unknown[0]!r}, or this user may not see it: "
                "'tocsin bus init' creates missing topics"
            )

    async def _require_partitions(
        self, partitions: Sequence[Partition], /, *, again: bool = False
    ) -> None:
        """`again`: ask for topics that were there before, too."""
        topics = sorted({partition.topic for partition in partitions})
        if again:
            for topic in topics:
                self._partitions.pop(topic, None)
        await self._require(topics)
        for topic, number in partitions:
            if not 0 <= number < self._partitions[topic]:
                raise UnknownTopic(
                    f"topic {topic!r} has partitions 0 to {self._partitions[topic] - 1}, "
                    f"not {number}"
                )

    async def _count(self, topics: Mapping[str, topic_admin.FoundTopic]) -> dict[str, int]:
        """Records by offsets: what compaction has taken is counted too."""
        places = [
            TopicPartition(name, number)
            for name, topic in topics.items()
            for number in range(topic.partitions)
        ]
        counts = dict.fromkeys(topics, 0)
        if not places:
            return counts
        client = AIOKafkaConsumer(**CONSUMER_OPTIONS, **self._connection)
        await self._start(client)
        try:
            with translated("counting records"):
                # A broker tells of new partitions before it leads them: the client asks again.
                async with asyncio.timeout(max(self._request_s, topic_admin.SETTLE_S)):
                    begins = await client.beginning_offsets(places)
                    ends = await client.end_offsets(places)
        finally:
            await stop(client)
        for place in places:
            counts[place.topic] += ends[place] - begins[place]
        return counts


async def _close_admin(admin: AIOKafkaAdminClient) -> None:
    with translated("closing"):
        try:
            async with asyncio.timeout(CLOSE_S):
                await admin.close()
        except TimeoutError:
            return
