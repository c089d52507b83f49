"""From a rule's warning to rows of each step: a training, the rules and the bus in one process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from support.trainings.captured import captured, said
from support.trainings.watched import records
from support.waiting import wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing
from tocsin.emitter.process.process_group import process_lives
from tocsin.emitter.stop import datagrams
from tocsin.emitter.stop.detail_requests import DetailRequests
from tocsin.emitter.stop.listener import Listener
from tocsin.emitter.stop.processes import Members
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sections import DefaultsConfig, RuleEntry
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.stops.commands import DetailRequest
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.service import build_rules_service

EVERY = 25
CAPTURE = json.dumps({"collections": {name: {"every": EVERY} for name in ("gradients", "weights")}})
RULE = "learning_rate_anomaly"


class _NoHandler:
    """No stop is asked for here."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


def warnings_of(folder: Path) -> list[Outgoing]:
    """What a rule worker writes for what is on the bus by now."""
    rules = build_rules_service(
        Topics(),
        Config(rules=(RuleEntry(name=RULE, use=RULE),), defaults=DefaultsConfig(rules="none")),
    )
    rules.attached(Attachment(lambda: None))
    found = records(folder)
    assert rules.apply(found, Tick(found[-1].append_ms)) == []
    return list(rules.outputs())


def test_a_warning_brings_rows_of_each_step_for_fifty_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(tmp_path / datagrams.LAUNCHER_SOCKET))
    launcher = datagrams.Endpoint(tmp_path / datagrams.LAUNCHER_SOCKET)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.ones(3, 4)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with captured(tmp_path, TOCSIN_CAPTURE=CAPTURE) as hooks:
        train(40)
        optimizer.param_groups[0]["lr"] = 3e-4
        train(12)
        assert hooks.capture is not None
        training = hooks.capture.training
        assert training.sender.flush(20)
        issue, look = warnings_of(tmp_path)
        members = Members(training.origin.incarnation, process_lives)
        for message in launcher.drain():
            members.receive(message)
        handler: object = _NoHandler()
        detail_requests = DetailRequests("r1", members)
        listener = Listener(Topics(), "r1", handler, detail_requests=detail_requests)  # type: ignore[arg-type]  # none

        async def listen() -> None:
            async with EmbeddedBus(tmp_path / "bus.db", create=False) as bus:
                producer = await bus.producer()
                task = asyncio.create_task(listener.listen(bus))
                await asyncio.to_thread(listener.ready.wait, 10)
                await producer.publish([issue, look])
                await asyncio.to_thread(wait_until, lambda: detail_requests.counts["look"])
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await producer.close()

        asyncio.run(listen())
        wait_until(lambda: training.schedule.asked)
        began = training.next_step
        train(150)
    launcher.close()
    assert look.value is not None
    event = decode(read_meta(look.headers), look.value)
    assert isinstance(event, Event)
    assert isinstance(event.data, DetailRequest)
    assert (event.data.rule, event.data.steps) == (RULE, 50)
    found = said(tmp_path)
    for collection in ("gradients", "weights"):
        steps = [f.step for f in found.frames if f.collection == collection]
        closer = [step for step in steps if step % EVERY]
        # The first few steps may be quick ones, at which nothing is asked.
        assert began <= closer[0] <= began + 32
        first = closer[0] - (closer[0] - 1 in steps[steps.index(closer[0]) - 1 :])
        assert [step for step in steps if step >= first] == [
            step for step in range(first, began + 150) if step < first + 50 or step % EVERY == 0
        ]
