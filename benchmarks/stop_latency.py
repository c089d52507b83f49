"""From a NaN to the training loop left, and to its process gone: how long, over many real stops.

The demo's small GPT under `tocsin run`; at a fixed step one gradient gets a NaN. One launch trains
many times, each in a process of its own (`stop_latency_job.py`), so that start-up is paid once; on
Kafka the workers live as long as the benchmark. The first stop of each launch, and of the workers,
is reported apart: it meets cold caches, and consumer groups that are still forming.

Two steps are the training's own and are reported apart: the one that shows the NaN (it comes with
a gradient, the next loss is the first number that has it, and a step is reported when it is over),
and the one in progress when the rank has the command. The way between them is shown hop by hop, by
the time at which each record came onto the bus (append time, in milliseconds). A run of users is
stopped once, so on an embedded bus its stop is a first one: `--per-launch 0` measures only those.

    python benchmarks/stop_latency.py --stops 200                       # embedded
    python benchmarks/stop_latency.py --stops 200 --brokers 3           # a Kafka of its own
    python benchmarks/stop_latency.py --stops 200 --bus kafka://127.0.0.1:9092
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tocsin.bus.port import Partition, Record
from tocsin.bus.urls import open_bus
from tocsin.console.views.bus_view import read_all
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopRequested
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

HERE: Final = Path(__file__).parent
TARGETS_MS: Final = {"embedded": 100, "kafka": 300}

SILENT_S: Final = 180.0
"""A job that prints no line for so long hangs, seconds."""

CONFIG: Final = """\
version: 1
bus: {{url: "{url}", prefix: {prefix}}}
rules:
  - nonfinite: [{{stop: {{grace: 10m}}}}]   # the next training may be slow to begin
  - restart_loop: off
"""

HOPS: Final = (
    ("shown", "NaN -> the step that shows it is over"),
    ("evidence", "-> its numbers are on the bus"),
    ("issue", "-> the rule's issue is on the bus"),
    ("ledger", "-> the stop is in the ledger"),
    ("command", "-> the signed command is on the bus"),
    ("heard", "-> the rank has it"),
    ("left", "-> the loop is left (the step in progress)"),
)


@dataclass
class Stop:
    """One stop, milliseconds from the NaN; `at` has the hops that were found on the bus."""

    left_ms: float
    gone_ms: float
    steps: int
    fault_s: float
    first: bool
    at: dict[str, float] = field(default_factory=dict)


def launch(
    folder: Path, config: Path, url: str, topics: Topics, stops: int, environ: Mapping[str, str]
) -> list[Stop]:
    """Train and be stopped so many times under one launcher."""
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    errors = folder / "job.err"
    with errors.open("w") as err:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tocsin.console", "run", "--config", str(config)),
                *("--quiet", "--run-id", run_id, "--"),
                *(sys.executable, str(HERE / "stop_latency_job.py"), str(stops)),
            ],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    assert process.stdout is not None
    lines = []
    # A launcher passes SIGTERM on to its job; one that is killed leaves it behind.
    watchdog = threading.Timer(SILENT_S, process.terminate)
    watchdog.start()
    for text in process.stdout:
        watchdog.cancel()
        if text.startswith("{"):
            lines.append(json.loads(text))
        watchdog = threading.Timer(SILENT_S, process.terminate)
        watchdog.start()
    watchdog.cancel()
    if process.wait() != 79 or len(lines) != stops:
        raise SystemExit(f"exit code {process.returncode}\n{lines}\n{errors.read_text()}")
    found: dict[str, Stop] = {}
    for number, line in enumerate(lines):
        fault_s = line["fault_s"]
        left_ms, gone_ms = ((line[key] - fault_s) * 1e3 for key in ("left_s", "gone_s"))
        found[line["incarnation"]] = Stop(
            left_ms, gone_ms, line["steps"], fault_s, first=number == 0
        )
    asyncio.run(find_hops(url, topics, run_id, found))
    return list(found.values())


async def find_hops(url: str, topics: Topics, run_id: str, stops: dict[str, Stop]) -> None:
    """When the records of each stop came onto the bus."""
    telemetry = Partition(topics.telemetry, telemetry_partition(run_id))
    others = [
        Partition(topic, issue_partition(run_id))
        for topic in (topics.issues, topics.actions, topics.control)
    ]
    async with open_bus(url) as bus:
        async for record in read_all(bus, [telemetry, *others]):
            # Keys of the ledger are those of issues.
            ours = (
                record.key.startswith(run_id.encode()) or record.partition.topic == topics.actions
            )
            if record.value is not None and ours:
                note(record, stops)
    for stop in stops.values():
        stop.at["left"] = stop.left_ms


def note(record: Record, stops: dict[str, Stop]) -> None:
    """Note a record's time if it is the first of its hop."""
    assert record.value is not None
    meta = read_meta(record.headers)
    value = decode(meta, record.value)
    at_ms: float = record.append_ms
    if isinstance(value, StepFrame):
        bad = value.column("gradient_nonfinite")
        if bad is None or not (bad > 0).any():
            return
        hop, incarnation = "evidence", value.origin.incarnation
        over_us = value.at_us[int((bad > 0).argmax())]
        if (stop := stops.get(incarnation)) is not None:
            stop.at.setdefault("shown", over_us / 1e3 - stop.fault_s * 1e3)
    elif not isinstance(value, Event):
        return
    elif isinstance(value.data, IssueFiring) and value.data.rule == "nonfinite":
        hop, incarnation = "issue", value.data.incarnation
    elif isinstance(value.data, Delivery) and value.data.kind == "stop":
        if value.data.state != "pending":
            return  # the first state was compacted away
        hop, incarnation = "ledger", value.data.incarnation
    elif isinstance(value.data, StopRequested):
        hop, incarnation = "command", value.data.incarnation
    elif isinstance(value.data, StopAcknowledged) and value.data.role == "trainer":
        hop, incarnation, at_ms = "heard", value.data.incarnation, float(value.time_ms)
    else:
        return
    stop = stops.get(incarnation)
    if stop is not None and hop not in stop.at:
        stop.at[hop] = at_ms - stop.fault_s * 1e3


