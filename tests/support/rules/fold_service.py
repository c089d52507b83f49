"""A small service for tests of the worker: an order-sensitive fold per run, and some outputs.

Input values are decimal numbers, or b"poison". For each seventh number of a run it puts out one
record whose id and value follow from the fold alone, so a wrong state shows in the outputs, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime.service import Poison, Service, Tick
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.topics import Topics

MODULUS = (1 << 61) - 1
EVERY = 7


def fold(state: int, number: int) -> int:
    return (state * 31 + number + 1) % MODULUS


class RunState:
    def __init__(self, state: int = 1, count: int = 0, next_offset: int = 0) -> None:
        self.state = state
        self.count = count
        self.next_offset = next_offset
        self.dirty = False


class FoldService(Service):
    """`guard` False is the mutation: snapshots without the offset that they cover."""

    name = "fold"
    bus_time = True

    def __init__(self, topics: Topics, *, guard: bool = True) -> None:
        self.inputs = (topics.telemetry,)
        self.restores = (topics.state,)
        self.read_ahead = (topics.state,)
        self._topics = topics
        self._guard = guard
        self._outputs: list[Outgoing] = []
        self.partitions: dict[int, dict[str, RunState]] = {}
        self.restored_at: list[tuple[int, int | None]] = []
        self.forgotten: list[int] = []
        self.ticks: list[Tick] = []
        self.due_ms: int | None = None
        self.applied = 0

    def order_of(self, record: Record) -> int:
        order: int = json.loads(record.value or b"")["next_offset"]
        return order

    def restore(self, partition: int, records: Sequence[Record]) -> None:
        runs = self.partitions.setdefault(partition, {})
        for record in records:
            if record.value is None:
                continue
            saved = json.loads(record.value)
            run = record.key.decode().split("/")[0]
            if run not in runs or saved["next_offset"] >= runs[run].next_offset:
                runs[run] = RunState(saved["state"], saved["count"], saved["next_offset"])

    def restored(self, partition: int, next_offset: int | None) -> None:
        self.partitions.setdefault(partition, {})
        self.restored_at.append((partition, next_offset))

    def release(self, partitions: Collection[int]) -> None:
        for number in partitions:
            if self.partitions.pop(number, None) is not None:
                self.forgotten.append(number)

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        poison = []
        for record in records:
            runs = self.partitions[record.partition.number]
            run = runs.setdefault(record.key.decode(), RunState())
            if self._guard and record.offset < run.next_offset:
                continue
            run.next_offset = record.offset + 1
            if record.value == b"poison":
                poison.append(Poison(record, MalformedRecord("not a number")))
                continue
            run.state = fold(run.state, int(record.value or b"0"))
            run.count += 1
            run.dirty = True
            self.applied += 1
            if run.count % EVERY == 0:
                self._put_out(record, run)
        self.ticks.append(tick)
        if self.due_ms is not None and tick.caught_up and tick.now_ms >= self.due_ms:
            self.due_ms = None
        return poison

    def _put_out(self, record: Record, run: RunState) -> None:
        value = json.dumps({"id": f"{record.key.decode()}/{run.count}", "state": run.state})
        partition = Partition(self._topics.issues, record.partition.number % 12)
        self._outputs.append(Outgoing(partition, record.key, value.encode()))

    def outputs(self) -> Sequence[Outgoing]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def snapshots(self, *, force: bool) -> Sequence[Outgoing]:
        snapshots = []
        for number, runs in self.partitions.items():
            for name, run in runs.items():
                if run.dirty:
                    saved = {
                        "state": run.state,
                        "count": run.count,
                        "next_offset": run.next_offset if self._guard else 0,
                    }
                    partition = Partition(self._topics.state, number)
                    key = f"{name}/fold".encode()
                    snapshots.append(Outgoing(partition, key, json.dumps(saved).encode()))
                    run.dirty = False
        return snapshots

    def next_due_ms(self) -> int | None:
        return self.due_ms


def expected_outputs(run: str, numbers: Sequence[int]) -> dict[str, int]:
    """Independent of the service: id → state of all outputs of a run."""
    state, outputs = 1, {}
    for count, number in enumerate(numbers, 1):
        state = (state * 31 + number + 1) % MODULUS
        if count % EVERY == 0:
            outputs[f"{run}/{count}"] = state
    return outputs
