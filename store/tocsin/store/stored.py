"""One run as the store has it: its numbers by incarnation, and the fold of its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.records.wire import Headers, Meta, meta_of, read_event
from tocsin.schemas.topics import Topics
from tocsin.store.catalog import Store, despite_merges
from tocsin.store.known_records import Mark
from tocsin.store.manifest import Family, Manifest, StoredFile
from tocsin.store.reading.source import Source


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of the bus as it was archived."""

    offset: int
    append_ms: int
    key: bytes
    value: bytes | None
    headers: Headers


class StoredFiles:
    """The files of one run, as of the last `reload`."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.run_id: Final = run_id
        self.store: Final = store
        self._manifests: Mapping[Family, Manifest] = {}
        self.reload()

    def reload(self) -> None:
        """Read what there is now."""
        self._manifests = self.store.manifests(self.run_id)

    def __bool__(self) -> bool:
        return bool(self._manifests)

    @property
    def covered(self) -> Mapping[str, Mark]:
        """How far the topics are in the files."""
        return {
            topic: Mark(one.next_offset, one.append_ms)
            for manifest in self._manifests.values()
            for topic, one in manifest.covered.items()
        }

    @property
    def senders(self) -> Mapping[str, int]:
        """The last record of each sender of telemetry that is in the files."""
        telemetry = self._manifests.get("telemetry")
        return {} if telemetry is None else telemetry.senders

    @property
    def incarnations(self) -> Sequence[str]:
        """The oldest first."""
        telemetry = self._manifests.get("telemetry")
        return () if telemetry is None else tuple(telemetry.trainings)

    def last_step(self, incarnation: str) -> int:
        """The last step of an incarnation; -1: none."""
        telemetry = self._manifests.get("telemetry")
        training = None if telemetry is None else telemetry.trainings.get(incarnation)
        return -1 if training is None or training.last_step is None else training.last_step

    def source(self, incarnation: str) -> Source | None:
        """The numbers of an incarnation; None: there are none.

        Raises:
            MissingExtra: the extra `store` is not installed.
        """
        files = [
            file
            for file in self._files()
            if file.incarnation == incarnation and file.kind != "events"
        ]
        if not files:
            return None
        duck = self.store.duck
        from tocsin.store.parquet.source import ParquetSource

        return ParquetSource(files, duck, self.store.storage.local)

    def fold(self, view: RunsView, topics: Topics) -> None:
        """Take the runs, issues, deliveries and commands into a view; of telemetry what is newer
        than the view of the rules."""

        def records(topic: str, start: int = 0) -> Sequence[StoredRecord]:
            return despite_merges(
                lambda: self._records(topic, start), self.reload, of=f"run {self.run_id}"
            )

        for topic in (topics.runs, topics.issues, topics.actions, topics.control):
            for record in records(topic):
                view.apply(record)
        seen = view.run(self.run_id)
        for record in records(topics.telemetry, 0 if seen is None else seen.next_offset):
            view.apply(record)

    def events(self, topics: Topics, kind: str | None = None) -> Sequence[Event[Data]]:
        """The events of telemetry, in order; of one type, or all. Raises FileNotFoundError: a file
        was merged into another one meanwhile."""
        found = []
        for record in self._records(topics.telemetry, kind=kind):
            try:
                event = read_event(record)
            except RecordError:
                continue
            if event is not None:
                found.append(event)
        return found

    def telemetry(self, topics: Topics) -> Sequence[StoredRecord]:
        """All telemetry, frames and events, in the order in which it came onto the bus; in memory.

        Frames without numbers, and who has sent a record as which (`boot`, `seq`), are not stored.

        Raises:
            MissingExtra: the extra `store` is not installed. DamagedStore: a file cannot be read.
        """
        return despite_merges(lambda: self._telemetry(topics), self.reload, of=f"run {self.run_id}")

    def _telemetry(self, topics: Topics) -> Sequence[StoredRecord]:
        events = self._records(topics.telemetry)
        sizes: dict[str, int] = {}
        for event in self.events(topics):
            size, incarnation = (
                getattr(event.data, name, None) for name in ("world_size", "incarnation")
            )
            if isinstance(size, int) and isinstance(incarnation, str):
                sizes[incarnation] = max(size, sizes.get(incarnation, 1))
        numbers = [file for file in self._files() if file.kind != "events"]
        found = [*events]
        for incarnation in dict.fromkeys(file.incarnation for file in numbers):
            duck = self.store.duck
            from tocsin.store.parquet.frames import StoredFrames

            origin = partial(
                RecordOrigin,
                run_id=self.run_id,
                incarnation=incarnation,
                world_size=sizes.get(incarnation, 1),
            )
            files = [file for file in numbers if file.incarnation == incarnation]
            frames = StoredFrames(files, duck, self.store.storage.local, origin)
            for (offset, append_ms), frame in frames.read():
                headers = meta_of(frame, rank=frame.origin.rank).headers()
                found.append(
                    StoredRecord(offset, append_ms, self.run_id.encode(), frame.encode(), headers)
                )
        return sorted(found, key=lambda one: (one.append_ms, one.offset))

    def _records(
        self, topic: str, from_offset: int = 0, kind: str | None = None
    ) -> Sequence[StoredRecord]:
        files = [file for file in self._files() if file.kind == "events"]
        if not files:
            return []
        duck = self.store.duck
        from tocsin.store.parquet.duck import reading

        paths = [self.store.storage.local(file.path) for file in files]
        rows = duck.rows(
            f"SELECT bus_offset, append_ms, key, type, version, rank, value FROM {reading(paths)} "
            "WHERE topic = $topic AND bus_offset >= $start AND ($kind IS NULL OR type = $kind) "
            "ORDER BY append_ms, bus_offset",
            {"topic": topic, "start": from_offset, "kind": kind},
        )
        return [_record(row) for row in rows]

    def _files(self) -> Sequence[StoredFile]:
        return [file for manifest in self._manifests.values() for file in manifest.files]


def _record(row: tuple[object, ...]) -> StoredRecord:
    offset, append_ms, key, kind, version, rank, value = row
    assert isinstance(offset, int)
    assert isinstance(append_ms, int)
    assert isinstance(version, int)
    assert isinstance(rank, int)
    return StoredRecord(
        offset,
        append_ms,
        str(key).encode(),
        None if value is None else str(value).encode(),
        Meta(str(kind), version, rank).headers(),
    )
