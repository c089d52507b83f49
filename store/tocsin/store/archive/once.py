"""Archiving what a bus has of one run and the store has not: now, and without a consumer group.

The manifest holds how far the store is. So this is for the helper of a run, which asks seldom; many
runs of a fleet are archived by `ArchiveService`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.bus.port import EARLIEST, Bus, From, Partition, Record
from tocsin.bus.reading import read_to_end
from tocsin.runtime.testing import no_crash
from tocsin.schemas.errors import RecordError
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.store.archive.batch import Taken
from tocsin.store.archive.flush import flush
from tocsin.store.archive.merge import compact, thin_out, wants_thinning
from tocsin.store.archive.records import read_record, topics_of
from tocsin.store.catalog import Store
from tocsin.store.errors import StoreError, StoreUnavailable, UnusableStore
from tocsin.store.manifest import FAMILIES, Family

logger = logging.getLogger(__name__)

_EARLIEST_MS: Final = 15 * 60_000
_LATEST_MS: Final = 2 * 24 * 3_600_000
"""A run of which nothing came for so long has nothing on the bus either."""

BATCH_BYTES: Final = 64 * 1024 * 1024
"""So much of a run is written at once, at most."""


@dataclass(slots=True)
class Archived:
    """What was written."""

    rows: int = 0
    size_bytes: int = 0
    unread: int = 0
    """Records that this release cannot read."""


async def archive_run(
    bus: Bus,
    store: Store,
    run_id: str,
    *,
    topics: Topics,
    now_ms: Callable[[], int],
    over: bool = False,
    crash: Callable[[str], None] = no_crash,
) -> Archived:
    """Write what the bus has of a run by now, and the store has not. Files are written in a thread.

    Args:
        over: nothing more is to come: sort the files by tensor.

    Raises:
        BusUnavailable, UnknownTopic: the bus does not answer, or was never set up.
        StoreUnavailable, DamagedStore, MissingExtra: as `flush` does.
    """
    done = Archived()
    for family in FAMILIES:
        await _family(bus, store, run_id, family, topics, now_ms, over, crash, done)
        if over:
            await asyncio.to_thread(compact, store, run_id, family, topics=topics, crash=crash)
            continue
        manifest = (await asyncio.to_thread(store.manifests, run_id)).get(family)
        if manifest is not None and wants_thinning(manifest):
            await asyncio.to_thread(thin_out, store, run_id, family, topics=topics, crash=crash)
    return done


async def _family(
    bus: Bus,
    store: Store,
    run_id: str,
    family: Family,
    topics: Topics,
    now_ms: Callable[[], int],
    over: bool,
    crash: Callable[[str], None],
    done: Archived,
) -> None:
    manifest = (await asyncio.to_thread(store.manifests, run_id)).get(family)
    place = telemetry_partition if family == "telemetry" else issue_partition
    partitions = [Partition(topic, place(run_id)) for topic in topics_of(topics, family)]
    starts: dict[Partition, From] = {}
    for partition in partitions:
        known = None if manifest is None else manifest.covered.get(partition.topic)
        # From the beginning: an earlier training of the run may have come to no archive.
        starts[partition] = From.time(known.append_ms) if known is not None else EARLIEST

    async def write(records: list[Taken]) -> None:
        flushed = await asyncio.to_thread(
            flush,
            store,
            run_id,
            family,
            records,
            runs_topic=topics.runs,
            now_ms=now_ms(),
            over=over,
            crash=crash,
        )
        done.rows += flushed.rows
        done.size_bytes += flushed.size_bytes

    taken: list[Taken] = []
    size_bytes = 0
    reader = await bus.reader(starts)
    try:
        ends = await reader.ends(partitions)
        async for records in read_to_end(reader, ends):
            # Decoding takes longer than others of this loop should wait.
            found, unread = await asyncio.to_thread(_taken, records, run_id, family)
            done.unread += unread
            taken += found
            size_bytes += sum(one.size_bytes for one in found)
            if size_bytes >= BATCH_BYTES:
                await write(taken)
                taken, size_bytes = [], 0
    finally:
        await reader.close()
    if taken:
        await write(taken)


def _taken(records: Sequence[Record], run_id: str, family: Family) -> tuple[list[Taken], int]:
    """What is archived of the run, and how many records cannot be read."""
    taken: list[Taken] = []
    unread = 0
    for record in records:
        # Most keys name the run of a record, and those of other runs need not be decoded.
        if family == "telemetry" and record.key != run_id.encode():
            continue
        try:
            found = read_record(record, family)
        except RecordError:
            unread += 1
            continue
        if found is not None and found[0] == run_id:
            taken.append(found[1])
    return taken, unread


async def finish_others(
    bus: Bus,
    store: Store,
    *,
    topics: Topics,
    now_ms: Callable[[], int],
    held: Callable[[str], Awaitable[bool]],
) -> int:
    """Archive the rest of runs whose own process could not; how many there were. A run that cannot
    be archived is a line in the log.

    Args:
        held: whether a run has a process of its own now, which archives it.

    Raises:
        BusUnavailable, StoreUnavailable, UnusableStore: as `archive_run` does.
    """
    count, now = 0, now_ms()
    for run in await asyncio.to_thread(store.runs):
        if not now - _LATEST_MS < run.updated_ms < now - _EARLIEST_MS or await held(run.run_id):
            continue
        try:
            manifests = await asyncio.to_thread(store.manifests, run.run_id)
            if all(manifest.compacted for manifest in manifests.values()):
                continue
            await archive_run(bus, store, run.run_id, topics=topics, now_ms=now_ms, over=True)
        except (StoreUnavailable, UnusableStore):
            raise
        except StoreError as error:
            # No wait mends it, and the others are not to wait for it.
            logger.error(
                "run %s is not archived: %s", run.run_id, error, extra={"action": "archive"}
            )
            continue
        count += 1
    return count
