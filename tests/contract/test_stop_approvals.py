"""Approvals and the switch of stops, on either bus: from the command to the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.actions.action_worker import ledger, working
from support.buses import World
from support.configured_buses import context_on
from support.records.issues import issue, issue_record
from tocsin.bus.port import Bus, Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.console.stop.approve import StopReply, answer_stop, answered_line
from tocsin.console.stop.switch import read_switch, switch_line, switch_stops
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.stops.control import StopsSwitched

CONFIG = """
defaults: {mode: ask}
receivers: {chat: {type: webhook, url: "https://chat.test/"}}
"""


@pytest.fixture
def context(world: World, tmp_path: Path) -> CommandContext:
    return context_on(world, tmp_path, CONFIG)


async def test_a_stop_is_approved_rejected_and_switched_off(
    context: CommandContext, tmp_path: Path
) -> None:
    ana, ben = ({"XDG_CONFIG_HOME": str(tmp_path / who)} for who in ("ana", "ben"))

    def reply(text: str, verdict: str) -> StopReply:
        return StopReply(text=text, verdict=verdict, by="ana@node", why="it is lost")  # type: ignore[arg-type]

    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        with pytest.raises(ConfigurationError, match="no stop waits for an answer on this bus"):
            await answer_stop(context, reply("run-1", "approve"), ana, unix_ms())
        assert switch_line(await read_switch(context, ana)).startswith("stops are on")

        async with working(bus, context, ana):
            first = await _decided(context, bus, "run-1")
            assert first.waits_for_people
            # Signed by a key that the service does not trust.
            unheard = await answer_stop(context, reply("run-1", "reject"), ben, unix_ms())
            assert unheard.waits_for_people
            assert "trusts your key" in answered_line(unheard, reply("run-1", "reject"))

            answer = reply(first.delivery_id[:8], "approve")
            sent = await answer_stop(context, answer, ana, unix_ms())
            assert not sent.waits_for_people
            assert sent.state == "delivered" or "approved by ana@node" in sent.reason
            assert "is sent" in answered_line(sent, answer)

            await _decided(context, bus, "run-2")
            answer = reply("run-2", "reject")
            kept = await answer_stop(context, answer, ana, unix_ms())
            assert (kept.state, kept.held) == ("suppressed", "rejected")
            assert answered_line(kept, answer) == (
                "run run-2 is not stopped: ana@node rejected the stop: it is lost"
            )

            # The clock of another machine is ahead.
            ahead = StopsSwitched(off=False, by="ben@ahead", at_ms=unix_ms() + 300_000)
            await switch_stops(context, ahead, ana)
            switched = StopsSwitched(off=True, by="ana@node", why="a bad rule", at_ms=unix_ms())
            await switch_stops(context, switched, ana)
            assert "off: no run is stopped (switched by ana@node" in switch_line(
                await read_switch(context, ana)
            )
            assert await read_switch(context, ben) is None, "not signed by a key of his"
        # A service that is started later has read the switch before it decides anything.
        async with working(bus, context, ana):
            held = await _decided(context, bus, "run-3")
        assert (held.state, held.held) == ("suppressed", "switch")


async def _decided(context: CommandContext, bus: Bus, run: str) -> Delivery:
    """The first entry of the ledger for a stop of the run, after an issue of it."""
    found = issue(run)
    made = issue_record(found)
    producer = await bus.producer()
    topic = Partition(context.topics.issues, made.partition.number)
    await producer.publish([Outgoing(topic, made.key, made.value, made.headers)])
    await producer.close()
    async with asyncio.timeout(30):
        while True:
            entries = await ledger(context, bus)
            if (stop := entries.get(f"{found.issue_id}/stop")) is not None:
                return stop
            await asyncio.sleep(0.05)
