"""A run has one helper at a time: the next one waits for it, and says why."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tocsin.bus.port import Bus
from tocsin.console.services import helper


@pytest.mark.parametrize(("tries", "warned"), [(3, 0), (40, 1)])
async def test_a_second_launch_of_a_run_is_named_once(
    tries: int, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper, "OTHERS_S", 0.02)
    monkeypatch.setattr(helper, "_LEASE_POLL_S", 0.001)
    lease = object()
    answers: list[Any] = [*[None] * tries, lease]

    class Busy:
        async def lease(self, name: str) -> Any:
            return answers.pop(0)

    assert await helper._lease(cast(Bus, Busy()), "gpt-1", lambda: False) is lease
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert all("another `tocsin run --run-id gpt-1`" in one.message for one in caplog.records)
