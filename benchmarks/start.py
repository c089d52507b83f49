"""What `tocsin run` costs before the first step: CPU time of each process, beside plain python.

python benchmarks/start.py                     # about two minutes
python benchmarks/start.py --rounds 20

A training of two layers runs by turns as it is and under `tocsin run`, in another order each round.
When its second step is done it reads the CPU time, user and system, of itself, of the launcher and
of the launcher's other children; these have a second more, so that all of their start counts. All
modules are compiled before. No wall time is measured: the processes start beside one another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = """
import json, os, sys, time
import torch

model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(16, 20)), torch.zeros(16).long()).backward()
    optimizer.step()
found = {"training": time.process_time()}
if "TOCSIN_RUN_ID" in os.environ:
    time.sleep(1)
    launcher = os.getppid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            continue  # another process, which has just ended
        fields = rest.split()
        spent_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if int(name) == launcher:
            found["launcher"] = spent_s
        elif int(fields[1]) == launcher and int(name) != os.getpid():
            found["reader" if head.endswith("tocsin-reader") else "helper"] = spent_s
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


def main() -> None:
    """Print one line per process: the median, and the middle half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, arguments.rounds):
            ways = [False, True] if number % 2 else [True, False]
            taken = {way: measure(Path(folder), tocsin=way) for way in ways}
            if number < 0:
                continue  # it has compiled the modules
            plain, watched = taken[False]["training"], taken[True]
            ours = sum(watched.values()) - plain
            rows = {
                "plain python": plain,
                "training": watched["training"],
                "hook (difference)": watched["training"] - plain,
                "launcher": watched["launcher"],
                "helper": watched["helper"],
                "reader of the bus": watched["reader"],
                "all of tocsin": ours,
                "all of tocsin, of plain": ours / plain,
            }
            for name, value in rows.items():
                found.setdefault(name, []).append(value)
    for name, values in found.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name:<24} {median:6.2f} s CPU  ({low:.2f} … {high:.2f})")


def measure(folder: Path, *, tocsin: bool) -> dict[str, float]:
    """CPU seconds by process, of one training."""
    out = folder / "found.json"
    command = [sys.executable, "-c", TRAINING, str(out)]
    if tocsin:
        command = [sys.executable, "-m", "tocsin.console", "run", "--quiet", "--", *command]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(command, cwd=place, env=environ, check=True, stderr=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    main()
