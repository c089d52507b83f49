"""In which order the helper ends its parts, and what it archives at the end."""

from __future__ import annotations

import asyncio
import types
from pathlib import Path
from typing import cast

import pytest

from support.records.on_bus import send
from tocsin.console.context import read_context
from tocsin.console.services.helper import Helper, Orders
from tocsin.emitter.node.publisher import NodeReport
from tocsin.runtime.worker import Worker
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.store import open_run
from tocsin.stream_rules.testing import RunBuilder


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


async def test_a_training_that_no_helper_has_archived_is_archived_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    context = read_context(None, f"embedded:{tmp_path}/bus.db", environ={})
    first = RunBuilder("r1", incarnation="first")
    first.steps(range(3), loss=1.0)
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        await send(bus, first.records)
        orders = Orders()
        helper = Helper(
            bus, context, run_id="r1", since_ms=unix_ms() + 1, notify=(), allow_command=(),
            stop=True, orders=orders, report=None,
        )  # fmt: skip
        orders.drain_s = 10.0
        orders.changed.set()
        async with asyncio.timeout(30):
            assert await helper.run(asyncio.Event()) == 0
    run = open_run("r1", store=tmp_path / "store", incarnation="first")
    assert run.steps().tolist() == [0, 1, 2]
