"""What services call the messages about issues, so that later states can edit them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.deliveries import Delivery

MAX_MESSAGES: Final = 20_000
"""Messages that are remembered; of an older one's issue the next state is a message of its own."""


@dataclass(slots=True)
class MessageHandles:
    """By issue and receiver. The ledger's entries hold them, so they survive a restart."""

    _known: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def learn(self, delivery: Delivery) -> None:
        """Take a new state of a delivery in."""
        if delivery.handle is not None:
            line = (delivery.issue_id, delivery.action)
            self._known.pop(line, None)
            self._known[line] = (delivery.handle, delivery.run_id)
            if len(self._known) > MAX_MESSAGES:
                del self._known[next(iter(self._known))]

    def get(self, delivery: Delivery) -> str | None:
        """The message about the issue of a delivery, at its receiver."""
        found = self._known.get((delivery.issue_id, delivery.action))
        return None if found is None else found[0]

    def drop(self, gone: Callable[[str], bool]) -> None:
        """Forget the runs that are gone."""
        self._known = {line: one for line, one in self._known.items() if not gone(one[1])}
