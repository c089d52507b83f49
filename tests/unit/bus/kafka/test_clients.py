"""What a reader of Kafka keeps when a poll is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition

from tocsin.bus.kafka.clients import KafkaReader


class Client:
    """As aiokafka: it does not suspend while it has records, and what it returns is behind it."""

    def __init__(self, count: int) -> None:
        self.left = list(range(count))

    async def getmany(self, **_: object) -> Mapping[TopicPartition, Sequence[Any]]:
        if not self.left:
            return {}
        record = SimpleNamespace(
            offset=self.left.pop(0), timestamp=0, key=b"k", value=b"v", headers=()
        )
        return {TopicPartition("t", 0): [record]}


async def nothing(topics: object) -> None:
    """All topics are there."""


async def test_a_poll_that_is_given_up_loses_no_record() -> None:
    reader = KafkaReader(Client(3), nothing, request_s=1.0)
    offsets: list[int] = []
    begun = asyncio.Event()

    async def follow() -> None:
        while True:
            offsets.extend(record.offset for record in await reader.poll(timeout_s=1.0))
            begun.set()

    task = asyncio.create_task(follow())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})
    while more := await reader.poll(timeout_s=0.0):
        offsets.extend(record.offset for record in more)
    assert offsets == [0, 1, 2]
