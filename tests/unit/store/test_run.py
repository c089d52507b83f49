"""One run as Python reads it: from a live bus, from files, from files that are sorted, and from
both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from support.records.made_runs import LAYERS, made_run
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.schemas.records.runs import PhaseMark
from tocsin.schemas.topics import Topics
from tocsin.store import NotCaptured, Run, UnknownRun, open_run, open_store
from tocsin.store.archive.once import archive_run

MADE = made_run()


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bus with two runs, and some records of the first twice. The store beside it has all of the
    first; `half`, `many` and `sorted` have its first half, all in many files, and all in few."""
    folder = tmp_path_factory.mktemp("bus")
    path = folder / "bus.db"

    async def archive(bus: EmbeddedBus, name: str, *, over: bool = False) -> None:
        await archive_run(
            bus, open_store(folder / name), "run-1", topics=Topics(), now_ms=lambda: 0, over=over
        )

    async def fill() -> None:
        async with EmbeddedBus(path) as opened:
            await made_run("run-2", steps=3).publish(opened)
            await MADE.publish(opened, stop=40)
            for name in ("half", "many"):
                await archive(opened, name)
            await MADE.publish(opened, start=30)
            await archive(opened, "many")
            await archive(opened, "sorted", over=True)

    asyncio.run(fill())
    return path


@pytest.fixture(scope="module", params=["live", "half", "many", "sorted"])
def run(bus: Path, request: pytest.FixtureRequest) -> Run:
    match request.param:
        case "live":
            return open_run("run-1", bus=bus)
        case "half":
            return open_run("run-1", store=bus.parent / "half", bus=bus)
    return open_run("run-1", store=bus.parent / request.param)


def test_it_knows_its_incarnation_and_its_state(run: Run) -> None:
    assert (run.incarnation, list(run.incarnations)) == ("made-1", ["made-1"])
    assert run.view is not None
    assert (run.view.state, run.view.labels) == ("ended", {"team": "vision"})
    assert list(run.ranks()) == [0, 1]


def test_scalars_over_the_steps(run: Run) -> None:
    assert run.steps().tolist() == list(range(20))
    assert run.steps("eval").tolist() == [19]
    assert set(run.scalars()) == {"loss", "lr.0", "log.Loss"}

    loss = run.series("loss", rank=1)

    assert [str(loss.steps.dtype), str(loss.values.dtype)] == ["int64", "float64"]
    assert np.allclose(loss.values, 10 / (1 + np.arange(20)))
    assert np.all(np.diff(loss.at_us) > 0)
    assert run.series("loss", "eval").values.tolist() == [3.0, 4.0]


def test_statistics_of_tensors(run: Run) -> None:
    collections = run.collections()
    assert list(collections) == ["gradients", "updates"]
    assert collections["gradients"].tensors == LAYERS
    assert collections["gradients"].steps == 4
    assert list(run.tensors(r"\.1\.", "gradients")) == ["layers.1.weight"]

    weight = run.tensor("layers.1.weight")

    assert (weight.collection, "l2" in weight.statistics()) == ("gradients", True)
    assert np.array_equal(
        weight.statistic("l2").values, [200.0, 205.0, 210.0, np.nan], equal_nan=True
    )
    assert run.tensor(LAYERS[0]).statistic("nans").values.tolist() == [0.0, 5.0, 10.0, 15.0]


def test_a_statistic_of_all_tensors_is_a_matrix(run: Run) -> None:
    matrix = run.matrix("gradients", "l2")

    assert (matrix.rows, matrix.steps.tolist()) == (LAYERS, [0, 5, 10, 15])
    assert matrix.values[1].tolist() == [100.0, 105.0, 110.0, 115.0]
    assert np.isnan(matrix.values[2, 3])
    assert matrix.present.all()


def test_samples_of_a_node(run: Run) -> None:
    system = run.system()

    assert (list(run.nodes()), system.node) == (["node"], "node")
    assert system.column("cpu.percent").tolist() == [50.0, 60.0, 70.0]
    assert np.isnan(system.column("gpu.0.utilization_percent")[:2]).all()


