"""`tocsin drill`: a marked test message to receivers, through the real action service.

The service is the one that runs in production, on a bus of its own in a temporary folder: so the
ledger, the retries, the address guard and the message are the real ones, and no bus of runs gets a
record of it.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tocsin.actions.delivery.records import issue_record
from tocsin.actions.receivers.notify_option import parse_addresses
from tocsin.actions.service import build_actions_service
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Bus
from tocsin.console.context import CommandContext
from tocsin.console.publication import publish
from tocsin.console.services.workers import SOFTWARE
from tocsin.console.views.bus_view import read_view
from tocsin.console.views.issues import delivery_facts
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.problems import did_you_mean
from tocsin.schemas.configuration.sections import ActionEntry, RuleEntry
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.ids import incarnation_id, issue_id, new_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Series, Subject
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import Topics

RUN: Final = "tocsin-drill"
RULE: Final = "drill"
LABELS: Final[Mapping[str, str]] = {"drill": "true"}
"""So that a receiver which is a program can tell a drill from an alarm."""

_STARTED_S: Final = 10.0


async def drill(
    context: CommandContext,
    receivers: Sequence[str],
    *,
    notify: Sequence[str] = (),
    allow_cidr: Sequence[str] = (),
    allow_command: Sequence[str] = (),
    timeout_s: float,
) -> list[Delivery]:
    """Send a test message to receivers of the configuration, all of them if none is named.

    Returns:
        The state of each delivery after `timeout_s` at most, in the order of the receivers.

    Raises:
        ConfigurationError: there is no such receiver, or one cannot be used.
        MissingExtra: what a receiver needs is not installed.
    """
    addressed = list(parse_addresses(notify))
    chosen = _chosen(context.config, receivers, or_all=not addressed)
    actions = tuple(
        ActionEntry(kind="receiver", receiver=name, loc=("receivers", name)) for name in chosen
    )
    config = context.config.model_copy(
        update={
            "receivers": {name: context.config.receivers[name] for name in chosen},
            "rules": (RuleEntry(name=RULE, use=RULE, actions=actions),),
        }
    )
    topics = Topics()
    with tempfile.TemporaryDirectory(prefix="tocsin-drill-") as folder:
        async with EmbeddedBus(Path(folder) / "bus.db") as bus:
            await bus.init(topics.specs())
            service = build_actions_service(
                topics,
                config,
                bus=bus,
                # It signs nothing: a drill stops no run.
                key=SigningKey.generate(),
                secrets=context.secrets,
                embedded=context.embedded,
                notify=notify,
                stop=False,
                allow_cidr=allow_cidr,
                allow_command=allow_command,
                config_path=context.loaded.path,
                software=SOFTWARE,
            )
            worker = Worker(
                bus,
                service,
                topics=topics,
                group="drill",
                settings=WorkerSettings(software=SOFTWARE, checkpoint_s=0.1),
            )
            running = asyncio.create_task(worker.run(), name="tocsin-drill")
            try:
                await _publish(bus, topics)
                await worker.caught_up(_STARTED_S)
                await service.drain(timeout_s)
            finally:
                worker.stop()
                await running
            view = await read_view(bus, topics, RUN)
    found = {delivery.action: delivery for delivery in view.deliveries}
    return [found[name] for name in (*chosen, *addressed) if name in found]


def drill_issue(now_ms: int) -> IssueFiring:
    """The issue of a drill, with all that a message can show. Its id is new each time."""
    incarnation = incarnation_id(RUN, new_id(), 0, 0)
    values = [2.4 * math.exp(-step / 40) for step in range(56)] + [2.9, 4.4, 7.1, math.nan]
    return IssueFiring(
        run_id=RUN,
        incarnation=incarnation,
        issue_id=issue_id(RUN, incarnation, RULE, 1, "1"),
        rule=RULE,
        use=RULE,
        rule_version=1,
        severity="warning",
        subject=Subject(kind="loss", name="loss"),
        reason=f"this is a drill, started by `tocsin drill` on {socket.gethostname()[:100]}; "
        "no training is affected",
        remedy="Nothing. If you can read this, the receiver works.",
        first_step=58,
        step=59,
        onset_ms=now_ms,
        at_ms=now_ms,
        labels=dict(LABELS),
        evidence=Evidence(
            facts=(Fact(name="loss", value=7.1), Fact(name="limit", value=5.0)),
            series=Series(name="loss", steps=tuple(range(60)), values=tuple(values), limit=5.0),
            explanation="made-up numbers, to show how a message looks",
        ),
    )


def as_text(deliveries: Sequence[Delivery], timeout_s: float) -> str:
    """A line for each receiver: its name, kind, state and why."""
    rows = [_row(delivery) for delivery in deliveries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, delivery in zip(rows, deliveries, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        late = "" if delivery.final else f"; not delivered within {timeout_s:g} s"
        lines.append(f"{cells}  {delivery.reason}{late}")
    return "\n".join(lines)


def as_json(deliveries: Sequence[Delivery]) -> str:
    """The deliveries as JSON, as `tocsin issues --json` has them."""
    facts = [delivery_facts(delivery) for delivery in deliveries]
    return json.dumps({"version": 1, "deliveries": facts}, indent=2)


def _row(delivery: Delivery) -> tuple[str, str, str, str]:
    attempts = "1 attempt" if delivery.attempts == 1 else f"{delivery.attempts} attempts"
    return delivery.action, delivery.kind, delivery.state, attempts


def _chosen(config: Config, named: Sequence[str], *, or_all: bool) -> list[str]:
    for name in named:
        if name not in config.receivers:
            hint = did_you_mean(name, config.receivers)
            raise ConfigurationError(
                f"no receiver {name!r} in the configuration" + (f"; try {hint}" if hint else "")
            )
    if not named and or_all and not config.receivers:
        raise ConfigurationError(
            "no receiver: name one in tocsin.yaml, or with --notify mailto:me@example.com"
        )
    return list(dict.fromkeys(named)) or (list(config.receivers) if or_all else [])


async def _publish(bus: Bus, topics: Topics) -> None:
    now_ms = unix_ms()
    await publish(bus, [issue_record(topics, drill_issue(now_ms), now_ms)])
