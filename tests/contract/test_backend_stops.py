"""A backend ends jobs whose launchers are gone, on either bus: the right one, and if it may."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.actions.action_worker import ledger, working
from support.actions.farm import FARM_JOB, Farm
from support.buses import World
from support.configured_buses import context_on
from support.records.issues import issue, issue_record, view, view_record
from tocsin.bus.port import Bus, Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.schemas.configuration.policy import PolicyEntry
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.topics import Topics

POLICY = (PolicyEntry.model_validate({"match": {"team": ("vision",)}, "may_stop_on": ["farm"]}),)


@pytest.fixture
def context(world: World, tmp_path: Path) -> CommandContext:
    return context_on(world, tmp_path)


async def test_a_backend_ends_the_job_of_a_run_whose_launcher_is_gone(
    context: CommandContext, tmp_path: Path
) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    farm = Farm()
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        async with working(bus, context, environ, farm=farm, policy=POLICY):
            # Of another team, with topics of its own: it is not even read.
            theirs = Topics(f"{context.topics.prefix}-b")
            await bus.init(theirs.specs())
            await _lost(bus, theirs, "theirs")
            # Of nobody whom the policy permits.
            await _lost(bus, context.topics, "speech-1", team="speech")
            denied = await _stop(context, bus, "speech-1", "no backend is asked")
            assert "policy: [{match: {team: speech}, may_stop_on: [farm]}]" in denied.reason

            await _lost(bus, context.topics, "run-1")
            done = await _stop(context, bus, "run-1", "the backend ended the job")
            assert (done.state, done.reason) == (
                "delivered",
                "the backend ended the job: farm: CANCELLED",
            )
            assert [job.run_id for job in farm.asked] == ["run-1"]

            # Its scheduler has started the job once more since.
            farm.restarts, farm.state = 1, "running"
            await _lost(bus, context.topics, "run-2")
            left = await _stop(context, bus, "run-2", "another incarnation")
            assert left.state == "suppressed"
        assert [job.run_id for job in farm.asked] == ["run-1"]
        assert {one.run_id for one in (await ledger(context, bus)).values()} == {
            "speech-1",
            "run-1",
            "run-2",
        }


async def _lost(bus: Bus, topics: Topics, run: str, *, team: str = "vision") -> None:
    """A run of which nothing is heard, and an issue that stops it."""
    changes = {"state": "lost", "labels": {"team": team}, "scheduler": FARM_JOB}
    lost, found = view_record(view(run).model_copy(update=changes)), issue_record(issue(run))
    producer = await bus.producer()
    for made, topic in ((lost, topics.runs), (found, topics.issues)):
        place = Partition(topic, made.partition.number)
        await producer.publish([Outgoing(place, made.key, made.value, made.headers)])
    await producer.close()


async def _stop(context: CommandContext, bus: Bus, run: str, reason: str) -> Delivery:
    """The stop of a run, once that is in its reason."""
    key = f"{issue(run).issue_id}/stop"
    async with asyncio.timeout(60):
        while True:
            stop = (await ledger(context, bus)).get(key)
            if stop is not None and reason in stop.reason:
                return stop
            await asyncio.sleep(0.05)
