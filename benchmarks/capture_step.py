"""What capture costs the training thread, for the GPT and the ResNet: our part alone.

python benchmarks/capture_step.py [--steps 60] [--threads 2] [--every 1]

Trains each model (size `bench`) with capture on and the embedded bus in a temporary folder, in a
process of its own with the hook, and reads what the wall has measured: the time spent in our hooks
against the time of the steps. Sending happens on other threads; with `--threads 1` torch has none,
and the CPU time of ours is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HOOK = Path(__file__).parent.parent / "emitter/tocsin/emitter/hook"

CHILD = """
import importlib, json, sys, time
name, steps, threads = sys.argv[1], sys.argv[2], sys.argv[3]
module = importlib.import_module(f"tocsin.console.trainings.{name}")
import torch
marks = []
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: marks.append(
    (time.perf_counter(), time.process_time() - time.thread_time())
))
module.main(["--steps", steps, "--size", "bench", "--threads", threads, "--print-every", "1000"])
from tocsin.emitter.torch_hooks import hooks
times = sorted(b[0] - a[0] for a, b in zip(marks, marks[1:]))
training = hooks.capture.training
print(json.dumps({
    "step_ms": 1e3 * times[len(times) // 2],
    "hooks_percent": training.figures().overhead_percent,
    "threads_s": marks[-1][1] - marks[1][1], "loop_s": marks[-1][0] - marks[1][0],
    "records": training.figures().records,
}))
"""


def measure(name: str, steps: int, threads: int, every: int) -> dict[str, float]:
    """Train once with capture; the figures of the child."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **os.environ,
            "PYTHONPATH": str(HOOK),
            "TOCSIN_RUN_ID": f"bench-{name}",
            "TOCSIN_JOB_ID": "bench",
            "TOCSIN_BUS": f"embedded:{folder}/bus.db",
            "TOCSIN_CAPTURE": json.dumps(
                {"collections": {c: {"every": every} for c in ("gradients", "weights")}}
            ),
        }
        done = subprocess.run(
            [sys.executable, "-c", CHILD, name, str(steps), str(threads)],
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", type=int, default=10, help="steps between full rows")
    arguments = parser.parse_args()
    print(f"{arguments.threads} threads, full rows every {arguments.every} steps")
    for name in ("gpt", "resnet"):
        found = measure(name, arguments.steps, arguments.threads, arguments.every)
        thread = 100 * found["threads_s"] / found["loop_s"]
        print(
            f"{name:7} step {found['step_ms']:6.1f} ms, in hooks {found['hooks_percent']:5.2f} %, "
            + (f"our threads {thread:5.2f} % of a core, " if arguments.threads == 1 else "")
            + f"{found['records']} records"
        )


if __name__ == "__main__":
    main()
