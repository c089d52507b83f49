"""The notices that each receiver has got about each issue: who is notified of its end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tocsin.actions.decision.consequences import Noticed
from tocsin.schemas.records.deliveries import ACKNOWLEDGED, DIGEST, STOPPED, Delivery
from tocsin.schemas.records.issues import Severity

_NOTIFYING: Final = frozenset({"pending", "delivered"})


@dataclass(slots=True)
class _Line:
    """The notices about one issue to one receiver."""

    kind: str
    decided_by: str
    # By delivery id, how many times the condition had come.
    notices: dict[str, int] = field(default_factory=dict)
    severity: Severity | None = None
    newest_ms: int = 0
    # The highest of these numbers whose end was decided on, and whose notice was held.
    over: int = 0
    held: int = 0

    def apply(self, delivery: Delivery) -> None:
        if delivery.occasion in (ACKNOWLEDGED, DIGEST, STOPPED):
            return
        if delivery.issue_state == "resolved":
            self.over = max(self.over, delivery.issue_times)
            return
        if delivery.held is not None:
            self.held = max(self.held, delivery.issue_times)
        if delivery.state not in _NOTIFYING:
            self.notices.pop(delivery.delivery_id, None)
            return
        self.notices[delivery.delivery_id] = delivery.issue_times
        if delivery.created_ms >= self.newest_ms:
            self.newest_ms, self.severity = delivery.created_ms, delivery.severity

    @property
    def open(self) -> bool:
        """Whether the receiver was notified of the start, and not yet of the end."""
        return self._newest > self.over

    @property
    def _newest(self) -> int:
        """Which time of the condition the receiver was notified of; 0: none."""
        return max(self.notices.values(), default=0)

    def noticed(self) -> Noticed:
        # One that came back and was held then is a new one: the notices about the time before
        # say nothing about it.
        held = self.held > self._newest
        notified = bool(self.notices) and not held
        return Noticed(
            self.kind,
            self.decided_by,
            severity=self.severity if notified else None,
            notified=notified,
            open=self.open,
            held=held,
        )


class NoticeHistory:
    """By issue and receiver, from the entries of the ledger."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, _Line]] = {}

    def apply(self, delivery: Delivery) -> None:
        """A new entry, or a new state of one; none of stops."""
        lines = self._lines.setdefault(delivery.issue_id, {})
        line = lines.get(delivery.action)
        if line is None:
            line = lines[delivery.action] = _Line(delivery.kind, delivery.decided_by)
        line.apply(delivery)

    def by_receiver(self, issue_id: str) -> Mapping[str, Noticed]:
        """The notices about an issue that each receiver has got, by name."""
        return {action: line.noticed() for action, line in self._lines.get(issue_id, {}).items()}

    def is_open(self, issue_id: str) -> bool:
        """Whether somebody is still to be notified of the end of an issue."""
        return any(line.open for line in self._lines.get(issue_id, {}).values())

    def drop(self, issue_id: str) -> None:
        """Forget an issue."""
        self._lines.pop(issue_id, None)
