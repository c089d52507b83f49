"""An action service with its worker, on a bus, whose receivers accept everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial

from tocsin.actions.config import decisions_of, routing_of
from tocsin.actions.decision.retry import Outcome, RetryPolicy
from tocsin.actions.decision.stop_policy import StopPolicy
from tocsin.actions.delivery.receiver_queues import Notice, ReceiverQueue, target_queue
from tocsin.actions.delivery.service import ActionsService
from tocsin.actions.delivery.setup import Setup
from tocsin.actions.targets.backend_stops import BackendStops
from tocsin.actions.targets.build import attempt
from tocsin.actions.targets.kind import Target
from tocsin.bus.port import Bus
from tocsin.console.context import CommandContext
from tocsin.console.views.bus_view import read_view
from tocsin.emitter.stop.verification import read_keys
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.policy import PolicyEntry
from tocsin.schemas.key_folder import keys_folder
from tocsin.schemas.records.deliveries import Delivery


@asynccontextmanager
async def working(
    bus: Bus,
    context: CommandContext,
    environ: dict[str, str],
    only_runs: Collection[str] | None = None,
    *,
    farm: Target | None = None,
    policy: Sequence[PolicyEntry] = (),
) -> AsyncIterator[ActionsService]:
    """An action service whose receiver accepts everything; by the policy, a farm ends jobs."""

    async def accept(notice: Notice) -> Outcome:
        return Outcome(status=200)

    async def publish(notice: Notice) -> Outcome:
        # Only a backend needs a stop that was sent: others wait for the run's answer.
        return await accept(notice) if farm is None else Outcome(sent=True)

    farms = {} if farm is None else {target_queue("farm"): ReceiverQueue(partial(attempt, farm))}
    service = ActionsService(
        context.topics,
        Setup(
            decisions_of(context.config, routing_of(context.config)),
            {"chat": ReceiverQueue(accept), "stop": ReceiverQueue(publish), **farms},
            backends=BackendStops(
                StopPolicy(policy, {"farm": lambda job: job.kind == "farm"}),
                {"farm": 60_000},
                RetryPolicy(first_ms=20, most_ms=100, least_ms=10),
            ),
        ),
        trusted=lambda: read_keys([keys_folder(environ)]),
    )
    worker = Worker(
        bus,
        service,
        topics=context.topics,
        group="actions" if only_runs is None else "helper",
        only_runs=only_runs,
        settings=WorkerSettings(checkpoint_s=0.05),
    )
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    try:
        yield service
    finally:
        worker.stop()
        await task


async def ledger(context: CommandContext, bus: Bus) -> dict[str, Delivery]:
    view = await read_view(bus, context.topics)
    return {one.key: one for one in view.deliveries}
