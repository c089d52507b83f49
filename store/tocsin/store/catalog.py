"""A store as a whole: which runs it has, which files, and what they need to be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tocsin.schemas.errors import require_extra
from tocsin.store.errors import DamagedStore
from tocsin.store.manifest import (
    FAMILIES,
    Family,
    Kind,
    Manifest,
    StoredFile,
    manifest_path,
)
from tocsin.store.storage.port import Storage
from tocsin.store.values import StoredRun

if TYPE_CHECKING:
    from tocsin.store.parquet.duck import Duck

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES: Final = 5

READERS: Final = 16
"""Manifests that are read at once: a bucket answers each after some milliseconds."""


@dataclass(frozen=True, slots=True)
class FileOfRun:
    """A Parquet file of the store, and where it is on this machine."""

    run_id: str
    file: StoredFile
    path: Path


class Store:
    """The store at a folder or in a bucket. `open_store` makes one. Its methods block.

    All raise StoreUnavailable: the disk or the bucket does not answer; DamagedStore: a file is not
    what it should be.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage: Final = storage
        self._duck: Duck | None = None
        self._known: dict[str, tuple[str, StoredRun | None]] = {}

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    @property
    def url(self) -> str:
        """Where it is."""
        return self.storage.url

    def runs(self) -> Sequence[StoredRun]:
        """All runs, the last started last. No telemetry is read, only the manifest of each."""
        folders = [name for name in self.storage.folders() if name.startswith("run=")]
        if not folders:
            return []
        with ThreadPoolExecutor(READERS) as pool:
            found = [run for run in pool.map(self._summary, folders) if run is not None]
        return sorted(found, key=lambda run: run.started_ms)

    def manifests(self, run_id: str) -> Mapping[Family, Manifest]:
        """What there is of a run, as of now; empty if the store does not know it."""
        found: dict[Family, Manifest] = {}
        for family in FAMILIES:
            path = manifest_path(run_id, family)
            content = self.storage.read(path)
            if content is not None:
                manifest = Manifest.decode(content.data, path)
                if not manifest.deleted:
                    found[family] = manifest
        return found

    def files(self, run_id: str | None = None, kind: Kind | None = None) -> Iterator[FileOfRun]:
        """The Parquet files that count, of one run or of all; fetched to this machine if need be.

        What else is in the folders was left by a crash or is replaced: reading it would count rows
        twice.

        Raises:
            FileNotFoundError: a file was merged into another one meanwhile; see `despite_merges`.
        """
        runs = [run_id] if run_id is not None else [run.run_id for run in self.runs()]
        for one in runs:
            yield from self.files_of(self.manifests(one).values(), kind)

    def files_of(
        self, manifests: Iterable[Manifest], kind: Kind | None = None
    ) -> Iterator[FileOfRun]:
        """The files that these manifests name. Raises as `files` does."""
        for manifest in manifests:
            for file in manifest.files:
                if kind in (None, file.kind):
                    yield FileOfRun(manifest.run_id, file, self.storage.local(file.path))

    @property
    def duck(self) -> Duck:
        """What reads the files; made when it is first needed.

        Raises:
            MissingExtra: the extra `store` is not installed.
        """
        if self._duck is None:
            require_extra("store", "reading stored runs", "duckdb")
            from tocsin.store.parquet.duck import Duck

            self._duck = Duck()
        return self._duck

    def _summary(self, folder: str) -> StoredRun | None:
        path = f"{folder}/telemetry.json"
        content = self.storage.read(path)
        if content is None:
            return None
        known = self._known.get(folder)
        if known is None or known[0] != content.version:
            try:
                manifest = Manifest.decode(content.data, path)
            except DamagedStore as error:
                # The others can be read.
                logger.warning("%s", error, extra={"action": "list"})
                return None
            known = content.version, None if manifest.deleted else stored_run(manifest)
            self._known[folder] = known
        return known[1]


def despite_merges(
    work: Callable[[], T], reload: Callable[[], None] | None = None, *, of: str
) -> T:
    """What `work` returns. If a file is gone, it was merged into another one: then `reload` reads
    the manifests anew, and `work` is done again.

    Raises:
        DamagedStore: files of `of` are missing still.
    """
    for _ in range(_TRIES):
        try:
            return work()
        except FileNotFoundError:
            if reload is not None:
                reload()
    raise DamagedStore(f"files of {of} are missing that its manifest names")


def stored_run(manifest: Manifest) -> StoredRun:
    """What a list of runs shows of one."""
    trainings = list(manifest.trainings.values())
    newest = trainings[-1] if trainings else None
    return StoredRun(
        run_id=manifest.run_id,
        incarnations=tuple(manifest.trainings),
        started_ms=min((one.started_ms for one in trainings if one.started_ms), default=0),
        ended_ms=None if newest is None else newest.ended_ms,
        state="" if newest is None else newest.state,
        outcome="" if newest is None else newest.outcome,
        labels={} if newest is None else dict(newest.labels),
        last_step=None if newest is None else newest.last_step,
        size_bytes=manifest.size_bytes,
        updated_ms=manifest.updated_ms,
    )
