"""Step time with and without tocsin, all cores busy with training, every process of ours counted.

Two copies of the same training are loaded, one plain, one under `tocsin run` on an embedded bus.
They take turns block by block (A B, B A, …): while one trains on all cores, the other waits, and
tocsin's processes are suspended during the plain block, so each pair compares the same machine at
nearly the same time.
The ratio is taken pair by pair; the median and the middle half of the ratios are reported.

    python benchmarks/step_time.py --pairs 30
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

WORKER = str(Path(__file__).with_name("step_worker.py"))


@dataclass(frozen=True)
class Row:
    """The result for one model. Times in milliseconds a step, costs in percent."""

    model: str
    pairs: int
    plain_ms: float
    watched_ms: float
    cost_percent: float
    cost_low_percent: float
    cost_high_percent: float
    ours_cpu_percent: float
    idle_cpu_percent: float


class Training:
    """A worker process and, if it is watched, tocsin's processes around it."""

    def __init__(self, model: str, threads: int, folder: Path, *, watched: bool) -> None:
        command = [sys.executable, WORKER, model, "--threads", str(threads)]
        if watched:
            command = [sys.executable, "-m", "tocsin.console", "run", "--quiet", "--", *command]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "XDG_CONFIG_HOME": str(folder / "config")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()
        self.ours: list[psutil.Process] = []
        if watched:
            family = [psutil.Process(self._process.pid)]
            family += family[0].children(recursive=True)
            self.ours = [p for p in family if WORKER not in p.cmdline()[:3]]

    def block(self, steps: int) -> float:
        """Train; wall seconds a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._line().split()[0]) / steps

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the training ended early")
        return line


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    """Let these processes take no CPU."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU that these processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(model: str, pairs: int, steps: int) -> Row:
    """Run the pairs for one model."""
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="tocsin-bench-") as name:
        folder = Path(name)
        plain = Training(model, threads, folder, watched=False)
        watched = Training(model, threads, folder, watched=True)
        ours = watched.ours
        with suspended(ours):
            plain.block(steps)
        watched.block(steps)
        before, begun = cpu_seconds(ours), time.perf_counter()
        time.sleep(10)
        idle = (cpu_seconds(ours) - before) / (time.perf_counter() - begun)
        plains, watcheds, busy = [], [], 0.0
        for pair in range(pairs):
            for first in (True, False):
                if first == (pair % 2 == 0):
                    with suspended(ours):
                        plains.append(plain.block(steps))
                else:
                    cpu = cpu_seconds(ours)
                    watcheds.append(watched.block(steps))
                    busy += cpu_seconds(ours) - cpu
            print(
                f"{model} pair {pair + 1}/{pairs}: {plains[-1] * 1e3:.1f} ms plain, "
                f"{watcheds[-1] * 1e3:.1f} ms watched",
                file=sys.stderr,
            )
        plain.close()
        watched.close()
    ratios = sorted(100 * (b / a - 1) for a, b in zip(plains, watcheds, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return Row(
        model,
        pairs,
        plain_ms=statistics.median(plains) * 1e3,
        watched_ms=statistics.median(watcheds) * 1e3,
        cost_percent=statistics.median(ratios),
        cost_low_percent=low,
        cost_high_percent=high,
        ours_cpu_percent=100 * busy / (sum(watcheds) * steps),
        idle_cpu_percent=100 * idle,
    )


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(model, arguments.pairs, arguments.steps) for model in arguments.models]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{os.cpu_count()} cores, {arguments.pairs} pairs of {arguments.steps} steps")
    print(
        "model    plain ms  watched ms  cost, median (middle half)   launcher+helper CPU   idle CPU"
    )
    for row in rows:
        print(
            f"{row.model:<8} {row.plain_ms:8.1f}  {row.watched_ms:10.1f}  "
            f"{row.cost_percent:+.2f} % "
            f"({row.cost_low_percent:+.2f} … {row.cost_high_percent:+.2f} %)"
            f"{'':6}{row.ours_cpu_percent:.2f} % of a core   {row.idle_cpu_percent:.2f} % of a core"
        )


if __name__ == "__main__":
    main()
