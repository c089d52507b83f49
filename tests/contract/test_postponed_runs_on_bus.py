"""A run that is postponed, on a bus of either kind: workers die, the log loses its beginning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Final

import pytest

from support.buses import World
from support.records.on_bus import data_of, die, read_all, send, work
from tocsin.bus.port import Bus, Partition, Record
from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.collections import Tier
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules import overload_control, service
from tocsin.stream_rules.engine.configured_rules import rule_specs
from tocsin.stream_rules.engine.overload_decision import Decision, Fairness, RunKey
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import RunBuilder

POINTS: Final = (
    "polled",
    "applied",
    "outputs_acknowledged",
    "snapshots_acknowledged",
    "committed",
)
NUMBER: Final = telemetry_partition("huge")
RUNS: Final = ("huge", "large", "small")


class Postponing(Fairness):
    """Postpones a run after each round but the small one, if there is one that is not; so often."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def round(self, now_ms: int, lag_ms: int | None) -> bool:
        return self.left > 0

    def close(self, now_ms: int, *, runs: int, shed: Mapping[RunKey, Set[Tier]]) -> Decision:
        here = sorted(shed.keys() - {(NUMBER, "small")})
        if not here:
            return Decision("keep", "")
        self.left -= 1
        return Decision("postpone", "a test", here[self.left % len(here)])


def telemetry(topics: Topics) -> list[Record]:
    """Runs that go wrong, on one partition."""
    builders = [RunBuilder(run) for run in RUNS]
    for run in builders:
        run.started()
    for step in range(200):
        for run in builders:
            bad = step in {"huge": (60, 120), "large": (80,), "small": (90,)}[run.run_id]
            run.steps([step], loss=math.nan if bad else 1.0, gradient_norm=1.0)
            if step % 40 == 39:
                run.heartbeat(last_step=step)
    for run in builders:
        run.ended()
    rows = [one for some in zip(*(run.records for run in builders), strict=True) for one in some]
    return [replace(one, partition=Partition(topics.telemetry, NUMBER)) for one in rows]


def issues(found: Sequence[object]) -> list[str]:
    """Without repeats, and without those about postponement."""
    rows = [
        one.model_dump_json()
        for one in found
        if isinstance(one, IssueFiring) and one.branch != "postponed"
    ]
    return list(dict.fromkeys(rows))


async def expected(bus: Bus, topics: Topics) -> dict[str, list[str]]:
    """What one engine finds that reads all in its order."""
    engine, found = PartitionEngine(rule_specs()), []
    for record in await read_all(bus, topics.telemetry, NUMBER):
        found += [one.issue for one in engine.apply(record)]
    return {run: issues([one for one in found if one.run_id == run]) for run in RUNS}


async def published(bus: Bus, topics: Topics) -> dict[str, list[str]]:
    found = {run: await data_of(bus, topics.issues, issue_partition(run)) for run in RUNS}
    return {
        run: issues([one for one in rows if isinstance(one, IssueFiring) and one.run_id == run])
        for run, rows in found.items()
    }


def worker_on(
    bus: Bus, topics: Topics, times: int, *, dies_at: str = "", metrics: PrometheusMetrics
) -> tuple[Worker, RulesService]:
    """One that postpones runs so often, and dies at a point while one is postponed."""
    rules = RulesService(topics, rule_specs(), metrics=metrics, fairness=Postponing(times))
    passed = 0

    def crash(point: str) -> None:
        nonlocal passed
        if point == dies_at and rules.engine.postponed():
            passed += 1
            if passed == 4:
                die()

    settings = WorkerSettings(checkpoint_s=0.01, poll_records=7)
    group = f"{topics.prefix}-rules"
    worker = Worker(
        bus, rules, topics=topics, group=group, metrics=metrics, settings=settings, crash=crash
    )
    return worker, rules


@pytest.fixture
async def topics(world: World, bus: Bus) -> Topics:
    """With the telemetry of the runs."""
    topics = Topics(world.prefix)
    await bus.init(topics.specs())
    await send(bus, telemetry(topics))
    return topics


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are postponed get no more time than the others, however little that is; after a
    restart, one run is taken up in each round."""
    monkeypatch.setattr(overload_control, "LEAST_S", 0.0)
    monkeypatch.setattr(service, "AT_ONCE", 1)


@pytest.mark.usefixtures("slow")
async def test_it_loses_nothing_when_its_workers_die(
    bus: Bus, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = PrometheusMetrics()
    for point in POINTS:
        worker, _ = worker_on(bus, topics, 100, dies_at=point, metrics=metrics)
        assert not await work(worker), f"it should have died: {point}"
    monkeypatch.undo()
    worker, rules = worker_on(bus, topics, 3, metrics=metrics)
    assert await work(worker)

    assert not rules.engine.postponed()
    assert metrics.value(names.POSTPONED_RUNS) == 0
    assert all(not run.state.postponed for _, _, run in rules.engine.runs())
    assert await published(bus, topics) == await expected(bus, topics)
    found = await data_of(bus, topics.issues, issue_partition("huge"))
    gaps = [one for one in found if isinstance(one, IssueFiring) and one.branch == "postponed"]
    assert gaps
    assert gaps[0].evidence.explanation == "a test"

    worker, rules = worker_on(bus, topics, 0, metrics=metrics)
    assert await work(worker)
    assert not rules.engine.postponed(), "the bus has its last state"


@pytest.mark.usefixtures("slow")
async def test_it_goes_on_where_the_log_goes_on(
    world: World, bus: Bus, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What retention has removed never comes; the run must not wait for it for ever."""
    metrics = PrometheusMetrics()
    worker, _ = worker_on(bus, topics, 100, dies_at="committed", metrics=metrics)
    assert not await work(worker)
    place = Partition(topics.telemetry, NUMBER)
    (retention_ms,) = [s.retention_ms for s in topics.specs() if s.name == topics.telemetry]
    assert retention_ms is not None
    await world.expire(bus, place, len(telemetry(topics)), retention_ms=retention_ms)
    assert not await read_all(bus, topics.telemetry, NUMBER)

    monkeypatch.undo()
    worker, rules = worker_on(bus, topics, 0, metrics=metrics)
    assert await work(worker)
    assert not rules.engine.postponed()
