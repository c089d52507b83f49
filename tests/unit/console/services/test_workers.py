"""What runs beside the workers of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tocsin.console.context import CommandContext, read_context
from tocsin.console.services import workers
from tocsin.runtime.shutdown import Part
from tocsin.runtime.watchdog import Watchdog
from tocsin.runtime.worker import Worker


@pytest.mark.parametrize("run", [workers.run_rules, workers.run_actions, workers.run_archive])
async def test_each_worker_has_a_watchdog_that_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[CommandContext], Awaitable[int]]
) -> None:
    found: list[Part] = []

    async def note(parts: Sequence[Part], stopping: asyncio.Event) -> int:
        found.extend(parts)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "serve", note)
    (tmp_path / "tocsin.yaml").write_text("version: 1\n")
    assert await run(read_context(tmp_path / "tocsin.yaml", None)) == 0
    watched = [part for part in found if isinstance(part, Worker)]
    watchdogs = [part for part in found if isinstance(part, Watchdog)]
    assert watched
    for number, worker in enumerate(watched):
        worker.alive_ms = number
    assert [watchdog._alive_ms() for watchdog in watchdogs] == list(range(len(watched)))
