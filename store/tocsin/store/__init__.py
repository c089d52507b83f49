"""The store: every number of every run, past and present, as Parquet files and as a Python API.

`open_run("…")` reads one run from Parquet files, from a live bus, or from both; `open_store()`
lists the runs of a store. Importing this package is cheap: what it offers is imported when it is
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tocsin.store.catalog import Store
    from tocsin.store.errors import NotCaptured, UnknownRun
    from tocsin.store.opening import open_run, open_store
    from tocsin.store.run import Run
    from tocsin.store.tensor import Tensor
    from tocsin.store.values import Collection, Matrix, Series, StoredRun, System

__all__ = [
    "Collection",
    "Matrix",
    "NotCaptured",
    "Run",
    "Series",
    "Store",
    "StoredRun",
    "System",
    "Tensor",
    "UnknownRun",
    "open_run",
    "open_store",
]

_MODULES = {
    "Collection": "values",
    "Matrix": "values",
    "NotCaptured": "errors",
    "Run": "run",
    "Series": "values",
    "Store": "catalog",
    "StoredRun": "values",
    "System": "values",
    "Tensor": "tensor",
    "UnknownRun": "errors",
    "open_run": "opening",
    "open_store": "opening",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
