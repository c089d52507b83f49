"""Which digest is due, and its entry in the ledger. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic_core import from_json

from tocsin.actions.decision.planned import Held
from tocsin.schemas.ids import delivery_id, digest_id
from tocsin.schemas.records.deliveries import DIGEST, Delivery
from tocsin.schemas.records.digests import Digest
from tocsin.schemas.records.events import Event, clip
from tocsin.schemas.topics import issue_partition

ALL_RUNS: Final = "tocsin-digest"
"""The run of the ledger's entries of digests that are about all runs."""


@dataclass(frozen=True, slots=True)
class DigestReceiver:
    """A receiver of digests: its kind, how often it gets one, and the config line."""

    kind: str
    every_ms: int
    decided_by: str


@dataclass(frozen=True, slots=True)
class DueDigest:
    """A digest for a receiver, of one run or of `ALL_RUNS`."""

    receiver: str
    run_id: str
    from_ms: int
    until_ms: int

    @classmethod
    def last(cls, receiver: str, run_id: str, every_ms: int, now_ms: int) -> DueDigest:
        """The digest of the last interval that is over.

        Intervals start at midnight UTC, if they divide a day: the same for all workers, and after a
        restart.
        """
        until_ms = now_ms // every_ms * every_ms
        return cls(receiver, run_id, until_ms - every_ms, until_ms)

    @property
    def digest_id(self) -> str:
        """What is in the ledger for the id of an issue."""
        return digest_id(self.receiver, self.run_id, self.from_ms, self.until_ms)

    @property
    def delivery_id(self) -> str:
        """The id of its delivery."""
        return delivery_id(self.digest_id, self.receiver, DIGEST)

    @property
    def partition(self) -> int:
        """Who has this partition of the issues topic sends it."""
        return issue_partition(self.run_id)


def why_not_sent(digest: Digest, unreachable: str | None, held: Held | None) -> str | None:
    """Why a digest is not sent; None if it is, at the end of what holds it at the latest."""
    if unreachable is not None:
        return unreachable
    if digest.all_runs == 0:
        return "no run was running in this interval"
    if digest.sent:
        return f"other notices that the receiver got in this interval: {digest.sent:,}"
    return held.reason if held is not None and held.until_ms is None else None


def digest_entry(
    due: DueDigest, digest: Digest, to: DigestReceiver, held: Held | None, now_ms: int
) -> Delivery:
    """The entry of a digest that is to be sent, after what holds it. The next one replaces it."""
    event = Event.wrap(
        digest, id=due.delivery_id, source="/actions", time_ms=due.until_ms, subject="/runs"
    )
    from_ms = now_ms if held is None or held.until_ms is None else held.until_ms
    return Delivery(
        delivery_id=due.delivery_id,
        issue_id=due.digest_id,
        run_id=due.run_id,
        incarnation="",
        rule=DIGEST,
        issue_state="firing",
        occasion=DIGEST,
        action=due.receiver,
        kind=to.kind,
        state="pending",
        reason="to be sent",
        decided_by=clip(to.decided_by, 300),
        created_ms=now_ms,
        updated_ms=now_ms,
        next_attempt_ms=from_ms,
        give_up_ms=from_ms + to.every_ms,
        event=from_json(event.encode()),
    )
