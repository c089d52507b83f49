"""What the tests of the fast path and of passed steps share."""

from __future__ import annotations

import pytest

from tocsin.emitter.probes import losses


@pytest.fixture(params=["on the host", "on a device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where losses are: on a device their numbers come a step later, as those of a GPU do."""
    found = str(request.param)
    if found == "on a device":
        monkeypatch.setattr(losses, "is_here", lambda tensor: False)
    return found
