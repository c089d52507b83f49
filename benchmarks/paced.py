"""A fleet in real time: how many ranks a rules worker watches from Kafka without falling behind.

    python benchmarks/paced.py [--ranks 1000 2000 4000] [--seconds 60] [--bus URL] [--json]

The telemetry of a simulated fleet (`fleet.py`: steps of one second, runs of 64 ranks, and of each
run three summaries of 2,000 tensors each 10 s) is encoded beforehand and then sent at the pace at
which trainings send it. Broker, sender and one worker with all rules at their defaults share this
machine. In the middle of the time each run has a fault, of three kinds in turn: a NaN in the loss
of a rank, a loss that is infinite, an uncorrectable memory error of a GPU. Each must be found.

"Age" is how old the oldest record was that the worker read in a round: the median, and that of the
last ten seconds. If that is larger, the worker falls behind. "Delay" is from the append of a fault
to that of its issue, by the broker's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from fleet import INTERVAL_S, RUN_RANKS, SCALARS, add_summaries
from streaming import place_on, read_topic
from take_over import bus_of, init, publish

from tocsin.bus.port import Bus, Outgoing
from tocsin.bus.urls import open_bus
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import ISSUE_PARTITIONS, TELEMETRY_PARTITIONS, Topics
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

SLICE_S = 0.1
GPU = "gpu.0.ecc_uncorrected_errors"


@dataclass(frozen=True, slots=True)
class Watched:
    """How a worker has kept up with a fleet."""

    ranks: int
    records_per_s: float
    age_s: float
    last_age_s: float
    worker_cores: float
    faults: int
    found: int
    delay_ms: float
    longest_delay_ms: float


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a run: the record, and the rule that finds it."""

    value: bytes | None
    rule: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """What it sends: before the first step, and then in each second."""

    started: list[Outgoing]
    seconds: list[list[Outgoing]]
    faults: dict[bytes, Fault]