def test_issues_deliveries_and_events(run: Run) -> None:
    assert [issue.issue_id for issue in run.issues()] == [MADE.issue.issue_id]
    assert [delivery.state for delivery in run.deliveries()] == ["delivered"]
    phases = [event.data for event in run.events() if isinstance(event.data, PhaseMark)]
    assert [phase.name for phase in phases] == ["evaluation"]


def test_pandas(run: Run) -> None:
    frame = run.to_pandas()

    assert frame.loc[4, "loss"] == pytest.approx(0.2)
    assert set(frame.columns) == {"loss", "lr.0", "log.Loss"}
    assert run.matrix("gradients", "l2").to_pandas().loc[5, LAYERS[1]] == 105
    assert run.system().to_pandas()["cpu.percent"].iloc[1] == 60
    assert run.tensor(LAYERS[0]).to_pandas().loc[5, "nans"] == 5


def test_what_is_not_there_names_what_is(run: Run) -> None:
    with pytest.raises(NotCaptured, match=r"did you mean 'loss'\? Captured: .*lr.0"):
        run.series("los")
    with pytest.raises(NotCaptured, match="Captured: gradients, updates"):
        run.tensors(collection="weights")
    with pytest.raises(NotCaptured, match="statistic of gradients of rank 1") as other_rank:
        run.matrix("gradients", "l2", rank=1)
    assert "did you mean" not in str(other_rank.value), "the name is right"
    assert " was captured. Captured: " in str(other_rank.value)
    with pytest.raises(NotCaptured, match="Captured: node"):
        run.system("other")


def test_a_run_that_nobody_knows(bus: Path) -> None:
    with pytest.raises(UnknownRun, match=r"no run 'run-9': looked at embedded:.*bus\.db"):
        open_run("run-9", bus=bus)


def test_what_is_archived_and_sorted_meanwhile_is_there_once(tmp_path: Path) -> None:
    path, folder = tmp_path / "bus.db", tmp_path / "store"

    async def write(start: int, stop: int | None, *, over: bool) -> None:
        async with EmbeddedBus(path) as bus:
            await MADE.publish(bus, start=start, stop=stop)
            await archive_run(
                bus, open_store(folder), "run-1", topics=Topics(), now_ms=lambda: 0, over=over
            )

    async def publish() -> None:
        async with EmbeddedBus(path) as bus:
            await MADE.publish(bus, start=40)

    asyncio.run(write(0, 20, over=False))
    asyncio.run(write(20, 40, over=False))
    asyncio.run(publish())
    run = open_run("run-1", store=folder, bus=path)
    events, loss = list(run.events()), run.series("loss").values.tolist()

    asyncio.run(write(10_000, None, over=True))

    assert list(run.events()) == events
    assert run.series("loss").values.tolist() == loss


def test_what_was_archived_before_it_is_read_is_there_once(tmp_path: Path) -> None:
    path, folder = tmp_path / "bus.db", tmp_path / "store"

    async def write(start: int, stop: int) -> None:
        async with EmbeddedBus(path) as bus:
            await MADE.publish(bus, start=start, stop=stop)
            await archive_run(bus, open_store(folder), "run-1", topics=Topics(), now_ms=lambda: 0)

    asyncio.run(write(0, 20))
    run = open_run("run-1", store=folder, bus=path)
    asyncio.run(write(20, 40))

    run.refresh()

    again = open_run("run-1", store=folder, bus=path)
    assert run.series("loss").steps.tolist() == again.series("loss").steps.tolist()
    assert list(run.events()) == list(again.events())


async def test_it_waits_for_a_step_of_a_live_run(tmp_path: Path) -> None:
    path = tmp_path / "bus.db"
    async with EmbeddedBus(path) as opened:
        await MADE.publish(opened, stop=20)
        run = await asyncio.to_thread(open_run, "run-1", bus=f"embedded:{path}")
        assert not await asyncio.to_thread(run.wait_for_step, 19, 0.1)

        waiting = asyncio.create_task(asyncio.to_thread(run.wait_for_step, 19, 60))
        await MADE.publish(opened, start=20, stop=60)

        assert await waiting
        assert run.series("loss").steps.tolist() == list(range(20))
        await MADE.publish(opened, start=60)
        assert not await asyncio.to_thread(run.wait_for_step, 25, 60)
