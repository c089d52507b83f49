"""The section `store` of the configuration, checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.configuration.store import KeepConfig
from tocsin.schemas.configuration.values import BUCKETS, format_size

SMALLEST: Final = 1_000_000


def store_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the section beyond its shape. Pure."""
    store = config.store
    if store.url is None or not store.url.startswith(BUCKETS):
        for key in ("endpoint", "region"):
            if getattr(store, key) is not None:
                message = f"{key!r} is for a bucket"
                yield Problem(("store", key), message, hint="url: s3://ml-runs/tocsin", at="key")
    if store.keep is not None:
        if store.keep == KeepConfig():
            message = "expected at least one of 'runs', 'bytes' and 'age'"
            yield Problem(("store", "keep"), message, "missing_key", "keep: {bytes: 50GB}")
        size = store.keep.bytes
        if size is not None and size < SMALLEST:
            message = f"expected at least {format_size(SMALLEST)}: less is not one run"
            yield Problem(("store", "keep", "bytes"), message, hint="50GB")
