"""Throughput and latency of the bus: `python benchmarks/bus.py [--kafka HOST:PORT] [--json]`.

Publishes records of 80 kB as fast as it can, in batches; then publishes at a steady rate from a
process of its own while this one reads, and takes the time from before the write to after the read.
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

from tocsin.bus.port import LATEST, Bus, Outgoing, Partition
from tocsin.bus.urls import open_bus
from tocsin.schemas.topics import TopicSpec

RECORD_BYTES = 80_000
BATCH = 25
PARTITIONS = 48
DAY_MS = 86_400_000


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


async def measure(url: str, seconds: float, rate: float) -> Row:
    """One bus."""
    prefix = f"bench{uuid.uuid4().hex[:8]}"
    fast = TopicSpec(f"{prefix}.fast", PARTITIONS, "delete", retention_ms=DAY_MS)
    steady = TopicSpec(f"{prefix}.steady", 1, "delete", retention_ms=DAY_MS)
    async with open_bus(url) as bus:
        await bus.init([fast, steady])
        times = sorted(await latencies(bus, steady, rate, seconds))
        rate_reached = await throughput(bus, fast, seconds)
    return Row(
        bus=url.partition(":")[0],
        records_per_s=round(rate_reached, 1),
        megabytes_per_s=round(rate_reached * RECORD_BYTES / 1e6, 1),
        latency_p50_ms=round(statistics.median(times), 2),
        latency_p99_ms=round(times[int(len(times) * 0.99)], 2),
        latency_max_ms=round(times[-1], 2),
        latency_samples=len(times),
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


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kafka", metavar="HOST:PORT", help="measure this Kafka too")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each part")
    parser.add_argument("--rate", type=float, default=50.0, help="records a second for the latency")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--write", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
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
