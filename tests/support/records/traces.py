"""Traces of a node: its samples as they were read, one line of JSON each, and their replay.

python -m support.records.traces FILE --seconds 60 [--pid PID]    # from the folder tests

records this machine with the project's own sampler; where there is an NVIDIA GPU, with that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tocsin.emitter.node.gpus import Gpus
from tocsin.emitter.node.sampler import INTERVAL_S, Node, Sample
from tocsin.stream_rules.testing import RunBuilder

Line = tuple[float, Sample]
"""Seconds since the first sample, and the columns."""


def recorded(node: Node, *, seconds: float, every_s: float = INTERVAL_S) -> Iterator[Line]:
    """Sample a node, now; blocks between two samples."""
    began = time.monotonic()
    due = began
    while due - began <= seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        yield now - began, node.sample(now)
        due = max(due + every_s, time.monotonic())


def write(path: Path, lines: Iterable[Line]) -> None:
    """One line each, as it comes."""
    with path.open("w") as file:
        for at_s, sample in lines:
            file.write(json.dumps({"at_s": round(at_s, 3), "columns": sample}) + "\n")
            file.flush()


def read(path: Path) -> list[Line]:
    """What `write` has written."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [(row["at_s"], row["columns"]) for row in rows]


def add_trace(run: RunBuilder, lines: Iterable[Line], *, node: str = "node") -> None:
    """Append a trace to a made run, in frames of up to ten samples with equal columns."""
    began_ms, frame = run.now_ms, list[Line]()

    def flush() -> None:
        if not frame:
            return
        table = {name: [sample[name] for _, sample in frame] for name in frame[0][1]}
        steps = np.diff([at_s for at_s, _ in frame]) if len(frame) > 1 else [INTERVAL_S]
        run.now_ms = began_ms + round(1000 * frame[0][0])
        if table:
            run.system(table, node=node, every_s=float(np.mean(steps)))
        frame.clear()

    for at_s, sample in lines:
        if frame and (len(frame) >= 10 or sample.keys() != frame[0][1].keys()):
            flush()
        frame.append((at_s, sample))
    flush()


def main() -> None:
    """Record this machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pid", type=int, help="of the job, for the columns of its processes")
    arguments = parser.parse_args()
    node = Node(root_pid=arguments.pid, folder=Path.cwd(), gpus=Gpus())
    write(arguments.file, recorded(node, seconds=arguments.seconds))
    node.close()
    node.machine.close()


if __name__ == "__main__":
    main()
