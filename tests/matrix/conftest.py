"""What came before is no business of these tests: other optimizers may still be alive."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_older() -> Iterator[None]:
    """Hide all objects that are there already from the garbage collector, and so from capture.

    It saves the time to look at them, too.
    """
    gc.freeze()
    yield
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def old_garbage() -> Iterator[None]:
    """Let go of what is garbage at the end. A worker's heap stays hidden, as before: each training
    that is captured goes through all of it."""
    yield
    gc.unfreeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.collect()
        gc.freeze()
