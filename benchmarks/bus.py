"""Throughput and latency of the bus: `python benchmarks/bus.py [--kafka HOST:PORT] [--json]`.

Publishes records of 80 kB as fast as it can, in batches; then publishes at a steady rate from a
process of its own while this one reads, and takes the time from before the write to after the read.
Beside an embedded bus that a process writes to as fast as it can, and that this one reads and keeps
tidy, it takes the time that a training waits for its own record to be written.
Prints one row per bus; ratios are to the embedded bus in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.spool import SpooledBus
from tocsin.bus.port import LATEST, Bus, Consumer, Outgoing, Partition
from tocsin.bus.urls import open_bus
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.topics import TopicSpec

RECORD_BYTES = 80_000
BATCH = 25
PARTITIONS = 48
DAY_MS = 86_400_000
SENDER_RATE = 100


@dataclass(frozen=True)
class Row:
    """What was measured of one bus."""

    bus: str
    records_per_s: float
    megabytes_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    latency_max_ms: float
    latency_samples: int
    sender_p50_ms: float | None = None
    sender_p999_ms: float | None = None
    sender_max_ms: float | None = None


async def throughput(bus: Bus, spec: TopicSpec, seconds: float) -> float:
    """Records a second, acknowledged, in batches of BATCH."""
    producer = await bus.producer()
    blob = os.urandom(RECORD_BYTES)
    places = [Partition(spec.name, number % spec.partitions) for number in range(BATCH)]
    batch = [Outgoing(place, b"run", blob) for place in places]
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        await producer.publish(batch)
        count += len(batch)
    elapsed = time.perf_counter() - began
    await producer.close()
    return count / elapsed


async def write_steadily(url: str, topic: str, rate: float, count: int) -> None:
    """The other process: each value begins with the time of the write, in nanoseconds."""
    filling = os.urandom(RECORD_BYTES - 8)
    async with open_bus(url) as bus:
        producer = await bus.producer()
        due = time.monotonic()
        for _ in range(count):
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            value = time.time_ns().to_bytes(8, "big") + filling
            await producer.publish([Outgoing(Partition(topic, 0), b"run", value)])


async def latencies(bus: Bus, spec: TopicSpec, rate: float, seconds: float) -> list[float]:
    """Milliseconds from write to read, per record."""
    count = int(rate * seconds)
    reader = await bus.reader({Partition(spec.name, 0): LATEST})
    # Starting it blocks this loop for milliseconds, before anything is measured.
    writer = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, __file__, "--write", bus.url, spec.name, str(rate), str(count)]
    )
    found: list[float] = []
    deadline = time.monotonic() + seconds + 30
    while len(found) < count and time.monotonic() < deadline:
        for record in await reader.poll(timeout_s=1):
            assert record.value is not None
            written_ns = int.from_bytes(record.value[:8], "big")
            found.append((time.time_ns() - written_ns) / 1e6)
    writer.wait(10)
    await reader.close()
    return found


async def flood(url: str, topic: str, seconds: float) -> None:
    """Another process: batches without a pause."""
    async with open_bus(url) as bus:
        spec = TopicSpec(topic, PARTITIONS, "delete", retention_ms=DAY_MS)
        await throughput(bus, spec, seconds)


async def sender_waits(bus: EmbeddedBus, spec: TopicSpec, seconds: float) -> list[float]:
    """Milliseconds that a training's own record takes to be written, while the bus is busy."""
    consumer = await bus.consumer("bench", [spec.name])
    busy = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, __file__, "--flood", bus.url, spec.name, str(seconds + 2)]
    )
    reading = asyncio.create_task(_read_all(consumer))
    found: list[float] = []
    blob = os.urandom(RECORD_BYTES)
    try:
        async with SpooledBus(bus.path, unix_ms) as training:
            await training.init([spec])
            writer = await training.producer()
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                began = time.perf_counter()
                # In its thread, without the turns of this loop, which reads beside.
                await asyncio.to_thread(
                    writer._append, [Outgoing(Partition(spec.name, 0), b"run", blob)]
                )
                found.append((time.perf_counter() - began) * 1_000)
                await asyncio.sleep(1 / SENDER_RATE)
    finally:
        reading.cancel()
        busy.wait(30)
    return found


async def _read_all(consumer: Consumer) -> None:
    while True:
        await consumer.poll(timeout_s=1.0)


async def measure(url: str, seconds: float, rate: float) -> Row:
    """One bus."""
    prefix = f"bench{uuid.uuid4().hex[:8]}"
    fast = TopicSpec(f"{prefix}.fast", PARTITIONS, "delete", retention_ms=DAY_MS)
    steady = TopicSpec(f"{prefix}.steady", 1, "delete", retention_ms=DAY_MS)
    async with open_bus(url) as bus:
        await bus.init([fast, steady])
        times = sorted(await latencies(bus, steady, rate, seconds))
        rate_reached = await throughput(bus, fast, seconds)
        waits: list[float] = []
        if isinstance(bus, EmbeddedBus):
            waits = sorted(await sender_waits(bus, fast, seconds))
    return Row(
        bus=url.partition(":")[0],
        records_per_s=round(rate_reached, 1),
        megabytes_per_s=round(rate_reached * RECORD_BYTES / 1e6, 1),
        latency_p50_ms=round(statistics.median(times), 2),
        latency_p99_ms=round(times[int(len(times) * 0.99)], 2),
        latency_max_ms=round(times[-1], 2),
        latency_samples=len(times),
        sender_p50_ms=round(statistics.median(waits), 2) if waits else None,
        sender_p999_ms=round(waits[int(len(waits) * 0.999)], 2) if waits else None,
        sender_max_ms=round(waits[-1], 2) if waits else None,
    )


def show(rows: Sequence[Row]) -> None:
    """A table for a person."""
    print("bus          records/s     MB/s   p50 ms   p99 ms   max ms   ratio")
    for row in rows:
        ratio = row.records_per_s / rows[0].records_per_s
        print(
            f"{row.bus:<10}{row.records_per_s:>12,.0f}{row.megabytes_per_s:>9.0f}"
            f"{row.latency_p50_ms:>9.2f}{row.latency_p99_ms:>9.2f}{row.latency_max_ms:>9.2f}{ratio:>8.2f}"
        )
        if row.sender_p999_ms is not None:
            print(
                f"  a training's own write beside it: p50 {row.sender_p50_ms} ms, p99.9 "
                f"{row.sender_p999_ms} ms, max {row.sender_max_ms} ms"
            )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kafka", metavar="HOST:PORT", help="measure this Kafka too")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each part")
    parser.add_argument("--rate", type=float, default=50.0, help="records a second for the latency")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--write", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--flood", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        url, topic, seconds = options.flood
        asyncio.run(flood(url, topic, float(seconds)))
        return
    if options.write:
        url, topic, rate, count = options.write
        asyncio.run(write_steadily(url, topic, float(rate), int(count)))
        return
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"embedded:{Path(folder) / 'bus.db'}"]
        if options.kafka:
            urls.append(f"kafka://{options.kafka.removeprefix('kafka://')}")
        rows = [asyncio.run(measure(url, options.seconds, options.rate)) for url in urls]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
