"""The rules behind a real worker on a real bus, which dies at each point of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.records.on_bus import data_of, die, send, work
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.testing import CRASH_POINTS, CrashPoints
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.service import build_rules_service
from tocsin.stream_rules.testing import RunBuilder

TOPICS = Topics()
QUICK = WorkerSettings(checkpoint_s=0.02, poll_records=7)


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[EmbeddedBus]:
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        yield bus


def bad_run() -> RunBuilder:
    run = RunBuilder("gpt-1")
    run.started(role="launcher")
    run.started()
    run.steps(range(40), loss=1.0, gradient_norm=1.0, gradient_nonfinite=0)
    run.steps([40], loss=1.0, gradient_norm=math.nan, gradient_nonfinite=1)
    run.tensors(40, "gradients", ["a", "b"], nans={"b": 1})
    run.steps(range(41, 50), loss=math.nan, gradient_norm=math.nan, gradient_nonfinite=2)
    run.ended(outcome="stopped")
    run.ended(role="launcher", outcome="stopped")
    return run


def worker_of(bus: EmbeddedBus, crash: CrashPoints) -> Worker:
    return Worker(
        bus,
        build_rules_service(TOPICS),
        topics=TOPICS,
        group="tocsin-rules-gpt-1",
        only_runs={"gpt-1"},
        settings=QUICK,
        crash=crash,
    )


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_a_worker_that_dies_repeats_issues_and_invents_none(
    bus: EmbeddedBus, point: str
) -> None:
    await send(bus, bad_run().records)
    died = 0
    for pass_number in (1, 2, 3, 2, 1):
        died += not await work(worker_of(bus, CrashPoints(f"{point}:{pass_number}", die=die)))
    assert died > 0
    assert await work(worker_of(bus, CrashPoints(None)))
    issues = await data_of(bus, TOPICS.issues, issue_partition("gpt-1"))
    firing = [one for one in issues if isinstance(one, IssueFiring)]
    assert len({one.issue_id for one in firing}) == 1
    assert {(one.rule, one.first_step, one.subject.name) for one in firing} == {
        ("nonfinite", 40, "b")
    }
    views = await data_of(bus, TOPICS.runs, telemetry_partition("gpt-1"))
    last = views[-1]
    assert isinstance(last, RunView)
    assert (last.state, last.outcome, last.issues, last.last_step) == ("ended", "stopped", 1, 49)
