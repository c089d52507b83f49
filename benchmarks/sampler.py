"""What the sampler of a node costs: CPU time of its process, as a share of one core.

python benchmarks/sampler.py                   # about six minutes
python benchmarks/sampler.py --seconds 20      # coarser

Each row is a process of its own that samples this machine as the helper does: the job is a python
with 8 worker processes, frames are packed and encoded, nothing else runs in it. For rows with more
cores than this machine has, /proc/stat is a made one of that many cores and all else is real: what
that leaves out is the time in which a kernel of such a machine writes the file. No GPU is asked.
The goal is 0.3 % at 500 ms. On 2 cores of an AMD EPYC, both busy with other things:

      interval  cores  columns  ms/sample  % of a core
        100 ms      2       41       0.39        0.389
        500 ms      2       41       0.80        0.160
        500 ms     64      103       0.80        0.160
        500 ms    256       39       0.88        0.176
       2000 ms      2       41       1.31        0.065
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tocsin.emitter.node.gpus import Gpus
from tocsin.emitter.node.proc_files import ROOT
from tocsin.emitter.node.sampler import Node, Packer, Sampler
from tocsin.schemas.records.frames import RecordOrigin, SystemFrame

WORKERS = 8
WARM_S = 6.0
ROWS = ((0.1, 0), (0.5, 0), (0.5, 64), (0.5, 256), (2.0, 0))
"""Seconds between samples, and cores (0: those of this machine)."""

JOB = f"""
import subprocess, sys, time
code = "import time; time.sleep(3600)"
children = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range({WORKERS})]
print("ready", flush=True)
try:
    sys.stdin.read()
finally:
    for child in children:
        child.kill()
"""


def main() -> None:
    """Print one row per rhythm and number of cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        interval_s, cores, pid = json.loads(arguments.row)
        print(json.dumps(asyncio.run(measure(interval_s, cores, pid, arguments.seconds))))
        return
    print(f"{'interval':>10} {'cores':>6} {'columns':>8} {'ms/sample':>10} {'% of a core':>12}")
    with job() as pid:
        for interval_s, cores in ROWS:
            row = json.dumps([interval_s, cores, pid])
            command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--row", row]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            print(
                f"{interval_s * 1000:>7.0f} ms {cores or os.cpu_count():>6} "
                f"{found['columns']:>8} {found['ms']:>10.2f} {found['percent']:>12.3f}",
                flush=True,
            )


async def measure(interval_s: float, cores: int, job_pid: int, seconds: float) -> dict[str, float]:
    """CPU time of this process while it samples: milliseconds per sample, percent of a core."""
    with tempfile.TemporaryDirectory() as folder:
        root = pretend(Path(folder), cores) if cores else ROOT
        node = Node(root_pid=job_pid, folder=Path.cwd(), gpus=Gpus(), root=root)
        frames: list[SystemFrame] = []

        def send(frame: SystemFrame) -> None:
            frame.encode()
            frames.append(frame)

        packer = Packer(RecordOrigin(run_id="r", incarnation="i"), "n", interval_s=interval_s)
        task = asyncio.create_task(Sampler.for_job(node, packer, send, interval_s=interval_s).run())
        await asyncio.sleep(WARM_S)
        before_s, at_s = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        spent_s, passed_s = time.process_time() - before_s, time.monotonic() - at_s
        task.cancel()
        await asyncio.wait({task})
        return {
            "columns": len(frames[-1].columns),
            "ms": 1000 * spent_s * interval_s / passed_s,
            "percent": 100 * spent_s / passed_s,
        }


def pretend(root: Path, cores: int) -> Path:
    """A root like the real one, but for a made /proc/stat of so many cores."""
    (root / "proc").mkdir()
    for entry in Path("/proc").iterdir():
        if entry.name != "stat":
            (root / "proc" / entry.name).symlink_to(entry)
    (root / "sys").symlink_to("/sys")
    (root / "dev").symlink_to("/dev")
    names = ["cpu ", *(f"cpu{n}" for n in range(cores))]
    line = "{} 4705 150 1120 16250856 53120 0 1510 80 0 0\n"
    (root / "proc/stat").write_text("".join(map(line.format, names)) + "intr 1\n")
    return root


@contextmanager
def job() -> Iterator[int]:
    """A python with workers, by its process number."""
    command = [sys.executable, "-c", JOB]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


if __name__ == "__main__":
    main()
