"""What each receiver has been told about each issue: who is told how it ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.actions.decision.consequences import Noticed
from tocsin.schemas.records.deliveries import ACKNOWLEDGED, DIGEST, STOPPED, Delivery
from tocsin.schemas.records.issues import Severity

_TOLD: Final = frozenset({"pending", "delivered"})


@dataclass(slots=True)
class _Line:
    """The notices about one issue to one receiver."""

    kind: str
    decided_by: str
    # By delivery id, how many times the condition had come.
    told: dict[str, int] = field(default_factory=dict)
    severity: Severity | None = None
    newest_ms: int = 0
    over: int = 0
    held: bool = False

    def take(self, delivery: Delivery) -> None:
        if delivery.occasion in (ACKNOWLEDGED, DIGEST, STOPPED):
            return
        if delivery.issue_state == "resolved":
            self.over = max(self.over, delivery.issue_times)
            return
        self.held = self.held or delivery.held is not None
        if delivery.state not in _TOLD:
            self.told.pop(delivery.delivery_id, None)
            return
        self.told[delivery.delivery_id] = delivery.issue_times
        if delivery.created_ms >= self.newest_ms:
            self.newest_ms, self.severity = delivery.created_ms, delivery.severity

    def noticed(self) -> Noticed:
        told = bool(self.told)
        return Noticed(
            self.kind,
            self.decided_by,
            severity=self.severity if told else None,
            told=told,
            open=told and max(self.told.values()) > self.over,
            held=self.held and not told,
        )


class NoticeHistory:
    """By issue and receiver, from the entries of the ledger."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, _Line]] = {}

    def take(self, delivery: Delivery) -> None:
        """A new entry, or a new state of one; none of stops."""
        lines = self._lines.setdefault(delivery.issue_id, {})
        line = lines.get(delivery.action)
        if line is None:
            line = lines[delivery.action] = _Line(delivery.kind, delivery.decided_by)
        line.take(delivery)

    def of(self, issue_id: str) -> Mapping[str, Noticed]:
        """What each receiver has been told about an issue, by name."""
        return {action: line.noticed() for action, line in self._lines.get(issue_id, {}).items()}

    def drop(self, issue_id: str) -> None:
        """Forget an issue."""
        self._lines.pop(issue_id, None)
