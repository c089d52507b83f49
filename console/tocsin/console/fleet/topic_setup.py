"""`tocsin bus init` with settings of a fleet, and `tocsin bus acls`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tocsin.bus.kafka.permissions import Permission, Role, all_permissions
from tocsin.bus.port import Bus, TopicState
from tocsin.console.context import CommandContext
from tocsin.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from tocsin.bus.kafka.bus import KafkaBus


async def set_up(
    context: CommandContext, *, replication: int | None, apply: bool
) -> tuple[str, Sequence[TopicState], Sequence[str]]:
    """Create what is missing, and with `apply` change settings that differ.

    Returns the bus, the topics afterwards, and what was changed of those that were there.

    Raises:
        ConfigurationError: `replication` is for Kafka, or there are not so many brokers.
        BusError: the bus does not answer, or this user may not do it.
    """
    specs = context.topics.specs()
    async with context.open_bus(create=True) as bus:
        if context.embedded:
            if replication is not None:
                raise ConfigurationError("--replication: an embedded bus is one file on one disk")
            return bus.url, await bus.init(specs), ()
        states, changed = await _kafka(bus).set_up(specs, replication=replication, apply=apply)
        return bus.url, states, changed


async def grant(
    context: CommandContext, principals: Mapping[Role, Sequence[str]], *, apply: bool
) -> tuple[list[Permission], Sequence[Permission]]:
    """The rights of these principals, and those of them that were missing and, with `apply`, are
    given to them now.

    Raises:
        ConfigurationError: nobody is named, or the bus is a file.
        BusError: the bus does not answer, has no authorizer, or this user may not do it.
    """
    if context.embedded:
        raise ConfigurationError(
            "an embedded bus has no permissions but those of its file; --bus kafka://HOST:PORT"
        )
    for principal in (one for named in principals.values() for one in named):
        kind, _, name = principal.partition(":")
        if not (kind and name and principal.isprintable()) or "'" in principal:
            raise ConfigurationError(f"{principal!r}: expected a principal such as User:ana")
    wanted = all_permissions(context.topics, principals)
    if not wanted:
        raise ConfigurationError("nobody is named: for example --trainer User:train")
    if not apply:
        return wanted, ()
    async with context.open_bus() as bus:
        return wanted, await _kafka(bus).grant(wanted)


def acls_text(wanted: Sequence[Permission], server: str) -> str:
    """A command on each line."""
    return "\n".join(one.command(server) for one in wanted)


def acls_json(wanted: Sequence[Permission], given: Sequence[Permission], *, applied: bool) -> str:
    """For programs; `given` are those of the wanted rights that were missing."""
    facts = {
        "version": 1,
        "applied": applied,
        "acls": [asdict(one) for one in wanted],
        "given": [asdict(one) for one in given],
    }
    return json.dumps(facts, indent=2)


def _kafka(bus: Bus) -> KafkaBus:
    # Here, since it needs the extra of Kafka.
    from tocsin.bus.kafka.bus import KafkaBus

    assert isinstance(bus, KafkaBus)
    return bus
