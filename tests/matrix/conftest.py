"""What came before is no business of these tests: other optimizers may still be alive."""

from __future__ import annotations

import gc
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
    """Give them back at the end."""
    yield
    gc.unfreeze()
