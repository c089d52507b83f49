"""A small run of two ranks with scalars, tensors, samples, an issue and its end, on a bus."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from support.records.issues import delivery, issue, record
from support.records.on_bus import send
from tocsin.bus.port import Bus, Outgoing, Partition, Record
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RankView, RunView
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.stream_rules.testing import START_MS, RunBuilder

LAYERS = ("layers.0.weight", "layers.0.bias", "layers.1.weight")


@dataclass(frozen=True)
class MadeRun:
    """What is on the bus of it: telemetry, and what rules and actions published."""

    run_id: str
    incarnation: str
    telemetry: list[Record]
    others: list[Outgoing]
    issue: IssueFiring = field(repr=False)
    prefix: str = "tocsin"

    async def publish(self, bus: Bus, *, start: int = 0, stop: int | None = None) -> None:
        """Append a part of the telemetry; the others come with its end."""
        await bus.init(Topics(self.prefix).specs())
        await send(bus, self.telemetry[start:stop])
        if stop is None:
            producer = await bus.producer()
            await producer.publish(self.others)
            await producer.close()


def made_run(run_id: str = "run-1", *, steps: int = 20, every: int = 5) -> MadeRun:
    """Losses are 1/(1 + step), of rank 1 ten times that; the l2 of tensor i at step s is 100 i + s,
    NaN at the last one of `layers.1.weight`."""
    run = RunBuilder(run_id, world_size=2, labels={"team": "vision"})
    run.started(role="launcher")
    for rank in (0, 1):
        run.started(rank=rank)
    run.system({"cpu.percent": [50.0, 60.0], "memory.used_bytes": [1e9, 2e9]}, every_s=1.0)
    for step in range(steps):
        for rank in (0, 1):
            loss = (10.0 if rank else 1.0) / (1 + step)
            run.steps([step], rank=rank, loss=loss, columns={"lr.0": 0.1, "log.Loss": 2 * loss})
        if step % every == 0:
            l2 = np.array([100.0 * i + step for i in range(len(LAYERS))])
            if step + every >= steps:
                l2[-1] = np.nan
            run.tensors(step, "gradients", LAYERS, columns={"l2": l2}, nans={LAYERS[0]: step})
            run.tensors(step, "updates", LAYERS[:1], columns={"update_l2": float(step)})
    run.steps([steps - 1] * 2, mode="eval", columns={"loss": [3.0, 4.0]})
    run.system({"cpu.percent": [70.0], "gpu.0.utilization_percent": [99.0]}, node="node")
    run.phase("evaluation", "end")
    for rank in (0, 1):
        run.ended(rank=rank)
    run.ended(role="launcher")
    found = issue(run_id).model_copy(update={"incarnation": run.incarnation})
    view = RunView(
        run_id=run_id,
        incarnation=run.incarnation,
        state="ended",
        outcome="completed",
        labels=run.labels,
        started_ms=START_MS,
        ended_ms=run.now_ms,
        last_step=steps - 1,
        ranks=tuple(RankView(rank=rank, last_heard_ms=run.now_ms) for rank in (0, 1)),
        issues=1,
        next_offset=len(run.records),
    )
    running = view.model_copy(
        update={"state": "running", "ended_ms": None, "outcome": None, "next_offset": 3}
    )
    return MadeRun(
        run_id,
        run.incarnation,
        run.records,
        [
            outgoing(running, Topics().runs, telemetry_partition(run_id), run_id),
            outgoing(found, Topics().issues, issue_partition(run_id), run_id),
            outgoing(
                delivery(found, state="delivered"),
                Topics().actions,
                issue_partition(run_id),
                f"{found.issue_id}/ml",
            ),
            outgoing(view, Topics().runs, telemetry_partition(run_id), run_id),
        ],
        found,
    )


def of_team(run: MadeRun, prefix: str) -> MadeRun:
    """The same on the topics of another prefix."""

    def moved(partition: Partition) -> Partition:
        return Partition(prefix + partition.topic.removeprefix("tocsin"), partition.number)

    return replace(
        run,
        telemetry=[replace(one, partition=moved(one.partition)) for one in run.telemetry],
        others=[replace(one, partition=moved(one.partition)) for one in run.others],
        prefix=prefix,
    )


def outgoing(data: Data, topic: str, number: int, key: str) -> Outgoing:
    event = Event.wrap(data, id=f"{topic}/{key}", source="/rules", time_ms=START_MS)
    return record(event, topic, number, key)
