"""What the bus has of some runs and the store has not yet, as files for one question.

They are written into a folder that is thrown away, by the archive itself: it gets what the store
covers, so that no row is in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tocsin.bus.port import Bus
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.topics import Topics
from tocsin.store.archive.once import archive_run
from tocsin.store.catalog import FileOfRun, Store
from tocsin.store.manifest import Family, Manifest, manifest_path
from tocsin.store.storage.local import LocalStorage

MAX_RUNS: Final = 20
"""Of so many runs the bus is read; of more, the last started."""

_TELEMETRY: Final[Family] = "telemetry"


Known = Mapping[str, Mapping[Family, Manifest]]
"""What the store has, by run, as it was read once: the files that are read must be of the same
manifests that hold what is not in files."""


def behind(known: Known, views: Sequence[RunView], topics: Topics) -> Sequence[str]:
    """The runs of which the rules have read telemetry that is not in the store, the last started
    first. Pure."""
    found = []
    for view in sorted(views, key=lambda one: one.started_ms, reverse=True):
        manifest = known.get(view.run_id, {}).get(_TELEMETRY)
        covered = None if manifest is None else manifest.covered.get(topics.telemetry)
        if covered is None or covered.next_offset < view.next_offset:
            found.append(view.run_id)
    return found


async def live_files(
    bus: Bus,
    known: Known,
    runs: Sequence[str],
    folder: Path,
    *,
    topics: Topics,
    now_ms: Callable[[], int],
) -> Sequence[FileOfRun]:
    """The files, below `folder`.

    Raises:
        BusUnavailable, UnknownTopic: the bus does not answer, or was never set up.
        StoreUnavailable, DamagedStore, MissingExtra: as the archive does.
    """
    made = Store(LocalStorage(folder))
    for run_id in runs:
        manifest = known.get(run_id, {}).get(_TELEMETRY)
        if manifest is not None:
            covered = Manifest(
                run_id=run_id,
                covered=manifest.covered,
                senders=manifest.senders,
                trainings=manifest.trainings,
            )
            path = manifest_path(run_id, _TELEMETRY)
            made.storage.replace(path, covered.encode(), expected=None)
        await archive_run(bus, made, run_id, topics=topics, now_ms=now_ms)
    return [one for run_id in runs for one in made.files(run_id) if one.file.kind != "events"]
