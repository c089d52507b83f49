"""The checkpoints of a worker: outputs acknowledged, then snapshots acknowledged, then offsets
committed. A crash in between repeats, and never invents.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Protocol, TypeVar

from tocsin.bus.port import Consumer, Outgoing, Partition, Producer
from tocsin.runtime import metrics as names
from tocsin.runtime.clock import Clock
from tocsin.runtime.leased_runs import SkippedRuns
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.offsets import Positions
from tocsin.runtime.service import Service
from tocsin.runtime.unacknowledged import Unacknowledged

T = TypeVar("T")


class InThread(Protocol):
    """Runs a call into the service in its thread."""

    def __call__(self, work: Callable[..., T], *args: object) -> Awaitable[T]: ...


class Checkpoints:
    """What there is to be saved, and since when. All methods are called under the worker's lock.

    Args:
        interval_s: seconds after the first change until a checkpoint is due by itself.
        crash: called with the name of each point at which a test may end the process.
    """

    def __init__(
        self,
        service: Service,
        *,
        positions: Positions,
        skipped: SkippedRuns,
        in_thread: InThread,
        interval_s: float,
        clock: Clock,
        metrics: Metrics,
        crash: Callable[[str], None],
    ) -> None:
        self.unfinished = False
        """Whether one comes before anything else: the last one failed, or somebody waits for it."""
        self._service: Final = service
        self._positions: Final = positions
        self._skipped: Final = skipped
        self._in_thread: Final = in_thread
        self._interval_ms: Final = 1000 * interval_s
        self._clock: Final = clock
        self._metrics: Final = metrics
        self._crash: Final = crash
        self._outputs = Unacknowledged(service.name, metrics)
        self._snapshots = Unacknowledged(service.name, metrics)
        self._dirty_since_ms: int | None = None

    @property
    def saved(self) -> bool:
        """Whether all that was applied is in a checkpoint."""
        return self._dirty_since_ms is None

    def changed(self, now_ms: int) -> None:
        """Something was applied."""
        if self._dirty_since_ms is None:
            self._dirty_since_ms = now_ms

    def add(self, outputs: Sequence[Outgoing]) -> None:
        """Outputs for the next one, which is due at once."""
        self._outputs.add(outputs)

    def due_ms(self) -> float | None:
        """When one is due by itself; None: there is nothing to be saved."""
        return None if self._dirty_since_ms is None else self._dirty_since_ms + self._interval_ms

    def is_due(self, now_ms: int) -> bool:
        """Whether one should be made now."""
        due_ms = self.due_ms()
        timely = due_ms is not None and now_ms >= due_ms
        return bool(self._outputs) or self._service.wants_checkpoint() or timely

    async def make(self, producer: Producer, consumer: Consumer, *, force: bool = False) -> None:
        """Make one; what could not be written stays for the next try.

        `force`: before partitions are given up.

        Raises:
            BusUnavailable, FencedMember, UnknownTopic: it is `unfinished`.
        """
        self.unfinished = True
        started = time.perf_counter()
        await self._outputs.flush(producer)
        self._crash("outputs_acknowledged")
        if not force:
            # What follows from the outputs need not wait for the rest: it is a stop's way.
            await self._service.checkpointed(self._clock.now_ms())
        if self._service.keeps_state:
            snapshots = await self._in_thread(lambda: self._service.snapshots(force=force))
            self._outputs.add(self._service.outputs() if force else ())
            await self._outputs.flush(producer)
            self._snapshots.add(snapshots)
            await self._snapshots.flush(producer)
        self._crash("snapshots_acknowledged")
        # What a snapshot that does not fit was made of is read again after a restart.
        held = self._snapshots.left_out(self._service.restores)
        offsets = self._positions.to_commit(self._committable)
        offsets = {p: offset for p, offset in offsets.items() if p.number not in held}
        if offsets:
            await consumer.commit(offsets)
            self._positions.was_committed(offsets)
        self._crash("committed")
        self.unfinished, self._dirty_since_ms = False, None
        name, took_s = self._service.name, time.perf_counter() - started
        self._metrics.add(names.CHECKPOINTS, service=name)
        self._metrics.add(names.CHECKPOINT_SECONDS, took_s, service=name)

    def drop(self, numbers: Collection[int]) -> None:
        """These partition numbers are another worker's now."""
        self._snapshots.drop(numbers)

    def clear(self) -> None:
        """Drop all: what was not committed is another worker's now."""
        self._outputs.clear()
        self._snapshots.clear()
        self.unfinished, self._dirty_since_ms = False, None

    def _committable(self, partition: Partition, offset: int) -> int:
        offset = self._skipped.before(partition, offset)
        return self._service.committable(partition, offset)