def encoded(topics: Topics, ranks: int, seconds: int) -> Fleet:
    """All records of so many ranks."""
    runs = [RunBuilder(f"run-{n}", world_size=RUN_RANKS) for n in range(max(1, ranks // RUN_RANKS))]
    fleet = Fleet([], [[] for _ in range(seconds)], {})
    for number, run in enumerate(runs):
        for rank in range(RUN_RANKS):
            run.started(rank=rank)
        run.system({GPU: 0.0})
        fleet.started.extend(place_on(topics, run.records))
        began_ms = run.now_ms
        for second in range(seconds):
            at = len(run.records)
            # A sender numbers its records in the order of their time.
            add_second(run, second, began_ms + 1000 * second)
            if second == seconds // 2:
                rule = add_fault(run, number % 3, step=second)
                fleet.faults[run.run_id.encode()] = Fault(run.records[-1].value, rule)
            fleet.seconds[second].extend(place_on(topics, run.records[at:]))
    return fleet


def add_second(run: RunBuilder, second: int, now_ms: int) -> None:
    """A step of each rank; each ten seconds heartbeats, and the first rank's summaries."""
    for rank in range(RUN_RANKS):
        run.now_ms = now_ms
        run.steps([second], rank=rank, loss=2.0 - 0.001 * second, columns=SCALARS)
        if second % INTERVAL_S == 0:
            run.heartbeat(rank=rank, last_step=second)
    if second % INTERVAL_S == 0:
        add_summaries(run, second, 1.0 + 0.01 * second)


def add_fault(run: RunBuilder, kind: int, *, step: int) -> str:
    """The rule that finds it."""
    if kind == 2:
        run.system({GPU: 1.0})
        return "gpu_hardware_error"
    if kind == 1:
        run.steps([step + 1], rank=0, loss=math.inf)
    else:
        run.steps([step + 1], rank=3, loss=math.nan)
    return "nonfinite"


async def send(bus: Bus, fleet: Fleet) -> None:
    """At the pace of trainings; raises SystemExit if this process cannot."""
    producer = await bus.producer()
    began = time.monotonic()
    slices = round(1 / SLICE_S)
    for second, records in enumerate(fleet.seconds):
        for part in range(slices):
            left_s = began + second + part * SLICE_S - time.monotonic()
            await asyncio.sleep(max(0.0, left_s))
            share = len(records) / slices
            if rows := records[round(part * share) : round((part + 1) * share)]:
                await producer.publish(rows)
    late_s = time.monotonic() - began - len(fleet.seconds)
    await producer.close()
    if late_s > 2:
        raise SystemExit(f"the sender is {late_s:.1f} s late: this machine cannot send so much")


class Ages(Metrics):
    """How old the oldest record of each round was, seconds."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Keep those of records."""
        if name == names.BUS_LAG:
            self.seen.append((time.monotonic(), seconds))


async def work(url: str, prefix: str) -> None:
    """One worker, until a line comes; then prints the ages, in all and of the last ten seconds
    before it."""
    topics, ages = Topics(prefix), Ages()
    async with open_bus(url) as bus:
        service = build_rules_service(topics)
        settings = WorkerSettings(standby_bytes=0)
        worker = Worker(bus, service, topics=topics, group=prefix, settings=settings, metrics=ages)
        task = asyncio.create_task(worker.run())
        await worker.ready.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        until_s = max(at for at, _ in ages.seen)
        last = [age for at, age in ages.seen if at > until_s - 10]
        await worker.caught_up(60)
        print(json.dumps([statistics.median(age for _, age in ages.seen), statistics.median(last)]))
        worker.stop()
        await task


def start_worker(url: str, prefix: str) -> subprocess.Popen[str]:
    """A process of this file that does `work`."""
    words = [sys.executable, __file__, "--worker", prefix, "--bus", url]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def watch(url: str, ranks: int, seconds: int) -> Watched:
    """Send the fleet's telemetry to one worker."""
    topics = Topics(f"paced-{uuid.uuid4().hex[:8]}")
    fleet = encoded(topics, ranks, seconds)
    async with open_bus(url) as bus:
        await init(bus, topics)
        child = start_worker(url, topics.prefix)
        try:
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
            await publish(bus, fleet.started)
            await asyncio.sleep(5)
            process = psutil.Process(child.pid)
            before, began = process.cpu_times(), time.monotonic()
            await send(bus, fleet)
            after, took_s = process.cpu_times(), time.monotonic() - began
            age_s, last_age_s = json.loads(child.communicate("\n", timeout=90)[0])
        finally:
            child.kill()
            child.wait()
        delays = await delays_of(bus, topics, fleet.faults)
    cpu_s = sum(after[:2]) - sum(before[:2])
    return Watched(
        ranks=len(fleet.faults) * RUN_RANKS,
        records_per_s=sum(map(len, fleet.seconds)) / seconds,
        age_s=age_s,
        last_age_s=last_age_s,
        worker_cores=cpu_s / took_s,
        faults=len(fleet.faults),
        found=len(delays),
        delay_ms=statistics.median(delays) if delays else math.nan,
        longest_delay_ms=max(delays, default=math.nan),
    )


async def delays_of(bus: Bus, topics: Topics, faults: Mapping[bytes, Fault]) -> list[float]:
    """From each fault to its issue, milliseconds; of those that were found."""
    appended: dict[bytes, int] = {}
    issued: dict[bytes, int] = {}
    async for record in read_topic(bus, topics.telemetry, TELEMETRY_PARTITIONS):
        if record.value == faults[record.key].value:
            appended[record.key] = record.append_ms
    async for record in read_topic(bus, topics.issues, ISSUE_PARTITIONS):
        if faults[record.key].rule.encode() in (record.value or b""):
            issued.setdefault(record.key, record.append_ms)
    return sorted(float(issued[key] - appended[key]) for key in issued)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--seconds", type=int, default=60, help="a multiple of ten")
    parser.add_argument("--bus", help="kafka://HOST:PORT; default: a broker of its own")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        asyncio.run(work(arguments.bus, arguments.worker))
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tocsin-bench-")))
        url = stack.enter_context(bus_of(arguments.bus, 0 if arguments.bus else 1, folder))
        found = [asyncio.run(watch(url, ranks, arguments.seconds)) for ranks in arguments.ranks]
    if arguments.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    print(f"{'ranks':>7}{'records/s':>11}{'age, median':>13}{'at the end':>12}"
          f"{'cores':>7}{'found':>12}{'delay':>9}{'longest':>9}")  # fmt: skip
    for one in found:
        print(
            f"{one.ranks:>7,}{one.records_per_s:>11,.0f}"
            f"{one.age_s:>11.2f} s{one.last_age_s:>10.2f} s"
            f"{one.worker_cores:>7.2f}{one.found:>6} of {one.faults:<3}"
            f"{one.delay_ms:>6.0f} ms{one.longest_delay_ms:>6.0f} ms"
        )


if __name__ == "__main__":
    main()
