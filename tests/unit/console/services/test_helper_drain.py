"""In which order the helper ends its parts."""

from __future__ import annotations

import asyncio
import types
from pathlib import Path
from typing import cast

import pytest

from tocsin.console.context import read_context
from tocsin.console.services.helper import Helper, Orders
from tocsin.emitter.node.publisher import NodeReport
from tocsin.runtime.worker import Worker


class SlowReport:
    """A node report that has one more frame to publish when it is cancelled."""

    def __init__(self, log: list[str]) -> None:
        self.node = types.SimpleNamespace(root_pid=None)
        self._log = log

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self._log.append("last frame")


async def test_the_last_samples_are_published_before_the_rules_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    log: list[str] = []
    caught_up = Worker.caught_up

    async def noted(self: Worker, timeout_s: float) -> bool:
        log.append("drain")
        return await caught_up(self, timeout_s)

    monkeypatch.setattr(Worker, "caught_up", noted)
    context = read_context(None, f"embedded:{tmp_path}/bus.db", environ={})
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        orders = Orders()
        helper = Helper(
            bus, context, run_id="r1", since_ms=0, notify=(), allow_command=(), stop=True,
            orders=orders, report=cast(NodeReport, SlowReport(log)),
        )  # fmt: skip
        running = asyncio.create_task(helper.run(asyncio.Event()))
        await asyncio.sleep(0)
        orders.drain_s = 10.0
        orders.changed.set()
        async with asyncio.timeout(30):
            assert await running == 0
    assert log == ["last frame", "drain", "drain"]
