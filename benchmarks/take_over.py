"""How soon a worker answers for runs that it takes over, with and without standing by.

    python benchmarks/take_over.py [--runs 1000] [--checkpoints 5] [--brokers 1 | --bus URL]

The states of so many live runs of 200 tensors are written as by checkpoints each 5 s: all of them
once, then those that have changed. Nothing is compacted, as on a topic whose segments are not full.
Then a worker with all rules at their defaults joins and gets all partitions: once without a
standby, and once after its standby has read what is there. It restores the states and finds the NaN
of one run. Times are on the wall clock; what joining takes is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fleet import LIVE_TENSORS, SCALARS, add_summaries

from tocsin.bus.port import EARLIEST, Bus, BusUnavailable, From, Outgoing, Partition, Record
from tocsin.bus.urls import open_bus
from tocsin.runtime import metrics as names
from tocsin.runtime.heap import rare_collections
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.service import Tick
from tocsin.runtime.standby import Standby
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.topics import TELEMETRY_PARTITIONS, Topics
from tocsin.stream_rules.service import RulesService, build_rules_service
from tocsin.stream_rules.testing import RunBuilder

HERE = Path(__file__).parent
STANDBY_BYTES = 1 << 30
ALL = frozenset(range(TELEMETRY_PARTITIONS))
SLICE = 2_000


@dataclass(frozen=True, slots=True)
class TakeOver:
    """One take-over. Seconds; `standby_cpu_s` is what reading ahead took before it."""

    standby: bool
    runs: int
    states_on_topic: int
    standby_cpu_s: float
    standby_bytes: int
    records_read: int
    restore_s: float
    first_issue_s: float
    first_issue_cpu_s: float


class Timed(RulesService):
    """Notes when a restore began and when the first issue was handed out."""

    began_s = began_cpu_s = math.nan
    found_s = found_cpu_s = math.nan

    def release(self, partitions: Collection[int]) -> None:
        if math.isnan(self.began_s):
            self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()
        super().release(partitions)

    def outputs(self) -> Sequence[Outgoing]:
        found = super().outputs()
        if math.isnan(self.found_s) and any(b'"nonfinite"' in (o.value or b"") for o in found):
            self.found_s, self.found_cpu_s = time.perf_counter(), time.process_time()
        return found


def interval(run: RunBuilder, number: int, *, loss: float = 2.0) -> list[Record]:
    """What a run sends in 10 s."""
    at, first = len(run.records), 10 * number
    run.steps(range(first, first + 10), loss=loss, columns=SCALARS)
    run.heartbeat(last_step=first + 9)
    add_summaries(run, first, 1.0 + 0.01 * number, LIVE_TENSORS)
    return run.records[at:]


@contextlib.contextmanager
def bus_of(url: str | None, brokers: int, folder: Path) -> Iterator[str]:
    """The URL of the bus, which is there inside of the block."""
    if brokers:
        sys.path.insert(0, str(HERE.parent / "tests"))
        from support.servers.kafka_broker import running_cluster

        with running_cluster(folder, brokers) as started:
            yield "kafka://" + ",".join(broker.server for broker in started)
    else:
        yield url or f"embedded:{folder}/bus.db"


async def publish(bus: Bus, records: Sequence[Outgoing]) -> None:
    """Append them."""
    producer = await bus.producer()
    for at in range(0, len(records), SLICE):
        await producer.publish(records[at : at + SLICE])
    await producer.close()


def outgoing(records: Sequence[Record]) -> list[Outgoing]:
    """The same to be sent."""
    return [Outgoing(r.partition, r.key, r.value, r.headers) for r in records]


async def write(bus: Bus, topics: Topics, runs: int, checkpoints: int) -> list[RunBuilder]:
    """Telemetry and states of so many live runs."""
    service = build_rules_service(topics)
    builders = [RunBuilder(f"live-{number}") for number in range(runs)]
    offsets: dict[int, int] = {}
    for number in range(checkpoints):
        telemetry: list[Outgoing] = []
        for run in builders:
            at = len(run.records)
            if not number:
                run.started(role="launcher")
                run.started()
            interval(run, number)
            sent = [_placed(record, topics, offsets) for record in run.records[at:]]
            service.apply(sent, Tick(sent[-1].append_ms, ALL))
            telemetry += outgoing(sent)
        await publish(bus, telemetry)
        service.outputs()
        await publish(bus, service.snapshots(force=False))
        print(f"checkpoint {number + 1} of {checkpoints} written", file=sys.stderr)
    return builders


def _placed(record: Record, topics: Topics, offsets: dict[int, int]) -> Record:
    """As the bus will give it: each run begins where the one before on its partition ended."""
    number = record.partition.number
    offset = offsets[number] = offsets.get(number, -1) + 1
    return Record(
        Partition(topics.telemetry, number),
        offset,
        record.append_ms,
        record.key,
        record.value,
        record.headers,
    )


async def ends_of(bus: Bus, places: Sequence[Partition]) -> Mapping[Partition, int]:
    """The ends of partitions."""
    reader = await bus.reader(dict.fromkeys(places, EARLIEST))
    ends = await reader.ends(places)
    await reader.close()
    return ends


async def take_over(bus: Bus, topics: Topics, runs: int, *, standby: bool, group: str) -> TakeOver:
    """A worker gets all partitions."""
    metrics = PrometheusMetrics()
    service = Timed(topics, build_rules_service(topics).specs)
    settings = WorkerSettings(standby_bytes=STANDBY_BYTES if standby else 0)
    worker = Worker(bus, service, topics=topics, group=group, metrics=metrics, settings=settings)
    states = [Partition(topics.state, number) for number in ALL]
    ends = await ends_of(bus, states)
    began_cpu_s = time.process_time()
    ahead: Standby | None = worker._wiring._standby
    if ahead is not None:
        ahead.start()
        await _until(lambda: _has_read(ahead, ends))
    standby_cpu_s = time.process_time() - began_cpu_s
    kept = ahead._kept.size_bytes if ahead is not None else 0
    with rare_collections():
        task = asyncio.create_task(worker.run())
        await _until(lambda: not math.isnan(service.found_s) or task.done())
        worker.stop()
        await task
    return TakeOver(
        standby,
        runs,
        sum(ends.values()),
        standby_cpu_s,
        kept,
        round(metrics.value(names.RESTORE_RECORDS, service="rules")),
        metrics.value(names.RESTORE_SECONDS, service="rules"),
        service.found_s - service.began_s,
        service.found_cpu_s - service.began_cpu_s,
    )


async def init(bus: Bus, topics: Topics) -> None:
    """A broker that has just been started may take longer than an answer is waited for."""
    for _ in range(9):
        with contextlib.suppress(BusUnavailable):
            await bus.init(topics.specs())
            return
    await bus.init(topics.specs())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.01)


def _has_read(standby: Standby, ends: Mapping[Partition, int]) -> bool:
    starts = standby._kept.starts()
    return bool(starts) and all(
        end == 0 or (starts[p].kind == From.offset(0).kind and starts[p].value >= end)
        for p, end in ends.items()
    )


async def measure(url: str, runs: int, checkpoints: int) -> list[TakeOver]:
    """Both, over the same records."""
    topics = Topics(f"bench-{uuid.uuid4().hex[:8]}")
    async with open_bus(url) as bus:
        await init(bus, topics)
        builders = await write(bus, topics, runs, checkpoints)
        committed = await ends_of(bus, [Partition(topics.telemetry, number) for number in ALL])
        found = []
        for standby in (False, True):
            # The state of the first one covers its NaN from then on.
            bad = interval(builders.pop(), checkpoints, loss=math.nan)
            await publish(bus, outgoing([_placed(record, topics, {}) for record in bad]))
            group = f"{topics.prefix}-{'with' if standby else 'without'}"
            consumer = await bus.consumer(group, [topics.telemetry], only=list(committed))
            await consumer.commit(committed)
            await consumer.close()
            found.append(await take_over(bus, topics, runs, standby=standby, group=group))
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="live runs")
    parser.add_argument("--checkpoints", type=int, default=5, help="states of each on the topic")
    parser.add_argument("--bus", help="kafka://HOST:PORT; default: an embedded bus")
    parser.add_argument("--brokers", type=int, default=0, help="start a Kafka of so many brokers")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tocsin-bench-")))
        url = stack.enter_context(bus_of(arguments.bus, arguments.brokers, folder))
        found = asyncio.run(measure(url, arguments.runs, arguments.checkpoints))
    if arguments.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        print(
            f"{'standing by' if one.standby else 'not standing by':16} {one.runs:,} runs, "
            f"{one.states_on_topic:,} states on the topic: {one.records_read:,} records read, "
            f"restored in {one.restore_s:.2f} s, first issue {one.first_issue_s:.2f} s "
            f"({one.first_issue_cpu_s:.2f} s of CPU time) after the assignment; reading ahead "
            f"took {one.standby_cpu_s:.1f} s of CPU time and keeps "
            f"{one.standby_bytes / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
