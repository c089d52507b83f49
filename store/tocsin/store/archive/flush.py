"""Writing what was taken in of a run: files first, then the manifest that names them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tocsin.runtime.testing import no_crash
from tocsin.schemas.configuration.values import BUCKETS
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.saved_tensors import TensorsSaved
from tocsin.store.archive.batch import Batch, Place, Taken, sort_out
from tocsin.store.catalog import Store
from tocsin.store.errors import StoreUnavailable
from tocsin.store.manifest import (
    SUFFIX,
    Family,
    Kind,
    Manifest,
    StoredFile,
    collection_folder,
    manifest_path,
)
from tocsin.store.parquet.tables import MAX_COLUMNS, Table
from tocsin.store.storage.port import Overtaken, Storage

CRASH_POINTS: Final = ("files_written", "manifest_written")
"""The points of a flush, in their order; the worker's come around them."""

ARRIVAL: Final = "bus_offset"
BY_TENSOR: Final[Mapping[Kind, str]] = {
    "tensors": "tensor, rank, mode, step, bus_offset",
    "steps": "name, rank, mode, step, bus_offset",
    "system": "node, name, at_us, bus_offset",
    "events": "topic, bus_offset",
}
"""How rows are sorted in a file, in SQL."""

_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush has done: rows of Parquet, bytes of files, and the manifest as it is now."""

    rows: int
    size_bytes: int
    manifest: Manifest


def flush(
    store: Store,
    run_id: str,
    family: Family,
    records: Sequence[Taken],
    *,
    runs_topic: str,
    now_ms: int,
    over: bool = False,
    crash: Callable[[str], None] = no_crash,
) -> Flushed:
    """Write these records of a run, but for those that its manifest covers. All of them are in the
    store when this returns, or none. Blocks.

    Args:
        runs_topic: of whose records only the newest of an incarnation are kept.
        over: nothing more is to come: the files are sorted by tensor at once.

    Raises:
        StoreUnavailable: the disk is full, or the bucket away. DamagedStore: the manifest is none.
        MissingExtra: the extra `store` is not installed.
    """
    path = manifest_path(run_id, family)
    for _ in range(_TRIES):
        content = store.storage.read(path)
        old = Manifest(run_id=run_id) if content is None else Manifest.decode(content.data, path)
        if old.deleted:
            # What was read is read no more, but its trainings are gone with their rows.
            old = old.model_copy(update={"trainings": {}})
        batch = sort_out(
            records, old, newest_views=runs_topic, holds=partial(_holds, store.storage)
        )
        if batch.covered == old.covered:
            return Flushed(0, 0, old)
        files = _write(store, run_id, family, batch, over=over)
        crash("files_written")
        new = old.model_copy(
            update={
                "generation": old.generation + 1,
                "updated_ms": now_ms,
                "covered": batch.covered,
                "senders": batch.senders,
                "trainings": batch.trainings,
                "files": (*old.files, *files),
                "compacted": False,
                "deleted": False,
            }
        )
        try:
            expected = None if content is None else content.version
            store.storage.replace(path, new.encode(), expected=expected)
        except Overtaken:
            # A merge, or a worker that has the partition by now. What it wrote is covered then.
            # Or it was this write, whose answer was lost: its files are named, and stay.
            content = store.storage.read(path)
            named = () if content is None else Manifest.decode(content.data, path).files
            store.storage.delete({file.path for file in files} - {file.path for file in named})
            continue
        crash("manifest_written")
        rows = sum(file.rows for file in files)
        return Flushed(rows, sum(file.size_bytes for file in files), new)
    raise StoreUnavailable(f"{path} was written by others {_TRIES} times in a row")


def _holds(storage: Storage, saved: TensorsSaved) -> bool:
    if saved.uri.startswith(BUCKETS) or storage.url.startswith(BUCKETS):
        return saved.uri == f"{storage.url}/{saved.path}"
    # The same folder may have another path where the training runs.
    try:
        storage.local(saved.path)
    except OSError:
        return False
    return True


def _write(
    store: Store, run_id: str, family: Family, batch: Batch, *, over: bool
) -> list[StoredFile]:
    files: list[StoredFile] = []
    try:
        for place, tables in batch.tables():
            for group in _within_limit(tables):
                files.append(_file(store, run_id, family, place, group, over=over))
    except BaseException:
        # Nothing names them.
        store.storage.delete([file.path for file in files])
        raise
    return files


def _file(
    store: Store,
    run_id: str,
    family: Family,
    place: Place,
    tables: Sequence[Table],
    *,
    over: bool,
) -> StoredFile:
    folder = collection_folder(run_id, place.incarnation, place.kind, place.collection)
    name = f"{family}-{new_id()}{SUFFIX}"
    made = store.storage.scratch() / f"{os.getpid()}-{name}"
    spill = store.storage.scratch() / f"spill-{os.getpid()}"
    order = BY_TENSOR[place.kind] if over else ARRIVAL
    try:
        store.duck.write(tables, made, order=order, spill=spill)
        size_bytes = made.stat().st_size
        store.storage.move_in(f"{folder}/{name}", made)
    except OSError as error:
        raise StoreUnavailable(f"a file of the store could not be written: {error}") from error
    finally:
        made.unlink(missing_ok=True)
    return StoredFile(
        path=f"{folder}/{name}",
        kind=place.kind,
        incarnation=place.incarnation,
        collection=place.collection,
        columns=tuple(dict.fromkeys(name for table in tables for name in table.statistics)),
        rows=sum(table.rows for table in tables),
        size_bytes=size_bytes,
        order="tensor" if over else "arrival",
    )


def _within_limit(tables: Sequence[Table]) -> Sequence[Sequence[Table]]:
    """Tables by files, each with so many columns that it can be read."""
    groups: list[list[Table]] = []
    names: set[str] = set()
    for table in tables:
        more = names | set(table.statistics)
        if not groups or len(more) > MAX_COLUMNS:
            groups.append([])
            more = set(table.statistics)
        groups[-1].append(table)
        names = more
    return groups
