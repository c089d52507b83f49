"""Errors of the store, grouped by what the caller does about them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tocsin.schemas.errors import ConfigurationError, TocsinError, UnavailableError

_SHOWN = 12


class StoreError(TocsinError):
    """The store could not do what it was asked."""


class UnknownRun(StoreError):
    """Neither the store nor the bus knows the run."""

    def __init__(self, run_id: str, places: Iterable[str]) -> None:
        searched = " and ".join(places) or "nothing"
        super().__init__(
            f"no run {run_id!r}: looked at {searched}; `tocsin status` and `open_store().runs()` "
            "list the runs that are there"
        )
        self.run_id = run_id


class NotCaptured(StoreError):
    """The run has nothing of that name; the message says what was captured."""

    def __init__(self, what: str, name: str, captured: Iterable[str]) -> None:
        names = list(captured)
        # What has the very name is of another rank or mode.
        near = [] if name in names else difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        listed = ", ".join(names[:_SHOWN]) + more if names else "nothing"
        super().__init__(f"no {what} {name!r} was captured{hint} Captured: {listed}")
        self.name = name


class StoreUnavailable(StoreError, UnavailableError):
    """The store cannot be reached or written now (a disk full, a bucket away); try again later."""


class UnusableStore(StoreError, ConfigurationError):
    """The store cannot be used as it is configured; the message says what to change."""


class DamagedStore(StoreError):
    """A file of the store does not hold what its manifest names."""
