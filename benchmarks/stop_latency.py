"""From a NaN to the training loop left, and to its process gone: how long, over many real runs.

Each run is the demo's small GPT under `tocsin run`; at a fixed step one gradient gets a NaN. The
training prints when that happened and when its loop was left, by its own clock; the number of steps
between is reported too, since a stop lets the step in progress finish. That its process is gone is
what the launcher saw, by the append time of its record.

    python benchmarks/stop_latency.py --runs 200
    python benchmarks/stop_latency.py --runs 200 --bus kafka://127.0.0.1:9092
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from tocsin.bus.port import Partition
from tocsin.bus.urls import open_bus
from tocsin.console.views.bus_view import read_all
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.stops import StopExited
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, telemetry_partition

FAULT_AT = 30
_TIME = re.compile(r"^(fault|left).* step (\d+).*\[unix time ([0-9.]+) s\]", re.MULTILINE)

CONFIG = """\
version: 1
bus: {{url: "{url}", prefix: {prefix}}}
rules:
  - nonfinite: [stop]
"""


@dataclass(frozen=True)
class Stopped:
    """One run: milliseconds from the NaN, and the steps between it and the loop left."""

    left_ms: float
    gone_ms: float
    steps: int


def one_run(folder: Path, config: Path, url: str, topics: Topics) -> Stopped:
    """Train until the run is stopped."""
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    done = subprocess.run(
        [
            sys.executable, "-m", "tocsin.console", "run", "--config", str(config), "--quiet",
            "--run-id", run_id, "--",
            sys.executable, "-m", "tocsin.console.demo.trainings.gpt", "--threads", "1", "--times",
            "--steps", "2000", "--fault", "nan_gradient", "--fault-at", str(FAULT_AT),
        ],
        cwd=folder,
        env={**os.environ, "XDG_CONFIG_HOME": str(folder / "config")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    found = {kind: (int(step), float(at)) for kind, step, at in _TIME.findall(done.stdout)}
    if done.returncode != 79 or set(found) != {"fault", "left"}:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    fault_step, fault_s = found["fault"]
    left_step, left_s = found["left"]
    gone_ms = asyncio.run(exited_ms(url, topics, run_id))
    return Stopped((left_s - fault_s) * 1e3, gone_ms - fault_s * 1e3, left_step - fault_step)


async def exited_ms(url: str, topics: Topics, run_id: str) -> int:
    """When the launcher's record came onto the bus that says the job is gone (Unix, ms)."""
    partition = Partition(topics.telemetry, telemetry_partition(run_id))
    async with open_bus(url) as bus:
        async for record in read_all(bus, [partition]):
            if record.value is None or record.key != run_id.encode():
                continue
            meta = read_meta(record.headers)
            value = decode(meta, record.value) if meta.type == StopExited.event_type else None
            if isinstance(value, Event) and isinstance(value.data, StopExited):
                return record.append_ms
    raise SystemExit(f"{run_id}: no record says that the job is gone")


def percentile(values: list[float], share: float) -> float:
    """Of at least one value; the nearest that was measured."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Print one line, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--bus", help="kafka://HOST:PORT; default: an embedded bus")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as name:
        folder = Path(name)
        config = folder / "tocsin.yaml"
        prefix = f"bench-{uuid.uuid4().hex[:8]}" if arguments.bus else "tocsin"
        url = arguments.bus or f"embedded:{folder}/bus.db"
        config.write_text(CONFIG.format(url=url, prefix=prefix))
        tocsin = [sys.executable, "-m", "tocsin.console"]
        workers: list[subprocess.Popen[bytes]] = []
        try:
            if arguments.bus:
                environ = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
                subprocess.run(
                    [*tocsin, "bus", "init", "--config", str(config)],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                for service in ("rules", "actions"):
                    command = [*tocsin, service, "--config", str(config)]
                    workers.append(subprocess.Popen(command, cwd=folder, env=environ))
            results = []
            for run in range(arguments.runs):
                stopped = one_run(folder, config, url, Topics(prefix))
                results.append(stopped)
                print(
                    f"run {run + 1}/{arguments.runs}: left after {stopped.left_ms:.0f} ms and "
                    f"{stopped.steps} steps, gone after {stopped.gone_ms:.0f} ms",
                    file=sys.stderr,
                )
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait(15)
    left, gone = [each.left_ms for each in results], [each.gone_ms for each in results]
    facts = {
        "bus": "kafka" if arguments.bus else "embedded",
        "runs": len(results),
        "p50_ms": statistics.median(left),
        "p99_ms": percentile(left, 0.99),
        "gone_p50_ms": statistics.median(gone),
        "gone_p99_ms": percentile(gone, 0.99),
        "steps_p50": statistics.median(each.steps for each in results),
    }
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(
            f"{facts['bus']}, {facts['runs']} runs: NaN -> loop left p50 {facts['p50_ms']:.0f} ms, "
            f"p99 {facts['p99_ms']:.0f} ms, {facts['steps_p50']:.0f} steps between (median); "
            f"NaN -> process gone p50 {facts['gone_p50_ms']:.0f} ms, "
            f"p99 {facts['gone_p99_ms']:.0f} ms"
        )


if __name__ == "__main__":
    main()
