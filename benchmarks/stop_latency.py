"""From a NaN to the training loop left: how long, over many real runs.

Each run is the demo's small GPT under `tocsin run`; at a fixed step one gradient gets a NaN. The
training prints when that happened and when its loop was left, by its own clock; the number of steps
between is reported too, since a stop lets the step in progress finish.

    python benchmarks/stop_latency.py --runs 30
    python benchmarks/stop_latency.py --runs 30 --bus kafka://127.0.0.1:9092
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

FAULT_AT = 30
_TIME = re.compile(r"^(fault|left).* step (\d+).*\[unix time ([0-9.]+) s\]", re.MULTILINE)

CONFIG = """\
version: 1
bus: {{url: "{url}", prefix: {prefix}}}
rules:
  - nonfinite: [stop]
"""


def one_run(folder: Path, config: Path) -> tuple[float, int]:
    """Milliseconds from the NaN to the loop left, and the steps between."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tocsin.console", "run", "--config", str(config), "--quiet", "--",
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
    return (found["left"][1] - found["fault"][1]) * 1e3, found["left"][0] - found["fault"][0]


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
                results.append(one_run(folder, config))
                print(
                    f"run {run + 1}/{arguments.runs}: {results[-1][0]:.0f} ms, "
                    f"{results[-1][1]} steps",
                    file=sys.stderr,
                )
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait(15)
    times = sorted(ms for ms, _ in results)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    facts = {
        "bus": "kafka" if arguments.bus else "embedded",
        "runs": len(times),
        "p50_ms": statistics.median(times),
        "p99_ms": p99,
        "steps_p50": statistics.median(steps for _, steps in results),
    }
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(
            f"{facts['bus']}: NaN -> loop left p50 {facts['p50_ms']:.0f} ms, p99 {p99:.0f} ms over "
            f"{len(times)} runs; {facts['steps_p50']:.0f} steps between (median)"
        )


if __name__ == "__main__":
    main()