def percentile(values: list[float], share: float) -> float:
    """Of at least one value; the nearest that was measured."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def spread(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest."""
    if not values:
        return {}
    return {
        "p50": round(percentile(values, 0.5), 1),
        "p99": round(percentile(values, 0.99), 1),
        "max": round(max(values), 1),
    }


def facts_of(bus: str, stops: list[Stop]) -> dict[str, Any]:
    """What is reported, of all but the first stops of each launch."""
    only_first = all(stop.first for stop in stops)
    warm = [stop for stop in stops if only_first or not stop.first]
    seen = [stop.at for stop in warm if {"shown", "heard"} <= stop.at.keys()]
    hops: dict[str, dict[str, float]] = {}
    for (earlier, _), (name, _) in zip((("", ""), *HOPS), HOPS, strict=False):
        both = [stop.at for stop in warm if name in stop.at and (not earlier or earlier in stop.at)]
        hops[name] = spread([at[name] - at.get(earlier, 0.0) for at in both])
    return {
        "bus": bus,
        "stops": len(warm),
        "target_p99_ms": TARGETS_MS[bus],
        "left_ms": spread([stop.left_ms for stop in warm]),
        "left_without_step_in_progress_ms": spread([at["heard"] for at in seen]),
        "left_without_both_steps_ms": spread([at["heard"] - at["shown"] for at in seen]),
        "gone_ms": spread([stop.gone_ms for stop in warm]),
        "steps": spread([float(stop.steps) for stop in warm]),
        "hops_ms": hops,
        "first_of_a_launch_ms": spread([stop.left_ms for stop in stops if stop.first]),
        "load": os.getloadavg()[0],
    }


def show(facts: dict[str, Any]) -> None:
    """Print the facts as a table."""
    print(f"{facts['bus']}, {facts['stops']} stops, load {facts['load']:.1f}")
    rows = [
        ("NaN -> loop left", facts["left_ms"]),
        ("  without the step in progress", facts["left_without_step_in_progress_ms"]),
        ("  nor the one that shows the NaN", facts["left_without_both_steps_ms"]),
        ("NaN -> process gone", facts["gone_ms"]),
        ("steps between", facts["steps"]),
        *((f"  {what}", facts["hops_ms"][name]) for name, what in HOPS),
        ("first stop of a launch", facts["first_of_a_launch_ms"]),
    ]
    print(f"{'ms':<52}{'p50':>9}{'p99':>9}{'max':>9}")
    for name, found in rows:
        numbers = "".join(f"{value:9.1f}" for value in found.values())
        print(f"{name:<52}{numbers}")


@contextlib.contextmanager
def bus_of(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The URL of the bus, which is there inside of the block."""
    if arguments.brokers:
        sys.path.insert(0, str(HERE.parent / "tests"))
        from support.servers.kafka_broker import running_cluster

        with running_cluster(folder, arguments.brokers) as brokers:
            yield "kafka://" + ",".join(broker.server for broker in brokers)
    else:
        yield arguments.bus or f"embedded:{folder}/bus.db"


@contextlib.contextmanager
def workers_of(folder: Path, config: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Rules and actions on Kafka, inside of the block."""
    tocsin = [sys.executable, "-m", "tocsin.console"]
    subprocess.run(
        [*tocsin, "bus", "init", "--config", str(config)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environ,
    )
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for service in ("rules", "actions"):
            with (folder / f"{service}.log").open("wb") as log:
                command = [*tocsin, service, "--config", str(config)]
                workers.append(
                    subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
                )
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(15)


def main() -> None:
    """Print a table, or JSON; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--per-launch", type=int, default=25)
    parser.add_argument("--bus", help="kafka://HOST:PORT; default: an embedded bus")
    parser.add_argument("--brokers", type=int, default=0, help="start a Kafka of so many brokers")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    stops: list[Stop] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tocsin-bench-")))
        environ = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
        url = stack.enter_context(bus_of(arguments, folder))
        kafka = url.startswith("kafka:")
        prefix = f"bench-{uuid.uuid4().hex[:8]}" if kafka else "tocsin"
        config = folder / "tocsin.yaml"
        config.write_text(CONFIG.format(url=url, prefix=prefix))
        if kafka:
            stack.enter_context(workers_of(folder, config, environ))
        began = time.monotonic()
        done = 0
        while done < arguments.stops:
            count = min(arguments.per_launch, arguments.stops - done)
            stops += launch(folder, config, url, Topics(prefix), 1 + count, environ)
            done, now_s = done + max(1, count), time.monotonic() - began
            newest = spread([stop.left_ms for stop in stops[-max(1, count) :]])
            print(f"{done}/{arguments.stops} stops, {now_s:.0f} s: {newest}", file=sys.stderr)
    facts = facts_of("kafka" if kafka else "embedded", stops)
    if arguments.json:
        print(json.dumps(facts))
    else:
        show(facts)


if __name__ == "__main__":
    main()
