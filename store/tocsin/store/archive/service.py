"""The archive as a service of a worker: takes records in, and writes them in portions.

What is taken in stays in memory until it is in a file, and its offset is committed after that. So a
crash repeats what was read since; the manifest shows which of it is written already. If the store
does not answer, what came first waits in memory up to a limit; what comes then is left on the bus
and read again when it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from tocsin.bus.port import Outgoing, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.metrics import Metrics
from tocsin.runtime.service import Attachment, Poison, Service, StartOver, Tick
from tocsin.runtime.testing import no_crash
from tocsin.schemas.errors import ConfigurationError, RecordError
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import RunEnded
from tocsin.schemas.topics import Topics
from tocsin.store.archive.batch import Taken
from tocsin.store.archive.flush import flush
from tocsin.store.archive.records import read_record, topics_of
from tocsin.store.archive.upkeep import Upkeep
from tocsin.store.catalog import Store
from tocsin.store.errors import StoreError, StoreUnavailable, UnusableStore
from tocsin.store.manifest import Family

logger = logging.getLogger(__name__)

_PAUSE_MS: Final = (1_000, 60_000)


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """When what was taken in of a run is written: after `every_ms`, at `run_bytes`, when all runs
    together have `total_bytes`, or `settle_ms` after the run ended. At `limit_bytes` no more is
    taken in."""

    every_ms: int = 60_000
    settle_ms: int = 2_000
    run_bytes: int = 32 * 1024 * 1024
    total_bytes: int = 192 * 1024 * 1024
    limit_bytes: int = 384 * 1024 * 1024


@dataclass(slots=True)
class _Run:
    partition: int
    since_ms: int
    taken: list[Taken] = field(default_factory=list)
    firsts: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0
    heard_ms: int = 0
    over: bool = False

    def due_ms(self, policy: FlushPolicy) -> int:
        if self.size_bytes >= policy.run_bytes:
            return 0
        latest = self.since_ms + policy.every_ms
        return min(latest, self.heard_ms + policy.settle_ms) if self.over else latest


class ArchiveService(Service):
    """One family of topics into a store. See `tocsin.runtime.service.Service`."""

    restores = ()

    def __init__(
        self,
        store: Store,
        family: Family,
        *,
        topics: Topics,
        upkeep: Upkeep,
        policy: FlushPolicy | None = None,
        metrics: Metrics | None = None,
        crash: Callable[[str], None] = no_crash,
    ) -> None:
        self.name = "archive" if family == "telemetry" else f"archive-{family}"
        self.inputs = topics_of(topics, family)
        self.policy = policy or FlushPolicy()
        self._store = store
        self._family: Final[Family] = family
        self._topics = topics
        self._upkeep = upkeep
        self._metrics = metrics or Metrics()
        self._crash = crash
        self._only: frozenset[str] | None = None
        self._runs: dict[str, _Run] = {}
        self._waiting = 0
        self._left_out: dict[Partition, int] = {}
        self._now_ms = 0
        self._pause_ms = _PAUSE_MS[0]
        self._away_until_ms = 0
        self._unread = 0

    def attached(self, to: Attachment) -> None:
        """Called once, before anything else."""
        self._only = to.only_runs

    def release(self, partitions: Collection[int]) -> None:
        """Drop the state of partitions that another worker owns now. What is not written is read
        again by whoever owns them now."""
        self._runs = {
            run_id: run for run_id, run in self._runs.items() if run.partition not in partitions
        }
        self._waiting = sum(run.size_bytes for run in self._runs.values())
        self._left_out = {
            place: offset
            for place, offset in self._left_out.items()
            if place.number not in partitions
        }

    def apply(self, records: Sequence[Record], tick: Tick) -> Sequence[Poison]:
        """Take the records in, in order per partition, and fire the timers that are due. Records
        that cannot be read are the rules' to bury; they are counted."""
        self._now_ms = tick.now_ms
        for record in records:
            self._admit(record)
        self._metrics.set(names.STORE_WAITING, self._waiting, service=self.name)
        return ()

    def _admit(self, record: Record) -> None:
        if record.partition in self._left_out:
            return
        if self._waiting >= self.policy.limit_bytes:
            self._left_out[record.partition] = record.offset
            return
        try:
            found = read_record(record, self._family)
        except RecordError as error:
            self._unread += 1
            logger.debug("not archived: %s", error, extra={"action": self.name})
            return
        if found is None:
            return
        run_id, taken = found
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _Run(record.partition.number, self._now_ms)
        run.taken.append(taken)
        run.firsts.setdefault(taken.topic, taken.offset)
        run.size_bytes += taken.size_bytes
        self._waiting += taken.size_bytes
        run.heard_ms = self._now_ms
        run.over = _over(taken, run.over)

    def snapshots(self, *, force: bool) -> Sequence[Outgoing]:
        """The states that have changed since their last snapshot, each with the offset it covers.
        Publishes nothing: what it saves is files."""
        if not force and self._now_ms < self._away_until_ms:
            return ()
        due = self._due(force=force)
        for run_id in due:
            if not self._write(run_id):
                return ()
        # What was written has to be committed first: that is where the reading begins again.
        if self._left_out and not due and not force:
            raise StartOver("the store answers again: what was left on the bus is read now")
        return ()

    def _due(self, *, force: bool) -> list[str]:
        runs = sorted(self._runs, key=lambda run_id: -self._runs[run_id].size_bytes)
        if force or self._left_out:
            return runs
        due = [run_id for run_id in runs if self._runs[run_id].due_ms(self.policy) <= self._now_ms]
        waiting = self._waiting - sum(self._runs[run_id].size_bytes for run_id in due)
        for run_id in runs:
            if waiting < self.policy.total_bytes:
                break
            if run_id not in due:
                due.append(run_id)
                waiting -= self._runs[run_id].size_bytes
        return due

    def _write(self, run_id: str) -> bool:
        run = self._runs[run_id]
        try:
            flushed = flush(
                self._store,
                run_id,
                self._family,
                run.taken,
                runs_topic=self._topics.runs,
                now_ms=self._now_ms,
                over=run.over,
                crash=self._crash,
            )
        except (StoreUnavailable, UnusableStore, OSError) as error:
            self._away(error)
            return False
        except StoreError as error:
            # No wait mends it (a manifest that is none, rows that DuckDB refuses), and the other
            # runs are not to wait for it.
            logger.error("run %s is not archived: %s", run_id, error, extra={"action": self.name})
            self._drop(run_id)
            return True
        self._drop(run_id)
        if self._away_until_ms:
            logger.info("the store answers again", extra={"action": self.name})
            self._away_until_ms, self._pause_ms = 0, _PAUSE_MS[0]
        self._metrics.add(names.ARCHIVED_ROWS, flushed.rows, service=self.name)
        self._metrics.add(names.ARCHIVED_BYTES, flushed.size_bytes, service=self.name)
        self._upkeep.flushed(
            run_id, self._family, flushed.manifest, over=run.over, now_ms=self._now_ms
        )
        return True

    def _drop(self, run_id: str) -> None:
        self._waiting -= self._runs.pop(run_id).size_bytes

    def _away(self, error: Exception) -> None:
        level = logging.DEBUG if self._away_until_ms else logging.WARNING
        logger.log(
            level,
            "the store cannot be written, trying again; nothing is lost meanwhile: %s",
            error,
            extra={"action": self.name},
        )
        self._metrics.add(names.STORE_AWAY, 1, service=self.name)
        self._away_until_ms = self._now_ms + self._pause_ms
        self._pause_ms = min(2 * self._pause_ms, _PAUSE_MS[1])

    def committable(self, partition: Partition, next_offset: int) -> int:
        """The offset that may be committed: `next_offset`, or less to read from there again after a
        crash. Up to the first record that is not in a file."""
        firsts = [
            run.firsts[partition.topic]
            for run in self._runs.values()
            if run.partition == partition.number and partition.topic in run.firsts
        ]
        return min([next_offset, *firsts, self._left_out.get(partition, next_offset)])

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint should come now rather than at the end of its interval."""
        return self._now_ms >= self._away_until_ms and bool(
            self._due(force=False) or (self._left_out and not self._runs)
        )

    def next_due_ms(self) -> int | None:
        """When `apply` must be called even if no record comes (Unix milliseconds); None: never."""
        if not self._runs and not self._left_out:
            return None
        due = [run.due_ms(self.policy) for run in self._runs.values()]
        return max(min([*due, self._now_ms + self.policy.every_ms]), self._away_until_ms)

    def settled(self) -> bool:
        """Whether all that `apply` was given has been dealt with; a service that gives work away
        says False until it is back. Whether all that was taken in is in files."""
        return not self._runs and not self._left_out

    async def ended(self) -> None:
        """On the event loop, when the worker ends, whatever ended it."""
        self._upkeep.stop()


def _over(record: Taken, before: bool) -> bool:
    """Whether a run is over, after this record."""
    if not isinstance(record.value, Event):
        return before
    data = record.value.data
    if isinstance(data, RunView):
        return data.state != "running"
    return before or (isinstance(data, RunEnded) and data.role == "launcher")


def check_store(store: Store) -> None:
    """Make sure that the store can be written, at the start of what is to write it. Blocks.

    Raises:
        ConfigurationError: it cannot, for a reason that waiting does not mend.
    """
    try:
        store.duck  # noqa: B018
        store.storage.scratch()
        store.storage.folders()
    except StoreUnavailable as error:
        logger.warning("%s", error, extra={"action": "start"})
    except OSError as error:
        raise ConfigurationError(f"the store {store.url} cannot be used: {error}") from error
