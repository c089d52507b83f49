"""The store that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tocsin.schemas.configuration.store import StoreConfig
from tocsin.schemas.configuration.values import BUCKETS
from tocsin.store.archive.retention import Keep
from tocsin.store.catalog import Store
from tocsin.store.errors import UnusableStore
from tocsin.store.opening import default_store
from tocsin.store.storage.opening import open_storage

DEFAULT_KEEP: Final = Keep(size_bytes=10 * 10**9)
"""Of the store beside an embedded bus, which nobody has asked for."""


def configured_store(config: StoreConfig, *, folder: Path, bus_file: Path | None) -> Store:
    """The store of the section.

    Args:
        folder: where a relative path starts.
        bus_file: of an embedded bus; its store is beside it unless the section names another.

    Raises:
        UnusableStore: no place of it is configured. MissingExtra: a bucket without the extra
        `store`.
    """
    if config.url is None:
        if bus_file is None:
            raise UnusableStore(
                "a Kafka bus has no store by default; "
                "try --store s3://BUCKET/PREFIX, or `store: {url: …}` in the configuration"
            )
        return Store(open_storage(default_store(bus_file)))
    options = {
        key: value
        for key, value in (("endpoint", config.endpoint), ("region", config.region))
        if value is not None
    }
    if config.url.startswith(BUCKETS):
        return Store(open_storage(config.url, options))
    return Store(open_storage(folder / Path(config.url).expanduser()))


def keep_of(config: StoreConfig) -> Keep | None:
    """How much of it is kept; None: all."""
    if config.keep is not None:
        age = config.keep.age
        return Keep(
            runs=config.keep.runs,
            size_bytes=config.keep.bytes,
            age_ms=None if age is None else round(age.total_seconds() * 1000),
        )
    return DEFAULT_KEEP if config.url is None else None
