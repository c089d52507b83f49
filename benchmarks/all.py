"""Run all benchmarks of docs/explanation/performance.md in turn, on an otherwise idle machine.

python benchmarks/all.py                        # about half an hour
python benchmarks/all.py --kafka kafka://127.0.0.1:9092
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Run them; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kafka", metavar="URL", help="also measure on this Kafka")
    arguments = parser.parse_args()
    kafka = arguments.kafka
    commands = [
        ["codec.py"],
        ["bus.py", *(["--kafka", kafka] if kafka else [])],
        ["rules.py"],
        ["fleet.py"],
        ["replay.py"],
        ["capture.py", "--columns", "nothing", "tocsin", "full", "activations", "naive"],
        ["short_steps.py"],
        ["start.py"],
        ["sampler.py"],
        ["agreement.py"],
        ["stop_latency.py", "--stops", "60"],
        ["delivery.py"],
        ["page.py"],
        ["store.py"],
        *([["stop_latency.py", "--stops", "60", "--bus", kafka]] if kafka else []),
        *([["take_over.py", "--runs", "250", "--bus", kafka]] if kafka else []),
        *([["streaming.py", "--bus", kafka]] if kafka else []),
    ]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    failed = 0
    for name, *options in commands:
        print(f"\n== {name} {' '.join(options)}", flush=True)
        failed += subprocess.run([sys.executable, str(HERE / name), *options]).returncode != 0
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
