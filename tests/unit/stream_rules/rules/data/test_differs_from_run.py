"""`differs_from_run`: two runs that should be alike, in a replay and behind a worker on a bus."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from support.records.counted import as_sagemaker
from support.records.on_bus import data_of, send
from support.waiting import until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.reading.other_runs import MAX_BYTES, Reference
from tocsin.stream_rules.service import RulesService
from tocsin.stream_rules.testing import RunBuilder, issues_of, only

SPECS = only("differs_from_run", other_run="before")
ROWS = ("a", "b", "c")


def run_of(
    run_id: str,
    *,
    steps: int = 50,
    loss: Sequence[float] | None = None,
    odd_from: int | None = None,
    odd: float = 1.5,
    rank: int = 0,
    incarnation: str = "one",
) -> RunBuilder:
    """A run of which tensor b is other by a factor `odd` from that step on."""
    run = RunBuilder(run_id, incarnation=f"{run_id}-{incarnation}")
    run.started(rank=rank)
    losses = [3.0 / (1 + 0.01 * i) for i in range(steps)] if loss is None else list(loss)
    for start in range(0, steps, 10):
        part = range(start, start + 10)
        factor = odd if odd_from is not None and start >= odd_from else 1.0
        l2 = np.array([1.0, 2.0 * factor, 3.0])
        run.tensors(start, "gradients", ROWS, columns={"l2": l2, "absmax": 0.5}, rank=rank)
        run.steps(part, loss=losses[start : start + 10], rank=rank)
    run.ended(rank=rank)
    return run


def compared(run: RunBuilder, other: RunBuilder | None, **params: object) -> list[IssueFiring]:
    """What is said of the first of them."""
    specs = only("differs_from_run", other_run="before", **params)  # type: ignore[arg-type]
    engine = PartitionEngine(specs)
    for record in () if other is None else other.records:
        engine.references.read(record)
    return [told.issue for told in replay(run.records, engine=engine)]


def test_the_first_difference_is_told() -> None:
    (issue,) = compared(run_of("now", odd_from=20), run_of("before"))
    assert (issue.branch, issue.severity, issue.first_step) == ("difference", "warning", 20)
    assert (issue.subject.collection, issue.subject.name) == ("gradients", "b")
    assert issue.reason == "l2 of gradients/b is 3 at step 20, and 2 in the run before"


def test_losses_are_compared_at_each_step() -> None:
    losses = [3.0 / (1 + 0.01 * i) for i in range(50)]
    losses[17] *= 1.01
    (issue,) = compared(run_of("now", loss=losses), run_of("before"))
    assert (issue.first_step, issue.subject.kind) == (17, "loss")
    assert compared(run_of("now", loss=losses), run_of("before"), losses=False) == []


def test_alike_is_no_issue_and_rounding_neither() -> None:
    assert compared(run_of("now"), run_of("before")) == []
    assert compared(run_of("now", odd_from=0, odd=1.0005), run_of("before")) == []
    nans = [math.nan] * 50
    assert compared(run_of("now", loss=nans), run_of("before", loss=nans)) == []


def test_a_nan_of_one_run_alone_is_a_difference() -> None:
    nans = [math.nan] * 50
    (issue,) = compared(run_of("now", loss=nans), run_of("before"))
    assert issue.first_step == 0


def test_an_infinite_loss_of_one_run_alone_is_a_difference() -> None:
    losses = [3.0 / (1 + 0.01 * i) for i in range(50)]
    losses[17] = math.inf
    for ours, theirs in ((losses, None), (None, losses)):
        (issue,) = compared(run_of("now", loss=ours), run_of("before", loss=theirs))
        assert issue.first_step == 17
    assert compared(run_of("now", loss=losses), run_of("before", loss=losses)) == []
    opposite = [-loss if math.isinf(loss) else loss for loss in losses]
    (issue,) = compared(run_of("now", loss=losses), run_of("before", loss=opposite))
    assert issue.first_step == 17


def test_the_reference_wants_the_same_to_the_last_bit() -> None:
    engine = PartitionEngine(as_sagemaker("differs_from_run", other_run="before"))
    for record in run_of("before").records:
        engine.references.read(record)
    found = replay(run_of("now", odd_from=30, odd=1.0001).records, engine=engine)
    assert [one.issue.first_step for one in found] == [30]


@pytest.mark.parametrize(
    ("other_run", "reason"),
    [
        ("before", "the run before is unknown: there is nothing to compare with"),
        ("", "no run is configured for comparison"),
    ],
)
def test_a_run_that_is_not_there_is_said_once(other_run: str, reason: str) -> None:
    issues = issues_of(run_of("now").records, specs=only("differs_from_run", other_run=other_run))
    assert [(i.branch, i.state, i.reason) for i in issues] == [("not_found", "firing", reason)]


def test_the_other_run_itself_is_compared_with_nothing() -> None:
    assert issues_of(run_of("before").records, specs=SPECS) == []


def test_what_only_one_of_them_has_is_left_out() -> None:
    other = run_of("before", steps=20)
    other.tensors(30, "weights", ["w"])
    now = run_of("now", odd_from=20)
    now.tensors(30, "weights", ["another"])
    assert compared(now, other) == []


def test_in_a_replay_the_other_run_comes_first() -> None:
    records = [*run_of("before").records, *run_of("now", odd_from=10).records]
    issues = [i for i in issues_of(records, specs=SPECS) if i.run_id == "now"]
    assert [i.first_step for i in issues] == [10]


def test_the_newest_incarnation_and_the_lowest_rank_of_it() -> None:
    other = run_of("before", odd_from=0, incarnation="old")
    other.records += run_of("before", odd_from=0, rank=3).records
    other.records += run_of("before").records
    other.records += run_of("before", odd_from=0, rank=2).records
    assert compared(run_of("now"), other) == []
    assert compared(run_of("now", odd_from=20), other)[0].first_step == 20


def test_a_restart_in_the_middle_changes_nothing() -> None:
    run, other = run_of("now", odd_from=20), run_of("before")
    for cut in range(1, len(run.records)):
        first, second = PartitionEngine(SPECS), PartitionEngine(SPECS)
        for engine in (first, second):
            for record in other.records:
                engine.references.read(record)
        told = replay(run.records[:cut], engine=first)
        ((number, state, engine_of_run),) = first.runs()
        saved = engine_of_run.snapshots(
            next_offset=state.next_offset, clock_ms=state.clock_ms, software=""
        )
        second.adopt(number, "now", {s.rule: s for s in saved}, next_offset=state.next_offset)
        told += replay(run.records[cut:], engine=second)
        assert [one.issue for one in told] == compared(run, other)


def test_of_a_long_run_the_beginning_is_kept() -> None:
    reference = Reference("before")
    run = RunBuilder("before")
    names = [f"layer{i}.weight" for i in range(20_000)]
    for step in range(MAX_BYTES // (20_000 * 60) + 3):
        run.tensors(step, "gradients", names)
    for record in run.records:
        assert record.value is not None
        reference.add(decode(read_meta(record.headers), record.value))
    assert reference.full
    assert reference.frame("gradients", 0) is not None
    assert reference.frame("gradients", step) is None


# -- behind a worker ------------------------------------------------------------------------

TOPICS = Topics()


async def issues_on(bus: EmbeddedBus, run_id: str) -> list[tuple[str, int | None]]:
    found = await data_of(bus, TOPICS.issues, issue_partition(run_id))
    return [
        (issue.branch, issue.first_step)
        for issue in found
        if isinstance(issue, IssueFiring) and issue.run_id == run_id
    ]


async def worked(bus: EmbeddedBus, *, only_runs: Sequence[str] | None, late: bool) -> None:
    """The rules of one worker, which begins before or after the other run was there."""
    before, now = run_of("before"), run_of("now", odd_from=20)
    if not late:
        await send(bus, before.records)
    service = RulesService(TOPICS, SPECS)
    worker = Worker(
        bus,
        service,
        topics=TOPICS,
        group="rules",
        only_runs=only_runs,
        settings=WorkerSettings(checkpoint_s=0.02, poll_records=7),
    )
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        await worker.ready.wait()
        if late:
            await send(bus, before.records)
            await worker.caught_up(10)
            reference = service.engine.references.get("before")
            assert reference is not None
            await until(lambda: reference.last_step == 49)
        await send(bus, now.records)
        assert await worker.caught_up(10)
        worker.stop()
        await task


@pytest.mark.parametrize("late", [False, True], ids=["there at the start", "there later"])
@pytest.mark.parametrize("only_runs", [None, ["now"]], ids=["a service", "a helper"])
async def test_a_worker_reads_the_other_run(
    tmp_path: Path, only_runs: Sequence[str] | None, late: bool
) -> None:
    assert telemetry_partition("now") != telemetry_partition("before")
    async with EmbeddedBus(tmp_path / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        await worked(bus, only_runs=only_runs, late=late)
        assert await issues_on(bus, "now") == [("difference", 20)]
        assert await issues_on(bus, "before") == []
