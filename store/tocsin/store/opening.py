"""From a name to a run: which store, which bus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tocsin.bus.embedded.location import default_place
from tocsin.bus.port import MissingBus, UnknownTopic
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.topics import Topics
from tocsin.store.catalog import Store
from tocsin.store.errors import UnknownRun
from tocsin.store.reading.live import BusSource, LiveRun
from tocsin.store.run import Run
from tocsin.store.storage.opening import open_storage
from tocsin.store.stored import StoredFiles

FOLDER: Final = "store"
"""The store beside an embedded bus."""


def open_store(store: str | Path | None = None, options: Mapping[str, str] | None = None) -> Store:
    """The store in a folder, or in a bucket. Reads nothing yet.

    Args:
        store: a folder, `s3://BUCKET/PREFIX` (also `gs://`, `az://`), or None: `.tocsin/store` of
            the working folder. Credentials of a bucket come from the environment.
        options: of a bucket, as obstore names them: `endpoint`, `region`.

    Raises:
        UnusableStore: it is neither. MissingExtra: a bucket without the extra `store`.
    """
    return Store(open_storage(store if store is not None else default_store(), options))


def default_store(bus_file: Path | None = None) -> Path:
    """The folder of the store beside an embedded bus; None: that of the working folder."""
    return (bus_file or default_place(Path.cwd()).path).parent / FOLDER


def open_run(
    run_id: str,
    *,
    store: str | Path | Store | None = None,
    bus: BusSource | None = None,
    incarnation: str | None = None,
    topics: Topics | None = None,
) -> Run:
    """One run: what the store has of it, and what the bus has since. Blocks.

    Without `store` and `bus` both are those of the working folder: `.tocsin/store` and
    `.tocsin/bus.db`. If one of them is given, only that one is read.

    Args:
        run_id: as `tocsin status` lists it.
        store: as for `open_store`, or what that returned.
        bus: a URL (`embedded:PATH`, `kafka://HOST:PORT`), the path of an embedded bus, or a
            function that makes a bus.
        incarnation: the training whose numbers are meant; None: the newest.
        topics: of the bus; None: those of the prefix `tocsin`.

    Raises:
        UnknownRun: neither has it.
        UnusableBus, UnknownTopic, BusUnavailable: the bus that was given cannot be read.
        StoreUnavailable, DamagedStore: the store cannot be read.
        MissingExtra: what reads it is not installed.
    """
    topics = topics or Topics()
    both = store is None and bus is None
    view, places = RunsView(run_id), []
    stored = None
    if both or store is not None:
        opened = store if isinstance(store, Store) else open_store(store)
        places.append(opened.url)
        stored = StoredFiles(opened, run_id)
        if stored:
            stored.fold(view, topics)
    live = None
    if both or bus is not None:
        live = LiveRun(
            bus if bus is not None else default_place(Path.cwd()).path,
            run_id,
            topics=topics,
            view=view,
            covered=None if stored is None else stored.covered,
            senders=None if stored is None else stored.senders,
        )
        try:
            live.read()
        except (MissingBus, UnknownTopic):
            if not both:
                raise
        places.append(live.url)
        live = live if live.heard or not both else None
    if not stored and (live is None or not live.heard):
        raise UnknownRun(run_id, places)
    return Run(
        run_id,
        stored=stored,
        live=live,
        view=view,
        topics=topics,
        incarnation=incarnation,
    )
