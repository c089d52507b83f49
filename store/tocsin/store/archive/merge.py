"""Merging files of a run: by tensor when it is over, in order of arrival when they are many."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tocsin.runtime.testing import no_crash
from tocsin.schemas.errors import RecordError
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.topics import Topics
from tocsin.store.archive.flush import ARRIVAL, BY_TENSOR
from tocsin.store.catalog import Store
from tocsin.store.errors import DamagedStore, StoreUnavailable
from tocsin.store.manifest import (
    SUFFIX,
    Family,
    Kind,
    Manifest,
    StoredFile,
    manifest_path,
    run_folder,
)
from tocsin.store.parquet.tables import EventRow, event_table
from tocsin.store.storage.port import Overtaken

CRASH_POINTS: Final = ("merged", "merge_named")
"""The points of a merge, in their order."""

MANY: Final = 24
"""So many small files of one collection are merged while the run goes on."""

SMALL_BYTES: Final = 16 * 1024 * 1024

_TRIES: Final = 5

Group = tuple[Kind, str, str]


def compact(
    store: Store,
    run_id: str,
    family: Family,
    *,
    topics: Topics,
    crash: Callable[[str], None] = no_crash,
) -> bool:
    """Sort all that the store has of a run by tensor, a file for each collection; whether it is so
    now. Blocks: a second for a million rows. Reading goes on meanwhile, and so may writing.

    Raises:
        StoreUnavailable, DamagedStore, MissingExtra: as `flush` does.
    """
    manifest = _manifest(store, run_id, family)
    if manifest is None or manifest.compacted:
        return manifest is not None
    for group, files in _groups(manifest).items():
        if len(files) > 1 or files[0].order != "tensor":
            merged = _merged(store, run_id, family, group, files, topics, by_tensor=True)
            if merged is not None:
                _swap(store, run_id, family, files, merged, crash)
    current = _manifest(store, run_id, family)
    if current is None or any(file.order != "tensor" for file in current.files):
        return False
    return _finish(store, run_id, family)


def thin_out(
    store: Store,
    run_id: str,
    family: Family,
    *,
    topics: Topics,
    crash: Callable[[str], None] = no_crash,
) -> int:
    """Merge small files of collections that have many of them, in order of arrival; how many files
    there are fewer. Blocks. Raises as `compact` does."""
    manifest = _manifest(store, run_id, family)
    fewer = 0
    for group, files in ({} if manifest is None else _groups(manifest)).items():
        small = [
            file for file in files if file.order == "arrival" and file.size_bytes < SMALL_BYTES
        ]
        if len(small) >= MANY:
            merged = _merged(store, run_id, family, group, small, topics, by_tensor=False)
            if merged is not None:
                _swap(store, run_id, family, small, merged, crash)
                fewer += len(small) - 1
    return fewer


def wants_thinning(manifest: Manifest) -> bool:
    """Whether `thin_out` would find something."""
    return any(
        sum(one.order == "arrival" and one.size_bytes < SMALL_BYTES for one in files) >= MANY
        for files in _groups(manifest).values()
    )


def _groups(manifest: Manifest) -> Mapping[Group, Sequence[StoredFile]]:
    found: dict[Group, list[StoredFile]] = {}
    for file in manifest.files:
        found.setdefault((file.kind, file.incarnation, file.collection), []).append(file)
    return found


def _manifest(store: Store, run_id: str, family: Family) -> Manifest | None:
    path = manifest_path(run_id, family)
    content = store.storage.read(path)
    return None if content is None else Manifest.decode(content.data, path)


def _merged(
    store: Store,
    run_id: str,
    family: Family,
    group: Group,
    files: Sequence[StoredFile],
    topics: Topics,
    *,
    by_tensor: bool,
) -> StoredFile | None:
    """The one file of all rows; None: somebody else has merged them meanwhile."""
    kind, incarnation, collection = group
    folder = files[0].path.rpartition("/")[0]
    name = f"{family}-{new_id()}{SUFFIX}"
    made = store.storage.scratch() / f"{os.getpid()}-{name}"
    rows = sum(file.rows for file in files)
    spill = store.storage.scratch() / f"spill-{os.getpid()}"
    try:
        paths = [store.storage.local(file.path) for file in files]
        if kind == "events":
            kept = newest_events(_events(store, files), topics)
            rows = len(kept)
            store.duck.write([event_table(kept)], made, order=BY_TENSOR[kind], spill=spill)
        else:
            order = BY_TENSOR[kind] if by_tensor else ARRIVAL
            store.duck.merge(paths, made, order=order, spill=spill)
        size_bytes = made.stat().st_size
        store.storage.move_in(f"{folder}/{name}", made)
    except FileNotFoundError as error:
        now = _manifest(store, run_id, family)
        if now is None or not {file.path for file in files} <= {file.path for file in now.files}:
            return None
        raise DamagedStore(f"a file of run {run_id} is missing: {error}") from error
    except OSError as error:
        raise StoreUnavailable(f"files of the store could not be merged: {error}") from error
    finally:
        made.unlink(missing_ok=True)
    return StoredFile(
        path=f"{folder}/{name}",
        kind=kind,
        incarnation=incarnation,
        collection=collection,
        columns=tuple(dict.fromkeys(column for file in files for column in file.columns)),
        rows=rows,
        size_bytes=size_bytes,
        order="tensor" if by_tensor else "arrival",
    )


def _swap(
    store: Store,
    run_id: str,
    family: Family,
    old: Sequence[StoredFile],
    merged: StoredFile,
    crash: Callable[[str], None],
) -> None:
    """Name the merged file in place of the others, then delete these."""
    crash("merged")
    gone = {file.path for file in old}

    def change(manifest: Manifest) -> Manifest | None:
        if not gone <= {file.path for file in manifest.files}:
            return None
        kept = tuple(file for file in manifest.files if file.path not in gone)
        return manifest.model_copy(update={"files": (*kept, merged)})

    if _change(store, run_id, family, change) is None:
        # Somebody else has merged them meanwhile, or the answer to this very change was lost.
        now = _manifest(store, run_id, family)
        if now is None or merged.path not in {file.path for file in now.files}:
            store.storage.delete([merged.path])
            return
    crash("merge_named")
    store.storage.delete(gone)


def _finish(store: Store, run_id: str, family: Family) -> bool:
    """Say that all is sorted, and delete what a crash has left: files that nothing names."""
    # Listed before: whoever has written one of them and not named it yet has read an older manifest
    # than the one made here, so it is overtaken, and writes its rows anew.
    found = store.storage.files(run_folder(run_id))

    def change(manifest: Manifest) -> Manifest | None:
        if any(file.order != "tensor" for file in manifest.files):
            return None
        return manifest.model_copy(update={"compacted": True})

    done = _change(store, run_id, family, change)
    if done is None:
        return False
    named = {file.path for file in done.files}
    store.storage.delete(
        path
        for path in found
        if path not in named
        and path.endswith(SUFFIX)
        and path.rpartition("/")[2].startswith(f"{family}-")
    )
    return True


def _change(
    store: Store,
    run_id: str,
    family: Family,
    change: Callable[[Manifest], Manifest | None],
) -> Manifest | None:
    """The manifest as it was written; None: it is not there, or `change` did not want it."""
    path = manifest_path(run_id, family)
    for _ in range(_TRIES):
        content = store.storage.read(path)
        if content is None:
            return None
        manifest = Manifest.decode(content.data, path)
        changed = change(manifest)
        if changed is None:
            return None
        changed = changed.model_copy(update={"generation": manifest.generation + 1})
        try:
            store.storage.replace(path, changed.encode(), expected=content.version)
            return changed
        except Overtaken:
            continue
    return None


def _events(store: Store, files: Sequence[StoredFile]) -> list[EventRow]:
    from tocsin.store.parquet.duck import reading

    paths = [store.storage.local(file.path) for file in files]
    rows = store.duck.rows(
        "SELECT topic, bus_offset, append_ms, key, type, version, rank, value "
        f"FROM {reading(paths)} ORDER BY topic, append_ms, bus_offset"
    )
    return [EventRow(*row) for row in rows]  # type: ignore[arg-type]


def newest_events(rows: Sequence[EventRow], topics: Topics) -> list[EventRow]:
    """Without what a later row of the same key replaces, as the bus itself would: of the views of
    an incarnation and of the states of a delivery the last one stays. Pure; rows are in order."""
    last: dict[tuple[str, str], EventRow] = {}
    kept: list[EventRow] = []
    for row in rows:
        key = _replaces(row, topics)
        if key is None:
            kept.append(row)
        else:
            last[row.topic, key] = row
    return sorted([*kept, *last.values()], key=lambda row: (row.topic, row.append_ms, row.offset))


def _replaces(row: EventRow, topics: Topics) -> str | None:
    if row.topic == topics.actions:
        return row.key
    if row.topic == topics.runs and row.type == RunView.event_type and row.value is not None:
        try:
            view = EVENT_TYPES.decode(row.value.encode()).data
        except RecordError:
            return None
        return view.incarnation if isinstance(view, RunView) else None
    return None
