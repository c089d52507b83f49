"""A rules worker on Kafka beside other programs that read the same records.

    python benchmarks/streaming.py [--records 60000] [--brokers 1 | --bus URL] [--json]

The telemetry of a simulated fleet (`fleet.py`: runs of 64 ranks, their scalars and summaries of
2,000 tensors) is put on a topic. Then each program reads all of it, in turn, in a process of its
own: one rules worker with all rules at their defaults, two of them in one group, a plain loop of
confluent-kafka, and an application of Quix Streams. The last two do far less: they take the mean
loss of each run, from the same decoder. Those that are not installed are left out
(`pip install confluent-kafka quixstreams`).

What a program costs is the processor time of its processes, of the workers with joining the group,
until the last commit; the wall time says more of the machine, as the broker shares its cores.
"Each with a core" is what two workers would read against one, by their processor time.

Where the time of one worker goes is measured by one more of them, with timers around its parts:
processor time of its threads, and of the rules the time that the service counts, which is wall time
(processor time would be too dear to ask for, so often). What the client takes to fetch is that of a
reader which reads the topic before, and does nothing with its records.

Then the delay of one worker that is up to date: a NaN each 200 ms, each in a run of its own, beside
the records of 100 ranks a second; from the append of the record to that of the issue, by the
broker's clock.
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
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fleet import RUN_RANKS, interval
from take_over import bus_of, ends_of, init, publish

from tocsin.bus.port import EARLIEST, Bus, Outgoing, Partition, Record
from tocsin.bus.urls import open_bus
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import ISSUE_PARTITIONS, TELEMETRY_PARTITIONS, Topics
from tocsin.stream_rules.engine import partitions
from tocsin.stream_rules.service import RulesService, build_rules_service
from tocsin.stream_rules.testing import RunBuilder

ALARMS = 150
EVERY_S = 0.2
COSTLIEST = 8
BACKGROUND_RANKS = 100


@dataclass(frozen=True, slots=True)
class Read:
    """What one program took for all records: seconds, over all of its processes."""

    program: str
    processes: int
    records: int
    wall_s: float
    cpu_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def per_core(self) -> float:
        """Records that one core reads in a second."""
        return self.records / self.cpu_s


class Means:
    """The mean loss of each run: what a stream processor's first example does."""

    def __init__(self) -> None:
        self.sums: dict[bytes, tuple[int, float]] = {}

    def take(self, key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        """One record."""
        losses = losses_of(value, headers)
        if losses:
            count, total = self.sums.get(key, (0, 0.0))
            self.sums[key] = count + len(losses), total + sum(losses)


def losses_of(value: bytes, headers: Sequence[tuple[str, bytes]]) -> list[float]:
    """The finite losses of a record of steps; none of others, which are not decoded."""
    meta = read_meta(headers)
    if meta.type != StepFrame.type:
        return []
    frame = decode(meta, value)
    assert isinstance(frame, StepFrame)
    losses = frame.column("loss")
    return [] if losses is None else [float(loss) for loss in losses if math.isfinite(loss)]


# -- the programs, each in a process of its own


async def rules(url: str, prefix: str, group: str, *, parts: bool = False) -> None:
    """One worker until all is applied and committed; prints what it took, and its parts."""
    topics, metrics, spent = Topics(prefix), PrometheusMetrics(), defaultdict[str, float](float)
    async with open_bus(url) as bus:
        service = build_rules_service(topics, metrics=metrics)
        if parts:
            spent["fetch"] = await fetch_alone(bus, topics)
            time_parts(service, spent)
        worker = Worker(
            bus, service, topics=topics, group=group, metrics=metrics,
            settings=WorkerSettings(standby_bytes=0),
        )  # fmt: skip
        began, cpu = time.perf_counter(), time.process_time()
        task = asyncio.create_task(worker.run())
        while not await worker.caught_up(600):  # a rebalance begins anew
            pass
        took = time.perf_counter() - began, time.process_time() - cpu
        by_rule = {
            one.name: metrics.value(names.RULE_SECONDS, rule=one.name) for one in service.specs
        }
        found = parts_of(spent, by_rule, took[1]) if parts else {}
        # Another of the group may have more to do, and wants no rebalance meanwhile.
        applied = round(metrics.value(names.RECORDS, service="rules"))
        print(json.dumps([applied, *took, found]), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        worker.stop()
        await task


async def fetch_alone(bus: Bus, topics: Topics) -> float:
    """Seconds of processor time to read all telemetry, and to do nothing with it."""
    cpu = time.process_time()
    async for _ in read_topic(bus, topics.telemetry, TELEMETRY_PARTITIONS):
        pass
    return time.process_time() - cpu


def time_parts(service: RulesService, spent: dict[str, float]) -> None:
    """Count the processor time of decoding, applying (decoding included) and snapshots."""

    def timed(part: str, work: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            began = time.thread_time()
            try:
                return work(*arguments, **options)
            finally:
                spent[part] += time.thread_time() - began

        return call

    setattr(partitions, "decode", timed("decode", decode))  # noqa: B010
    setattr(service, "apply", timed("apply", service.apply))  # noqa: B010
    setattr(service, "snapshots", timed("snapshots", service.snapshots))  # noqa: B010


def parts_of(
    spent: dict[str, float], by_rule: Mapping[str, float], cpu_s: float
) -> dict[str, float]:
    """The seconds of each part: they add up to all of the worker's."""
    costliest = sorted(by_rule, key=lambda rule: -by_rule[rule])[:COSTLIEST]
    rest = sum(by_rule.values()) - sum(by_rule[rule] for rule in costliest)
    return {
        "the client: fetch, decompress": spent["fetch"],
        "our decoder": spent["decode"],
        **{f"rule {rule}": by_rule[rule] for rule in costliest},
        f"{len(by_rule) - len(costliest)} other rules": rest,
        "engine around rules": spent["apply"] - spent["decode"] - sum(by_rule.values()),
        "snapshots of checkpoints": spent["snapshots"],
        "produce, commits, the worker's loop": (
            cpu_s - spent["fetch"] - spent["apply"] - spent["snapshots"]
        ),
    }


def confluent(url: str, prefix: str, group: str, records: int) -> tuple[int, float, float]:
    """A loop over `Consumer.consume`, with a commit each 5 s."""
    from confluent_kafka import Consumer  # type: ignore[import-not-found,unused-ignore]

    consumer = Consumer(
        {
            "bootstrap.servers": url.removeprefix("kafka://"),
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([Topics(prefix).telemetry])
    means, seen, began, cpu, committed = Means(), 0, 0.0, 0.0, 0.0
    while seen < records:
        found = consumer.consume(500, 0.5)
        if not seen and found:
            began = committed = time.perf_counter()
            cpu = time.process_time()
        for message in found:
            means.take(message.key(), message.value(), message.headers())
        seen += len(found)
        if found and (seen == records or time.perf_counter() - committed > 5):
            consumer.commit(asynchronous=False)
            committed = time.perf_counter()
    took = time.perf_counter() - began, time.process_time() - cpu
    consumer.close()
    return seen, *took


def quix(url: str, prefix: str, group: str, records: int) -> tuple[int, float, float]:
    """A stateful function of an application, its state in RocksDB and a changelog topic."""
    from quixstreams import Application, State  # type: ignore[import-not-found,unused-ignore]

    began = [0.0, 0.0]

    def mean(value: bytes, key: object, at: int, headers: object, state: State) -> float:
        if not began[0]:
            began[:] = time.perf_counter(), time.process_time()
        losses = losses_of(value, headers)  # type: ignore[arg-type]
        count, total = state.get("sums", (0, 0.0))
        if losses:
            count, total = count + len(losses), total + sum(losses)
            state.set("sums", (count, total))
        return float(total / max(count, 1))

    with tempfile.TemporaryDirectory() as folder:
        app = Application(
            broker_address=url.removeprefix("kafka://"),
            consumer_group=group,
            auto_offset_reset="earliest",
            state_dir=folder,
            loglevel="ERROR",
        )
        topic = app.topic(
            Topics(prefix).telemetry, key_deserializer="bytes", value_deserializer="bytes"
        )
        frame = app.dataframe(topic)
        frame.apply(mean, stateful=True, metadata=True)
        app.run(count=records, timeout=60, collect=False)
        return records, time.perf_counter() - began[0], time.process_time() - began[1]


OTHERS = {"confluent": confluent, "quix": quix}


def program(name: str, url: str, prefix: str, group: str, records: int) -> None:
    """The work of one process; prints what it took."""
    if name in ("rules", "parts"):
        asyncio.run(rules(url, prefix, group, parts=name == "parts"))
    else:
        print(json.dumps(OTHERS[name](url, prefix, group, records)), flush=True)


# -- what starts them


def read_all(
    name: str, url: str, prefix: str, records: int, *, processes: int = 1, python: str
) -> Read:
    """Have so many processes of a program read all of the topic."""
    group = f"{prefix}-{name}-{processes}"
    words = [python, __file__, "--program", name, "--bus", url, "--prefix", prefix]
    words += ["--group", group, "--records", str(records)]
    children = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    lines = []
    for child in children:
        assert child.stdout is not None
        lines.append(child.stdout.readline())
    for child in children:
        child.communicate("\n")
        if child.returncode:
            raise SystemExit(f"{name} has ended with exit code {child.returncode}")
    took = [json.loads(line) for line in lines]
    if sum(one[0] for one in took) < records:
        raise SystemExit(f"{name} has read {sum(one[0] for one in took):,} of {records:,} records")
    wall_s, cpu_s = max(one[1] for one in took), sum(one[2] for one in took)
    return Read(name, processes, records, wall_s, cpu_s, *took[0][3:])


async def fill(url: str, topics: Topics, records: int) -> int:
    """About so many records of a fleet, those of one interval after the other."""
    runs = max(1, records // (4 * 11 * RUN_RANKS))
    builders = [RunBuilder(f"run-{number}", world_size=RUN_RANKS) for number in range(runs)]
    sent = 0
    async with open_bus(url) as bus:
        await init(bus, topics)
        for run in builders:
            for rank in range(RUN_RANKS):
                run.started(rank=rank)
            await publish(bus, place_on(topics, run.records))
            sent += len(run.records)
        for number in range(4):
            for run in builders:
                rows = interval(run, number, RUN_RANKS, bad=3 if number == 3 else None)
                await publish(bus, place_on(topics, rows))
                sent += len(rows)
    return sent


def place_on(topics: Topics, records: Sequence[Record]) -> list[Outgoing]:
    """The records, as they are sent to these topics."""
    return [
        Outgoing(Partition(topics.telemetry, one.partition.number), one.key, one.value, one.headers)
        for one in records
    ]


async def delays(url: str) -> list[float]:
    """Milliseconds from the append of a NaN to that of its issue."""
    topics = Topics(f"delay-{uuid.uuid4().hex[:8]}")
    metrics = PrometheusMetrics()
    async with open_bus(url) as bus:
        await init(bus, topics)
        service = build_rules_service(topics, metrics=metrics)
        worker = Worker(bus, service, topics=topics, group=topics.prefix, metrics=metrics)
        task = asyncio.create_task(worker.run())
        await worker.ready.wait()
        producer = await bus.producer()
        others = RunBuilder("others", world_size=BACKGROUND_RANKS)
        for rank in range(BACKGROUND_RANKS):
            others.started(rank=rank)
        await producer.publish(place_on(topics, others.records))
        for number in range(ALARMS):
            alarm = RunBuilder(f"alarm-{number}")
            alarm.started()
            alarm.steps(range(10), loss=2.0)
            alarm.steps([10], loss=math.nan)
            await producer.publish(place_on(topics, alarm.records))
            at = len(others.records)
            if not number % round(1 / EVERY_S):
                for rank in range(BACKGROUND_RANKS):
                    others.steps([number], rank=rank, loss=2.0)
                await producer.publish(place_on(topics, others.records[at:]))
            await asyncio.sleep(EVERY_S)
        await worker.caught_up(60)
        worker.stop()
        await task
        await producer.close()
        return await _delays(bus, topics)


async def _delays(bus: Bus, topics: Topics) -> list[float]:
    appended: dict[bytes, int] = {}
    issued: dict[bytes, int] = {}
    async for record in read_topic(bus, topics.telemetry, TELEMETRY_PARTITIONS):
        if record.key.startswith(b"alarm"):
            appended[record.key] = record.append_ms
    async for record in read_topic(bus, topics.issues, ISSUE_PARTITIONS):
        if b'"nonfinite"' in (record.value or b""):
            issued.setdefault(record.key, record.append_ms)
    if len(issued) < ALARMS:
        raise SystemExit(f"{len(issued)} of {ALARMS} faults were found")
    return sorted(float(issued[key] - appended[key]) for key in issued)


async def read_topic(bus: Bus, topic: str, partitions: int) -> AsyncIterator[Record]:
    """All that a topic has now."""
    places = [Partition(topic, number) for number in range(partitions)]
    ends = await ends_of(bus, places)
    reader = await bus.reader(dict.fromkeys(places, EARLIEST))
    left = sum(ends.values())
    while left > 0:
        for record in await reader.poll(timeout_s=1.0):
            left -= 1
            yield record
    await reader.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--bus", help="kafka://HOST:PORT; default: brokers of its own")
    parser.add_argument("--brokers", type=int, default=1, help="start a Kafka of so many brokers")
    parser.add_argument("--others", default=sys.executable, help="a Python that has the others")
    parser.add_argument("--json", action="store_true")
    for name in ("program", "prefix", "group"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        program(
            arguments.program, arguments.bus, arguments.prefix, arguments.group, arguments.records
        )
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tocsin-bench-")))
        brokers = 0 if arguments.bus else arguments.brokers
        url = stack.enter_context(bus_of(arguments.bus, brokers, folder))
        found = []
        for name, processes, python in _programs(arguments.others):
            # Each has topics of its own: a worker goes on from the states that are there.
            topics = Topics(f"fleet-{uuid.uuid4().hex[:8]}")
            records = asyncio.run(fill(url, topics, arguments.records))
            found.append(
                read_all(name, url, topics.prefix, records, processes=processes, python=python)
            )
        waited = asyncio.run(delays(url))
    if arguments.json:
        print(json.dumps({"read": [asdict(one) for one in found], "delays_ms": waited}))
        return
    for one in found:
        print(
            f"{one.program:9} x {one.processes}: {one.records:,} records in {one.wall_s:5.1f} s, "
            f"{one.cpu_s:5.1f} s of CPU time: {one.per_core:6,.0f} records/s on a core"
        )
    one_worker, two_workers, timed = found[:3]
    print("where the time of a worker goes, with its timers:")
    for part, seconds in timed.parts_s.items():
        share, per_record = seconds / timed.cpu_s, 1e6 * seconds / timed.records
        print(f"  {part:36} {seconds:6.2f} s {share:6.1%} {per_record:6.1f} µs a record")
    print(f"two workers, each with a core: {2 * two_workers.per_core / one_worker.per_core:.2f}")
    print(
        f"from a NaN to its issue, {len(waited)} times: {statistics.median(waited):.0f} ms, "
        f"p99 {waited[int(0.99 * len(waited))]:.0f} ms"
    )


def _programs(others: str) -> list[tuple[str, int, str]]:
    """Which there are, in how many processes, by which Python."""
    found = [(name, count, sys.executable) for name, count in (("rules", 1), ("rules", 2))]
    found.append(("parts", 1, sys.executable))
    for name, module in (("confluent", "confluent_kafka"), ("quix", "quixstreams")):
        if subprocess.run([others, "-c", f"import {module}"], capture_output=True).returncode:
            print(f"{name} is left out: {others} has no {module}", file=sys.stderr)
        else:
            found.append((name, 1, others))
    return found


if __name__ == "__main__":
    main()
