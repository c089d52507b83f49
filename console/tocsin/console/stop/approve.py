"""`tocsin approve`: a person's answer to a stop that waits for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tocsin.bus.port import Bus
from tocsin.console.context import CommandContext
from tocsin.console.publication import publish_signed
from tocsin.console.views.bus_view import read_view
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.stops.control import StopAnswered
from tocsin.schemas.text import plain_line
from tocsin.schemas.topics import Topics, issue_partition

SHORTEST: Final = 4
"""Characters of an id that one must give at least."""

_WAIT_S: Final = 5.0
_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReply:
    """What a person answers: to the stop of that id, or of that issue or run, or its beginning."""

    text: str
    verdict: Literal["approve", "reject"]
    by: str
    why: str = ""


async def answer_stop(
    context: CommandContext, reply: StopReply, environ: Mapping[str, str], now_ms: int
) -> Delivery:
    """Put the answer on the bus, and wait some seconds for what becomes of the stop.

    Returns:
        The stop as the action service has it then.

    Raises:
        ConfigurationError: no stop that waits is meant, or several are; no key can be made.
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        view = await read_view(bus, context.topics)
        stop = choose_stop(view.deliveries, reply.text)
        await send_answer(bus, context.topics, stop, reply, environ, now_ms)
        return await _answered(bus, context.topics, stop)


async def send_answer(
    bus: Bus,
    topics: Topics,
    stop: Delivery,
    reply: StopReply,
    environ: Mapping[str, str],
    now_ms: int,
) -> None:
    """Put the answer to that stop on the bus.

    Raises:
        ConfigurationError: no key can be made. BusError: the bus does not answer.
    """
    answer = StopAnswered(
        run_id=stop.run_id,
        incarnation=stop.incarnation,
        delivery_id=stop.delivery_id,
        verdict=reply.verdict,
        by=reply.by,
        why=reply.why,
        at_ms=now_ms,
    )
    await publish_signed(
        bus,
        topics,
        answer,
        answer.key,
        environ,
        now_ms=now_ms,
        partitions=[issue_partition(stop.run_id)],
    )


def choose_stop(deliveries: Sequence[Delivery], text: str) -> Delivery:
    """The stop that waits and is meant.

    Raises:
        ConfigurationError: none is, or several are.
    """
    waiting = [one for one in deliveries if one.waits_for_people]
    found = [
        stop
        for stop in waiting
        if stop.run_id == text
        or (len(text) >= SHORTEST and stop.delivery_id.startswith(text))
        or (len(text) >= SHORTEST and stop.issue_id.startswith(text))
    ]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(
        f"{stop.delivery_id[:8]} (run {plain_line(stop.run_id)}, {plain_line(stop.rule)})"
        for stop in (found or waiting)[:8]
    )
    if found:
        raise ConfigurationError(f"{text[:100]!r}: several stops wait for an answer: {listed}")
    if waiting:
        raise ConfigurationError(f"no stop {text[:100]!r} waits for an answer; waiting: {listed}")
    raise ConfigurationError(
        "no stop waits for an answer on this bus; is it on another one (--bus)?"
    )


def answered_line(stop: Delivery, reply: StopReply) -> str:
    """What the answer has caused, in one line."""
    run = plain_line(stop.run_id)
    if stop.waits_for_people:
        so_far = stop.approval.by if stop.approval is not None else ()
        approved = reply.verdict == "approve" and reply.by in so_far
        if approved and stop.approval is not None:
            return (
                f"approved; the stop of run {run} waits for "
                f"{stop.approval.quorum - len(so_far)} more"
            )
        return (
            f"the answer is on the bus, but no action service has read it within {_WAIT_S:g} s; "
            "check that `tocsin actions` runs and trusts your key (`tocsin keys list`)"
        )
    if stop.state == "suppressed":
        return f"run {run} is not stopped: {plain_line(stop.reason)}"
    return f"the stop of run {run} is sent: {plain_line(stop.reason)}; `tocsin why` follows it"


def answered_json(stop: Delivery) -> str:
    """The stop for programs: one object with `version` and `stop`."""
    found = stop.model_dump(mode="json", exclude={"event"})
    return json.dumps({"version": 1, "stop": found}, indent=2, ensure_ascii=False)


async def _answered(bus: Bus, topics: Topics, before: Delivery) -> Delivery:
    """The stop as soon as its entry has changed; as it was, if it does not in time."""
    until_s = time.monotonic() + _WAIT_S
    while time.monotonic() < until_s:
        view = await read_view(bus, topics, before.run_id)
        now = view.delivery(before.key)
        if now is not None and now != before:
            return now
        await asyncio.sleep(_POLL_S)
    return before
