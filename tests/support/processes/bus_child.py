"""A process of its own that uses a bus: `bus_child.py MODE URL ARGUMENT…`.

`publish TOPIC COUNT` says the offsets of what was acknowledged, then dies by SIGKILL.
`consume GROUP TOPIC` says how many partitions it owns, until it is killed.
`flood TOPIC COUNT BYTES` publishes and says how many seconds it took.
`full TOPIC LIMIT_BYTES` may write no file beyond the limit; says what publishing raises.
`lease NAME` says whether it got the lease, then waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable

from tocsin.bus.kafka.bus import KafkaBus
from tocsin.bus.port import Bus, BusError, Outgoing, Partition
from tocsin.bus.urls import open_bus


def say(*words: object) -> None:
    print(*words, flush=True)


def bus_at(url: str) -> Bus:
    if url.startswith("kafka://"):
        return KafkaBus(url.removeprefix("kafka://").split(","), session_s=2.0, request_s=2.0)
    return open_bus(url)


async def publish(bus: Bus, topic: str, count: str) -> None:
    producer = await bus.producer()
    for number in range(int(count)):
        say(*await producer.publish([Outgoing(Partition(topic, 0), b"k", b"%d" % number)]))
    os.kill(os.getpid(), signal.SIGKILL)


async def consume(bus: Bus, group: str, topic: str) -> None:
    consumer = await bus.consumer(group, [topic])
    owned = -1
    while True:
        await consumer.poll(timeout_s=0.1)
        if len(consumer.assigned()) != owned:
            owned = len(consumer.assigned())
            say(owned)


async def flood(bus: Bus, topic: str, count: str, size: str) -> None:
    producer = await bus.producer()
    began = time.monotonic()
    for number in range(int(count)):
        await producer.publish([Outgoing(Partition(topic, number % 4), b"k", bytes(int(size)))])
    say(time.monotonic() - began)


async def full(bus: Bus, topic: str, limit_bytes: str) -> None:
    producer = await bus.producer()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit_bytes), hard))
    written = 0
    try:
        while True:
            await producer.publish([Outgoing(Partition(topic, 0), b"k", bytes(500_000))])
            written += 1
    except BusError as error:
        say(f"{written}|{type(error).__name__}|{error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    say(*await producer.publish([Outgoing(Partition(topic, 0), b"k", b"after")]))


async def lease(bus: Bus, name: str) -> None:
    say(await bus.lease(name) is not None)
    await asyncio.sleep(60)


async def main() -> None:
    mode, url, *arguments = sys.argv[1:]
    modes: dict[str, Callable[..., Awaitable[None]]]
    modes = {"publish": publish, "consume": consume, "flood": flood, "full": full, "lease": lease}
    async with bus_at(url) as bus:
        await modes[mode](bus, *arguments)


if __name__ == "__main__":
    asyncio.run(main())
