"""How many times faster than it happened a run is judged once more.

    python benchmarks/replay.py [--steps 1500] [--brokers 1 | --bus URL] [--json]

The demo's small GPT trains under `tocsin run` with the defaults, and gets a NaN near its end. Then
`tocsin replay` reads its telemetry from the embedded bus, from a dump of it, from its store, and
from a Kafka onto which the dump is loaded, with all rules at their defaults. The run's time is that
between its first and its last step; a replay's is the processor time of the whole command, its
imports included, and of the part that grows with the run: that of a run of a twentieth is taken
off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from take_over import bus_of

GPT = "tocsin.console.demo.trainings.gpt"
CONFIG = """\
version: 1
rules:
  - nonfinite: []
"""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay. `real_time` is the run's time over the processor time of the whole command,
    `alone` over that of the replay without the command's start."""

    source: str
    run_s: float
    cpu_s: float
    wall_s: float
    real_time: float
    alone: float


def tocsin(folder: Path, *words: str) -> tuple[str, float, float]:
    """What a command prints, its seconds of processor time, and of wall time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tocsin.console", *words],
        cwd=folder,
        env={**os.environ, "TOCSIN_STORE": "store"},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"tocsin {' '.join(words)}: {done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, cpu_s, wall_s


def train(folder: Path, run_id: str, steps: int) -> float:
    """Train it; the seconds from its start to its end."""
    command = [sys.executable, "-m", GPT, "--threads", "1", "--steps", str(steps)]
    command += ["--fault", "nan_loss", "--fault-at", str(steps - 5)]
    summary = folder / f"{run_id}.json"
    words = ["run", "--run-id", run_id, "--no-stop", "--summary", str(summary), "--", *command]
    tocsin(folder, *words)
    return float(json.loads(summary.read_text())["duration_s"])


def load(folder: Path, url: str) -> None:
    """Put both dumps on a bus."""
    tocsin(folder, "bus", "init", "--bus", url)
    for run_id in ("short", "long"):
        tocsin(folder, "bus", "load", f"{run_id}.gz", "--bus", url)


def replay(folder: Path, *words: str) -> tuple[float, float]:
    """Processor and wall time of a replay that has found the NaN."""
    output, cpu_s, wall_s = tocsin(folder, "replay", *words)
    if "nonfinite" not in output:
        raise SystemExit(f"the fault was not found: {output}")
    return cpu_s, wall_s


def main() -> None:
    """Train, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--bus", help="kafka://HOST:PORT")
    parser.add_argument("--brokers", type=int, default=0, help="start a Kafka of so many brokers")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tocsin-bench-")))
        (folder / "tocsin.yaml").write_text(CONFIG)
        short_s = train(folder, "short", arguments.steps // 20)
        run_s = train(folder, "long", arguments.steps)
        for run_id in ("short", "long"):
            tocsin(folder, "bus", "dump", f"{run_id}.gz", "--run", run_id)
        sources = {
            "the embedded bus": ("--run", "{}"),
            "a dump": ("--file", "{}.gz"),
            "the store": ("--archived", "--run", "{}"),
        }
        if arguments.bus or arguments.brokers:
            url = stack.enter_context(bus_of(arguments.bus, arguments.brokers, folder))
            load(folder, url)
            sources["Kafka"] = ("--bus", url, "--run", "{}")
        for source, words in sources.items():
            start_s, _ = replay(folder, *(word.format("short") for word in words))
            cpu_s, wall_s = replay(folder, *(word.format("long") for word in words))
            alone = (run_s - short_s) / max(cpu_s - start_s, 1e-3)
            found.append(Replayed(source, run_s, cpu_s, wall_s, run_s / cpu_s, alone))
    if arguments.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        print(
            f"{one.source:16}: a run of {one.run_s:.0f} s in {one.cpu_s:.2f} s of CPU time "
            f"({one.wall_s:.2f} s): {one.real_time:.0f} times as fast, "
            f"{one.alone:.0f} times without the command's start"
        )


if __name__ == "__main__":
    main()
