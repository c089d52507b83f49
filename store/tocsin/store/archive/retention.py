"""What is deleted when a store has too much: the oldest runs that are over, never a live one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.store_paths import TENSORS
from tocsin.store.catalog import READERS, Store, stored_run
from tocsin.store.errors import DamagedStore, StoreUnavailable
from tocsin.store.manifest import FAMILIES, SUFFIX, WHOLE_RUN, Manifest, quoted, run_folder
from tocsin.store.storage.port import Overtaken
from tocsin.store.values import StoredRun

logger = logging.getLogger(__name__)

_DAY_MS: Final = 24 * 3_600_000

FORGOTTEN_MS: Final = 2 * _DAY_MS
"""A run whose end nobody has reported is over when nothing was written of it for so long: the bus
keeps telemetry for a day."""

_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Keep:
    """How much a store may hold; None: any number.

    Attributes:
        runs: so many runs.
        size_bytes: so many bytes of files; the run that ended last stays in any case.
        age_ms: runs that ended so long ago at most.
    """

    runs: int | None = None
    size_bytes: int | None = None
    age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ExpiredRun:
    """A run that is to be deleted, and why."""

    run_id: str
    reason: str


def is_over(run: StoredRun, now_ms: int) -> bool:
    """Whether nothing more is to come of a run."""
    if run.state in ("ended", "lost"):
        return True
    if run.state == "running":
        return run.updated_ms < now_ms - FORGOTTEN_MS
    return run.ended_ms is not None or run.updated_ms < now_ms - FORGOTTEN_MS


def expired_runs(runs: Sequence[StoredRun], keep: Keep, now_ms: int) -> Sequence[ExpiredRun]:
    """Which runs go, the first ended first. Pure."""
    expired: list[ExpiredRun] = []
    count, size_bytes = len(runs), sum(run.size_bytes for run in runs)
    over = sorted((run for run in runs if is_over(run, now_ms)), key=_ended_ms)
    for run in over:
        if keep.age_ms is not None and _ended_ms(run) < now_ms - keep.age_ms:
            reason = f"it ended more than {keep.age_ms / _DAY_MS:g} days ago"
        elif keep.runs is not None and count > keep.runs:
            reason = f"the store holds more than {keep.runs:,} runs"
        elif keep.size_bytes is not None and size_bytes > keep.size_bytes and run is not over[-1]:
            reason = f"the store holds more than {keep.size_bytes / 1e9:g} GB"
        else:
            break
        expired.append(ExpiredRun(run.run_id, reason))
        count -= 1
        size_bytes -= run.size_bytes
    return expired


def _ended_ms(run: StoredRun) -> int:
    return run.ended_ms or run.updated_ms


def make_room(store: Store, keep: Keep, now_ms: int) -> Sequence[ExpiredRun]:
    """Delete the expired runs, with a line in the log for each, and what a crash has left of
    others; what was deleted. Blocks.

    Raises:
        StoreUnavailable, DamagedStore: as the store does.
    """
    gone = []
    for one in expired_runs(store.runs(), keep, now_ms):
        if delete_run(store, one.run_id, now_ms):
            logger.info(
                "deleted run %s from the store: %s",
                one.run_id,
                one.reason,
                extra={"action": "keep", "run_id": one.run_id},
            )
            gone.append(one)
    # Last: one that cannot be finished keeps nobody from the others.
    for folder in deleted_folders(store):
        finish_deletion(store, folder)
    return gone


def delete_run(store: Store, run_id: str, now_ms: int) -> bool:
    """Delete a run that is over, with what was saved of its incarnations so far. A crash in between
    leaves nothing that a reader would see. False: it is not over any more, and nothing was deleted.
    Blocks.
    """
    return _delete(
        store, run_folder(run_id), lambda manifest: is_over(stored_run(manifest), now_ms)
    )


def finish_deletion(store: Store, folder: str) -> None:
    """Delete a run whose deletion was begun, unless it has been started again since. Blocks."""
    _delete(store, folder, lambda manifest: manifest.deleted)


def _delete(store: Store, folder: str, is_expired: Callable[[Manifest], bool]) -> bool:
    """Mark the manifests, delete the files, then the manifests. The run may be started again at any
    moment; what is written of it from then on stays.
    """
    storage = store.storage
    # Listed before: whoever has written one of these and not named it yet has read an older
    # manifest than the one made here, so it is overtaken, and writes its rows anew.
    found = storage.files(folder)
    marked: list[tuple[str, str]] = []
    gone: frozenset[str] = frozenset()
    kept: set[str] = set()
    for family in FAMILIES:
        path = f"{folder}/{family}.json"
        for _ in range(_TRIES):
            content = storage.read(path)
            # Telemetry decides; an answer of a person to an issue does not make a run live again.
            if family == "telemetry":
                if content is None:
                    return False
                manifest = Manifest.decode(content.data, path)
                if not is_expired(manifest):
                    return False
                # System samples may be all that there is of an incarnation.
                of_files = (file.incarnation for file in manifest.files)
                gone = frozenset((*manifest.trainings, *of_files, WHOLE_RUN))
            elif content is None:
                # Nobody is overtaken by a manifest that is not there.
                first = f"/{family}-"
                kept.update(file for file in found if first in file)
                break
            else:
                manifest = _decoded(content.data, path)
            mark = _without(manifest, gone)
            try:
                version = storage.replace(path, mark.encode(), expected=content.version)
            except Overtaken:
                continue
            kept.update(file.path for file in mark.files)
            if mark.deleted:
                marked.append((path, version))
            break
        else:
            raise StoreUnavailable(f"{path} was written by others {_TRIES} times in a row")
    tensors = tuple(f"{folder}/{TENSORS}/incarnation={quoted(one)}/" for one in gone)
    storage.delete(
        path
        for path in found
        if (path.endswith(SUFFIX) and path not in kept) or path.startswith(tensors)
    )
    # Telemetry last: by its mark somebody else finds what is left after a crash.
    for path, version in reversed(marked):
        storage.discard(path, expected=version)
    return True


def _decoded(data: bytes, path: str) -> Manifest:
    """A manifest; one without files for what is none: it is to be deleted either way."""
    try:
        return Manifest.decode(data, path)
    except DamagedStore as error:
        logger.warning("%s", error, extra={"action": "keep"})
        return Manifest(run_id="")


def _without(manifest: Manifest, gone: frozenset[str]) -> Manifest:
    """Without files of these incarnations."""
    files = [file for file in manifest.files if file.incarnation not in gone]
    return manifest.model_copy(
        update={
            "deleted": not files,
            "files": tuple(files),
            "generation": manifest.generation + 1,
        }
    )


def deleted_folders(store: Store) -> Sequence[str]:
    """The folders of runs whose deletion was begun. Blocks."""

    def is_deleted(folder: str) -> bool:
        content = store.storage.read(f"{folder}/telemetry.json")
        with contextlib.suppress(DamagedStore):
            return content is not None and Manifest.decode(content.data, folder).deleted
        return False

    folders = store.storage.folders()
    with ThreadPoolExecutor(READERS) as pool:
        return [
            one
            for one, deleted in zip(folders, pool.map(is_deleted, folders), strict=True)
            if deleted
        ]
