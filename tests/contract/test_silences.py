"""Silences of people, on either bus: set, listed, ended, and what the action service does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.actions.action_worker import ledger, working
from support.buses import World
from support.configured_buses import context_on
from support.records.issues import issue, issue_record
from support.waiting import until
from tocsin.bus.port import Outgoing, Partition
from tocsin.console.context import CommandContext
from tocsin.console.silences.send import (
    SilenceRequest,
    add_silence,
    as_json,
    expire_silence,
    list_silences,
    silence_line,
)
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import Delivery

CONFIG = """
receivers: {chat: {type: webhook, url: "https://chat.test/"}}
rules: [nonfinite: [chat], loss_spike: [stop]]
"""


@pytest.fixture
def context(world: World, tmp_path: Path) -> CommandContext:
    return context_on(world, tmp_path, CONFIG)


@pytest.fixture
def people(tmp_path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The environments of two people, each with a folder of keys."""
    ana, ben = ({"XDG_CONFIG_HOME": str(tmp_path / who)} for who in ("ana", "ben"))
    return ana, ben


def request(now_ms: int, **more: object) -> SilenceRequest:
    fields = {"match": {"run": ("run-*",)}, "until_ms": now_ms + 7_200_000, "by": "ana@node"}
    return SilenceRequest(**{**fields, "why": "known", "mutes": ("notify", "stop"), **more})  # type: ignore[arg-type]


async def test_a_silence_is_set_listed_and_ended(
    context: CommandContext, people: tuple[dict[str, str], dict[str, str]]
) -> None:
    ana, ben = people
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
    now_ms = unix_ms()
    assert await list_silences(context, ana) == []

    made = await add_silence(context, request(now_ms), ana, now_ms)
    assert await list_silences(context, ana) == [made]
    assert await list_silences(context, ben) == [], "not signed by a key of his"
    line = silence_line(made, now_ms)
    assert line.startswith(f"silence {made.silence_id[:8]} run=run-* until ")
    assert line.endswith(" UTC, mutes notify and stop, by ana@node: known")
    assert json.loads(as_json([made]))["silences"][0]["match"] == {"run": ["run-*"]}

    with pytest.raises(ConfigurationError, match="no silence begins with 'x'"):
        await expire_silence(context, "x", by="ana", environ=ana, now_ms=now_ms + 1)
    start = made.silence_id[:4]
    ended = await expire_silence(context, start, by="ana", environ=ana, now_ms=now_ms + 1)
    changes = {"until_ms": now_ms + 1, "set_ms": now_ms + 1, "ended_by": "ana"}
    assert ended == made.model_copy(update=changes)
    assert await list_silences(context, ana) == [ended]
    with pytest.raises(ConfigurationError, match="has ended at"):
        await expire_silence(context, start, by="ana", environ=ana, now_ms=now_ms + 2)


async def test_the_action_service_keeps_to_them_after_a_restart_too(
    context: CommandContext, people: tuple[dict[str, str], dict[str, str]]
) -> None:
    ana, ben = people
    async with context.open_bus() as bus:
        await bus.init(context.topics.specs())
        producer = await bus.producer()

        async def publish(episode: str, rule: str) -> str:
            found = issue(rule=rule, episode=episode)
            made = issue_record(found)
            topic = Partition(context.topics.issues, made.partition.number)
            await producer.publish([Outgoing(topic, made.key, made.value, made.headers)])
            return f"{found.issue_id}/{'chat' if rule == 'nonfinite' else 'stop'}"

        async def decided(*keys: str) -> list[Delivery]:
            async with asyncio.timeout(30):
                while True:
                    found = await ledger(context, bus)
                    if all(key in found for key in keys):
                        return [found[key] for key in keys]
                    await asyncio.sleep(0.05)

        now_ms = unix_ms()
        await add_silence(context, request(now_ms, why="forged"), ben, now_ms)
        made = await add_silence(context, request(now_ms), ana, now_ms)
        async with working(bus, context, ana):
            notice, stop = await decided(
                await publish("1", "nonfinite"), await publish("1", "loss_spike")
            )
        assert (notice.state, notice.held) == ("suppressed", "silence")
        assert stop.state == "suppressed"
        for delivery in (notice, stop):
            assert delivery.reason.startswith("silenced by ana@node until ")
            assert delivery.reason.endswith(f"(silence {made.silence_id[:8]}): known")

        # As the helper of one run has them: what is about all runs is about its run, too.
        async with working(bus, context, ana, {"run-1"}) as service:
            (again,) = await decided(await publish("2", "nonfinite"))
            assert again.held == "silence"
            now_ms = unix_ms()
            start = made.silence_id[:8]
            await expire_silence(context, start, by="ana", environ=ana, now_ms=now_ms)
            silences = service._planner.silences
            await until(lambda: all(one.until_ms <= now_ms for one in silences()))
            (sent,) = await decided(await publish("3", "nonfinite"))
            assert sent.held is None
            assert await service.drain(30)
        await producer.close()
