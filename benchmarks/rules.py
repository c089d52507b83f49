"""How many tensor rows and records a second the rules take in, on one core.

    python benchmarks/rules.py [--rows 2000] [--seconds 3] [--json]

The engine gets whole records as the bus would give them: headers, decoding, identity, all rules at
their defaults, timers. Also each rule alone, beside the engine with no rule at all, and what a
snapshot of all rules costs. Times are CPU times of this process: what else runs matters little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tocsin.bus.port import Record
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.stream_rules.engine.configured_rules import RuleSpec, rule_specs
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.testing import Numbers, RunBuilder

FRAMES = 200
RANKS = 64


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured line. `rows` are tensor rows, or step rows where there are no tensors."""

    what: str
    records_per_s: float
    rows_per_s: float
    us_per_record: float


def tensor_records(rows: int) -> list[Record]:
    """Summaries of FRAMES steps as a large model sends them, each with the step's scalars before.

    In turn: gradients in backward order; weights and their updates in forward order; activations.
    """
    run = RunBuilder("bench")
    run.started()
    chance = np.random.default_rng(0)
    names = [f"model.layers.{i // 8}.attention.projection_{i % 8}.weight" for i in range(rows)]
    size = np.exp(0.1 * chance.standard_normal(rows))

    def statistics(scale: float) -> dict[str, Numbers]:
        noise = scale * size * (1 + 0.1 * chance.standard_normal(rows))
        columns = {"min": -3, "max": 3, "absmax": 3, "mean": 0.01, "std": 1, "l1": 80, "l2": 10}
        return {name: factor * noise for name, factor in columns.items()}

    for step in range(FRAMES):
        run.steps(
            [step], loss=2.0 - step / 1000, gradient_norm=1.0, gradient_nonfinite=0,
            columns={"lr.0": 0.1},
        )  # fmt: skip
        kind = ("gradients", "weights", "updates", "activations")[step % 4]
        if kind == "gradients":
            run.tensors(step, kind, names[::-1], columns=statistics(1e-3))
        elif kind == "updates":
            change = 1e-3 * size * (1 + 0.1 * chance.standard_normal(rows))
            run.tensors(step, kind, names, columns={**statistics(1.0), "update_l2": change})
        elif kind == "activations":
            dead = 0.1 * chance.random(rows)
            run.tensors(step, kind, names, columns={**statistics(1.0), "dead": dead})
        else:
            run.tensors(step, kind, names, columns=statistics(1.0))
    return run.records


def step_records(per_frame: int) -> list[Record]:
    """Scalars alone: `per_frame` steps in each record."""
    run = RunBuilder("bench")
    run.started()
    chance = np.random.default_rng(0)
    steps = FRAMES * per_frame
    run.steps(
        range(steps),
        per_frame=per_frame,
        loss=2.0 + 0.1 * chance.standard_normal(steps),
        gradient_norm=1.0 + 0.1 * np.abs(chance.standard_normal(steps)),
        gradient_nonfinite=0,
        step_time_s=0.1,
        columns={"lr.0": 0.1},
    )
    return run.records


def ranks_records(*, sharded: bool) -> list[Record]:
    """60 steps of 64 ranks, with a summary of 30 tensors in three collections at each tenth; the
    names are the same on all ranks, or each rank has its own."""
    run = RunBuilder("bench", world_size=RANKS)
    for rank in range(RANKS):
        run.started(rank=rank)
    for step in range(60):
        for rank in range(RANKS):
            run.steps(
                [step],
                rank=rank,
                loss=2.0 - step / 1000,
                columns={"lr.0": 1e-3, "gradient_norm": 1},
            )
            if step % 10:
                continue
            rows = [f"l{i}.weight" + (f"@shard{rank}" if sharded else "") for i in range(30)]
            for collection in ("gradients", "weights", "updates"):
                size = {"l2": 1 + 0.01 * step}
                other = {"update_l2": 0.001} if collection == "updates" else {"l1": 50.0}
                run.tensors(step, collection, rows, rank=rank, columns={**size, **other})
    return run.records


