"""How many ranks a rules worker watches, and how soon it answers after a restart.

    python benchmarks/fleet.py [--ranks 10 100 1000] [--runs 1000] [--json]

A simulated fleet with steps of one second: each rank sends in 10 s a heartbeat and ten records with
the scalars of a step, and the first rank of each run three summaries of 2,000 tensors.
The service of the workers takes it in, with all rules at their defaults, decoding, timers, and two
checkpoints each 10 s; the bus is left out. The last interval has a NaN on one rank of each run,
and each must be found. Times are CPU times of this process: what else runs matters little.

Once as one run of all ranks, which one worker must take, and once as runs of 64 ranks, which
workers share. Then a restart: the states of so many live runs, of 200 tensors each, are read, and a
NaN comes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from tocsin.bus.port import Outgoing, Record
from tocsin.runtime.service import Tick
from tocsin.schemas.topics import TELEMETRY_PARTITIONS, Topics
from tocsin.stream_rules.service import RulesService, build_rules_service
from tocsin.stream_rules.testing import RunBuilder

INTERVAL_S = 10
STEPS = 10
TENSORS = 2_000
RUN_RANKS = 64
LIVE_TENSORS = 200
SCALARS = {"lr.0": 1e-3, "gradient_norm": 1.0, "gradient_nonfinite": 0, "step_time_s": 1.0}
"""Of each step, beside its loss."""

INTERVALS = 4
TOPICS = Topics()
ALL = frozenset(range(TELEMETRY_PARTITIONS))


@dataclass(frozen=True, slots=True)
class Watched:
    """What a fleet of one shape costs."""

    shape: str
    ranks: int
    records: int
    cpu_s_per_interval: float
    us_per_record: float
    checkpoint_share: float
    ranks_per_core: float
    faults: int
    found: int


def interval(
    run: RunBuilder, number: int, ranks: int, *, bad: int | None, tensors: int = TENSORS
) -> list[Record]:
    """What a run sends in 10 s; at rank `bad` the loss of the last step is NaN."""
    at = len(run.records)
    steps = range(STEPS * number, STEPS * (number + 1))
    began_ms = run.now_ms
    for rank in range(ranks):
        run.now_ms = began_ms
        losses = [2.0 - 0.001 * step for step in steps]
        if rank == bad:
            losses[-1] = math.nan
        run.steps(steps, rank=rank, loss=losses, columns=SCALARS)
        run.heartbeat(rank=rank, last_step=steps[-1])
    run.now_ms = began_ms
    add_summaries(run, steps[0], 1.0 + 0.01 * number, tensors)
    run.now_ms = began_ms + 1_000 * INTERVAL_S
    return run.records[at:]


_NAMES = [f"model.layers.{i // 8}.attention.projection_{i % 8}.weight" for i in range(TENSORS)]


def add_summaries(run: RunBuilder, step: int, norm: float, tensors: int = TENSORS) -> None:
    """Those of the first rank at one step, each tensor with that norm."""
    for collection in ("gradients", "weights", "updates"):
        more = {"update_l2": 0.001} if collection == "updates" else {"l1": 50.0}
        run.tensors(step, collection, _NAMES[:tensors], columns={"l2": norm, **more})


def batches(records: Sequence[Record], size: int = 500) -> Iterator[Sequence[Record]]:
    """As a worker polls them."""
    for at in range(0, len(records), size):
        yield records[at : at + size]


def take(service: RulesService, records: Sequence[Record]) -> list[Outgoing]:
    """Apply them; the issues."""
    issues: list[Outgoing] = []
    for batch in batches(records):
        poison = service.apply(batch, Tick(batch[-1].append_ms, ALL))
        if poison:
            raise SystemExit(f"a record was refused: {poison[0].error}")
        issues += [one for one in service.outputs() if one.partition.topic == TOPICS.issues]
    return issues


def watch(shape: str, runs: int, ranks: int) -> Watched:
    """So many runs of so many ranks."""
    builders = [RunBuilder(f"run-{number}", world_size=ranks) for number in range(runs)]
    service = build_rules_service(TOPICS)
    for run in builders:
        at = len(run.records)
        for rank in range(ranks):
            run.started(rank=rank)
        take(service, run.records[at:])
    spent = checkpoints = 0.0
    records, found = 0, set[bytes]()
    for number in range(INTERVALS):
        last = number == INTERVALS - 1
        parts = [interval(run, number, ranks, bad=ranks // 2 if last else None) for run in builders]
        sent = [record for part in parts for record in part]
        began = time.process_time()
        for half in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
            issues = take(service, half)
            found |= {one.key for one in issues if b'"nonfinite"' in (one.value or b"")}
            started = time.process_time()
            service.snapshots(force=False)
            # The first one writes all states, which a fleet that runs has done long ago.
            checkpoints += (time.process_time() - started) if number else 0.0
        spent += (time.process_time() - began) if number else 0.0
        records += len(sent) if number else 0
    cpu_s = spent / (INTERVALS - 1)
    return Watched(
        shape,
        runs * ranks,
        records // (INTERVALS - 1),
        cpu_s,
        1e6 * spent / records,
        checkpoints / spent,
        runs * ranks * INTERVAL_S / cpu_s,
        runs,
        len(found),
    )


@dataclass(frozen=True, slots=True)
class Restart:
    """What a worker does that takes over live runs."""

    runs: int
    state_bytes: int
    snapshots: int
    read_s: float
    first_issue_s: float
    all_taken_up_s: float


def restart(runs: int) -> Restart:
    """Read the states of so many live runs, then the NaN of the last of them."""
    first = build_rules_service(TOPICS)
    builders = [RunBuilder(f"live-{number}") for number in range(runs)]
    for run in builders:
        run.started(role="launcher")
        run.started()
        interval(run, 0, 1, bad=None, tensors=LIVE_TENSORS)
        take(first, run.records)
    written = [o for o in first.snapshots(force=True) if o.partition.topic == TOPICS.state]
    rows: dict[int, list[Record]] = {}
    for number, one in enumerate(written):
        record = Record(one.partition, number, 0, one.key, one.value, one.headers)
        rows.setdefault(one.partition.number, []).append(record)
    del first
    bad = interval(builders[-1], 1, 1, bad=0, tensors=LIVE_TENSORS)

    second = build_rules_service(TOPICS)
    began = time.process_time()
    for number, row in rows.items():
        second.restore(number, row)
        second.restored(number, bad[0].offset)
    read_s = time.process_time() - began
    issues = take(second, bad)
    first_issue_s = time.process_time() - began
    if not any(b'"nonfinite"' in (one.value or b"") for one in issues):
        raise SystemExit("the fault was not found")
    while not second.settled():
        second.apply((), Tick(bad[-1].append_ms, ALL))
    return Restart(
        runs,
        sum(len(one.value or b"") for one in written),
        len(written),
        read_s,
        first_issue_s,
        time.process_time() - began,
    )


def main() -> int:
    """Measure and print; 1 if a fault was not found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--runs", type=int, default=1000, help="live runs at the restart")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    for ranks in arguments.ranks:
        found.append(watch("one run", 1, ranks))
        if ranks > RUN_RANKS:
            found.append(watch(f"runs of {RUN_RANKS}", ranks // RUN_RANKS, RUN_RANKS))
    again = restart(arguments.runs)
    if arguments.json:
        print(json.dumps({"watched": [asdict(one) for one in found], "restart": asdict(again)}))
    else:
        for one in found:
            print(
                f"{one.shape:11} {one.ranks:6,} ranks: {one.records:6,} records in "
                f"{one.cpu_s_per_interval:6.2f} s of CPU time each {INTERVAL_S} s "
                f"({one.us_per_record:5.0f} us a record, checkpoints {one.checkpoint_share:.0%}), "
                f"one core watches {one.ranks_per_core:7,.0f}; faults {one.found} of {one.faults}"
            )
        print(
            f"restart with {again.runs:,} live runs: {again.snapshots:,} states of "
            f"{again.state_bytes / 1e6:.0f} MB read in {again.read_s:.2f} s of CPU time, first "
            f"issue after {again.first_issue_s:.2f} s, all after {again.all_taken_up_s:.2f} s"
        )
    return int(any(one.found < one.faults for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
