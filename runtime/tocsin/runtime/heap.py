"""How often Python looks for cycles in the memory of a worker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_THRESHOLDS: Final = (10_000, 10, 10)
"""Python's own are 700, 10, 10: of a worker with 10,000 deliveries that wait, a quarter of the
processor time went into collections that found nothing (`benchmarks/delivery.py`). Cycles that are
garbage, such as those of closed connections, are found 14 times as late."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within: what is there now is never looked through, and what comes not as often.

    For the process of a worker, around its work.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
