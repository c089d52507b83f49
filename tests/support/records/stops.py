"""Keys and signed stop commands for tests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tocsin.bus.port import Outgoing, Partition
from tocsin.emitter.stop.verification import SignedCommand
from tocsin.schemas.ids import new_id
from tocsin.schemas.records.events import Event
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.records.wire import meta_of, signature_headers
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import Topics, issue_partition


@dataclass
class StopSigner:
    """Signs stop commands as the action service does."""

    key: SigningKey = field(default_factory=SigningKey.generate)

    def command(self, run_id: str, incarnation: str, **changes: object) -> StopRequested:
        """A command that is good for a minute from now, but for `changes`."""
        now_ms = time.time_ns() // 1_000_000
        fields: dict[str, object] = {
            "command_id": new_id(),
            "run_id": run_id,
            "incarnation": incarnation,
            "issue_id": "issue-1",
            "reason": "a test says so",
            "requested_ms": now_ms,
            "not_after_ms": now_ms + 60_000,
            "nonce": new_id(),
            "grace_s": 20.0,
        }
        return StopRequested.model_validate(fields | changes)

    def sign(self, command: StopRequested) -> SignedCommand:
        """Its bytes, and the signature over them."""
        event = event_of(command)
        key, value = command.key.encode(), event.encode()
        return SignedCommand(key, value, self.key.sign(key, value))


def event_of(command: StopRequested) -> Event[StopRequested]:
    """The CloudEvent that is on the bus."""
    return Event.wrap(
        command, id=command.command_id, source="/actions", time_ms=command.requested_ms
    )


def outgoing(signed: SignedCommand, run_id: str, topics: Topics | None = None) -> Outgoing:
    """The record on the control topic, with a signature if there is one."""
    topics = topics or Topics()
    command = StopSigner().command(run_id, "any")
    headers = meta_of(event_of(command)).headers()
    if signed.signature is not None:
        headers += signature_headers(signed.signature)
    partition = Partition(topics.control, issue_partition(run_id))
    return Outgoing(partition, signed.key, signed.value, headers)