def measure(
    what: str, records: Sequence[Record], rows: int, specs: Sequence[RuleSpec], seconds: float
) -> Figure:
    """The best of the rounds that fit into `seconds`."""
    best, until = float("inf"), time.process_time() + seconds
    while time.process_time() < until:
        engine = PartitionEngine(specs)
        started = time.process_time()
        reported = [one for record in records for one in engine.apply(record)]
        best = min(best, time.process_time() - started)
        if reported:
            raise SystemExit(f"{what}: a healthy run gave {reported[0].issue.reason}")
    return Figure(what, len(records) / best, rows / best, best / len(records) * 1e6)


def measure_decoding(records: Sequence[Record], rows: int, seconds: float) -> Figure:
    """What reading the bytes alone costs."""
    best, until = float("inf"), time.process_time() + seconds
    while time.process_time() < until:
        started = time.process_time()
        for record in records:
            decode(read_meta(record.headers), record.value or b"")
        best = min(best, time.process_time() - started)
    return Figure("decoding alone", len(records) / best, rows / best, best / len(records) * 1e6)


def measure_snapshot(records: Sequence[Record], seconds: float) -> tuple[float, int]:
    """Milliseconds for all snapshots of one run, and their bytes."""
    engine = PartitionEngine(rule_specs())
    for record in records:
        engine.apply(record)
    run = engine.run("bench")
    if run is None:
        raise SystemExit("the run is not there")
    best, size, until = float("inf"), 0, time.process_time() + seconds
    while time.process_time() < until:
        started = time.process_time()
        snapshots = run.snapshots(next_offset=1, clock_ms=0, software="")
        size = sum(len(snapshot.encode()) for snapshot in snapshots)
        best = min(best, time.process_time() - started)
    return best * 1000, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000, help="tensors of a frame")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, seconds = arguments.rows, arguments.seconds
    specs = rule_specs()
    tensors = tensor_records(rows)
    figures = [
        measure(f"all rules, {rows:,} tensors", tensors, FRAMES * rows, specs, seconds),
        measure_decoding(tensors, FRAMES * rows, seconds),
        measure("no rule", tensors, FRAMES * rows, (), seconds),
    ]
    for spec in specs:
        alone = (replace(spec, instances=()),)
        figures.append(measure(spec.name, tensors, FRAMES * rows, alone, seconds / 3))
    for per_frame in (1, 20):
        records = step_records(per_frame)
        what = f"all rules, scalars of {per_frame} step{'s' if per_frame > 1 else ''} a record"
        figures.append(measure(what, records, FRAMES * per_frame, specs, seconds))
    for sharded, names in ((False, "the same names"), (True, "names of their own")):
        records = ranks_records(sharded=sharded)
        what = f"all rules, {RANKS} ranks with {names}"
        figures.append(measure(what, records, len(records), specs, seconds))
    sharded_ratio = figures[-1].us_per_record / figures[-2].us_per_record
    snapshot_ms, snapshot_bytes = measure_snapshot(step_records(20), seconds)
    if arguments.json:
        print(
            json.dumps(
                {
                    "figures": [asdict(figure) for figure in figures],
                    "sharded_ratio": sharded_ratio,
                    "snapshot_ms": snapshot_ms,
                    "snapshot_bytes": snapshot_bytes,
                }
            )
        )
        return 0
    for figure in figures:
        print(
            f"{figure.what:45} {figure.records_per_s:10,.0f} records/s "
            f"{figure.rows_per_s:14,.0f} rows/s {figure.us_per_record:9,.1f} us/record"
        )
    print(f"{RANKS} ranks, names of their own : the same names: {sharded_ratio:.2f}")
    print(f"snapshot of all rules of a run: {snapshot_ms:.2f} ms, {snapshot_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
