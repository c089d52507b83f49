"""Faults that the suites must find, each by the name under which a worker's process is given it."""

from __future__ import annotations

import asyncio

from tocsin.bus.port import Producer
from tocsin.runtime.unacknowledged import Unacknowledged
from tocsin.runtime.worker import Worker
from tocsin.schemas.records.wire import Meta
from tocsin.stream_rules.engine.run import RunEngine
from tocsin.stream_rules.engine.run_state import RunState


class CommitsFirst(Worker):
    """`commits-first`: offsets are committed before the states are written."""

    async def _checkpoint(self, *, force: bool = False) -> None:
        consumer = self._wiring.consumer
        offsets = self._positions.to_commit(self._checkpoints._committable)
        if consumer is not None and offsets:
            await consumer.commit(offsets)
            self._positions.was_committed(offsets)
        await super()._checkpoint(force=force)


class SentLater(Unacknowledged):
    """What there is to write is written some time later, and nobody waits for it."""

    async def flush(self, producer: Producer) -> None:
        records, self._records = self._records, []

        async def later() -> None:
            await asyncio.sleep(0.5)
            await producer.publish(records)

        self.task = asyncio.create_task(later())


def kind_of_worker(mutation: str) -> type[Worker]:
    """The class with that mutation."""
    return CommitsFirst if mutation == "commits-first" else Worker


def mutate(worker: Worker, mutation: str) -> None:
    """`unacknowledged`: nobody waits for the outputs of this worker; `states-unacknowledged`: nor,
    before it commits, for the states that it saves."""
    if mutation == "unacknowledged":
        worker._checkpoints._outputs = SentLater("mutated", worker.metrics)
    elif mutation == "states-unacknowledged":
        worker._checkpoints._snapshots = SentLater("mutated", worker.metrics)


def mutate_engine(mutation: str) -> None:
    """Change the engine of this process.

    `repeats`: it takes records again that it has had already. `no-guard`: and a restored state does
    not say which offset it covers. Either guard alone would still drop what is read again.
    """
    if mutation in ("repeats", "no-guard"):
        setattr(RunState, "admit", _takes_repeats)  # noqa: B010  (a method is not assigned to)
    if mutation == "no-guard":
        restore = RunEngine.restore

        def without_offset(self: RunEngine, *args: object) -> None:
            restore(self, *args)  # type: ignore[arg-type]
            self.covers = 0
            for instance in self.instances:
                instance.covers = 0

        setattr(RunEngine, "restore", without_offset)  # noqa: B010


def _takes_repeats(state: RunState, meta: Meta) -> bool:
    state.sequences[meta.boot] = meta.seq
    return True
