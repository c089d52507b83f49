"""Run all benchmarks of docs/explanation/performance.md in turn, on an otherwise idle machine.

python benchmarks/all.py [--kafka URL | --without-kafka]

It takes about an hour. Those on Kafka come last, on a broker that is started for them with Java and
Maven. Not among them: what needs a GPU (`--device cuda` of some), and what thresholds of rules are
chosen by (`thresholds.py`, `loss_series.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent

LOCAL = (
    ["codec.py"],
    ["summaries.py"],
    ["rules.py"],
    ["fleet.py"],
    ["capture.py", "--columns", "nothing", "tocsin", "full", "activations", "naive"],
    ["short_steps.py"],
    ["start.py"],
    ["sampler.py"],
    ["agreement.py"],
    ["stop_latency.py", "--stops", "60"],
    ["delivery.py"],
    ["page.py"],
    ["store.py"],
)
ON_KAFKA = (
    ["bus.py", "--kafka"],
    ["stop_latency.py", "--stops", "60", "--bus"],
    ["take_over.py", "--runs", "250", "--bus"],
    ["streaming.py", "--bus"],
    ["paced.py", "--bus"],
    ["replay.py", "--bus"],
)
"""The URL of the bus is the last argument."""


def main() -> int:
    """Run them; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--kafka", metavar="URL", help="measure on this Kafka")
    where.add_argument("--without-kafka", action="store_true", help="leave those on Kafka out")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    failed = sum(run(command) for command in LOCAL)
    if arguments.without_kafka:
        return failed + run(["bus.py"]) + run(["replay.py"])
    with kafka(arguments.kafka) as url:
        return failed + sum(run([*command, url]) for command in ON_KAFKA)


def run(command: list[str]) -> bool:
    """Run a benchmark; whether it failed."""
    print(f"\n== {' '.join(command)}", flush=True)
    name, *options = command
    return subprocess.run([sys.executable, str(HERE / name), *options]).returncode != 0


@contextlib.contextmanager
def kafka(url: str | None) -> Iterator[str]:
    """The URL of a Kafka; without one, that of a broker that is there inside of the block."""
    if url is not None:
        yield url
        return
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.servers.kafka_broker import running_cluster

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tocsin-bench-"))
        (broker,) = stack.enter_context(running_cluster(Path(folder), 1))
        yield broker.url


if __name__ == "__main__":
    raise SystemExit(main())
