"""`tocsin stops on` and `off`: the switch for all stops of a bus."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tocsin.bus.port import Bus, Partition
from tocsin.console.context import CommandContext
from tocsin.console.publication import publish_signed
from tocsin.console.views.bus_view import read_all
from tocsin.emitter.stop.verification import read_keys
from tocsin.schemas.errors import RecordError, SignatureError
from tocsin.schemas.records.stops.control import SWITCH_KEY, StopsSwitched
from tocsin.schemas.stops_switch import StopsSwitch
from tocsin.schemas.text import plain_line, time_text
from tocsin.schemas.topics import ISSUE_PARTITIONS


async def switch_stops(
    context: CommandContext, switched: StopsSwitched, environ: Mapping[str, str]
) -> StopsSwitched:
    """Put the switch on the bus, signed by this user's key; returns once it is there.

    Returns:
        What is there. The newest record counts, and clocks differ: it is later than the one before.

    Raises:
        ConfigurationError: the key cannot be read or made.
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        before = await _newest(bus, context, environ)
        if before is not None and before.at_ms >= switched.at_ms:
            switched = switched.model_copy(update={"at_ms": before.at_ms + 1})
        await publish_signed(
            bus, context.topics, switched, SWITCH_KEY, environ, now_ms=switched.at_ms
        )
    return switched


async def read_switch(context: CommandContext, environ: Mapping[str, str]) -> StopsSwitched | None:
    """The newest record of the switch that a key trusted here has signed; None: there is none.

    Raises:
        BusError: the bus does not answer.
    """
    async with context.open_bus(create=False) as bus:
        return await _newest(bus, context, environ)


def switch_line(switched: StopsSwitched | None) -> str:
    """The state of the switch in one line."""
    if switched is None:
        return "stops are on; nobody has ever switched them off"
    state = "off: no run is stopped" if switched.off else "on"
    why = f": {plain_line(switched.why)}" if switched.why else ""
    at = time_text(switched.at_ms)
    return f"stops are {state} (switched by {plain_line(switched.by)} at {at}{why})"


def switch_json(switched: StopsSwitched | None) -> str:
    """The state of the switch for programs: `version`, `on`, `switched`."""
    newest = None if switched is None else switched.model_dump(mode="json")
    on = switched is None or not switched.off
    return json.dumps({"version": 1, "on": on, "switched": newest}, indent=2, ensure_ascii=False)


async def _newest(
    bus: Bus, context: CommandContext, environ: Mapping[str, str]
) -> StopsSwitched | None:
    trusted = read_keys(context.trusted_paths(environ))
    switch = StopsSwitch()
    partitions = [Partition(context.topics.control, number) for number in range(ISSUE_PARTITIONS)]
    async for record in read_all(bus, partitions):
        try:
            switch.apply(record, lambda: trusted)
        except (SignatureError, RecordError):
            continue  # services ignore it, too
    return switch.newest
