"""`tocsin drill`: a marked test message to receivers, through the real action service."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from tocsin.console.context import CommandContext
from tocsin.console.services.private_delivery import private_delivery
from tocsin.console.views.issues import delivery_facts
from tocsin.console.views.stop_targets import TargetSeen, target_facts
from tocsin.schemas.ids import incarnation_id, issue_id, new_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Series, Subject

RUN: Final = "tocsin-drill"
RULE: Final = "drill"
LABELS: Final[Mapping[str, str]] = {"drill": "true"}
"""So that a receiver which is a program can tell a drill from an alarm."""


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
    async with private_delivery(
        context,
        receivers,
        rule=RULE,
        notify=notify,
        allow_cidr=allow_cidr,
        allow_command=allow_command,
    ) as delivery:
        await delivery.publish(drill_issue(unix_ms()))
        return await delivery.finish(RUN, timeout_s)


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


def as_json(deliveries: Sequence[Delivery], targets: Sequence[TargetSeen] = ()) -> str:
    """The deliveries as JSON, as `tocsin issues --json` has them, and the stop targets."""
    facts = [delivery_facts(delivery) for delivery in deliveries]
    document = {"version": 1, "deliveries": facts, "targets": target_facts(targets)}
    return json.dumps(document, indent=2)


def _row(delivery: Delivery) -> tuple[str, str, str, str]:
    attempts = "1 attempt" if delivery.attempts == 1 else f"{delivery.attempts} attempts"
    return delivery.action, delivery.kind, delivery.state, attempts
