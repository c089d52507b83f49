"""What is planned about an issue, and what keeps it from being sent. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.configuration.problems import Loc
from tocsin.schemas.configuration.routing.routes import RouteEntry
from tocsin.schemas.configuration.sections import StopOptions
from tocsin.schemas.records.deliveries import HeldBy

STOP: Final = "stop"

Place = Callable[[Loc], str]
"""Says where a part of the config file is: `tocsin.yaml:14:3`."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a notice or a stop is not sent now.

    Attributes:
        by: which stage holds it.
        reason: the sentence for people; it names the line, or the silence, that decided.
        until_ms: until when, if that is known.
    """

    by: HeldBy
    reason: str
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """One thing to do. `action` is the receiver's name, or `stop`.

    Attributes:
        decided_by: the config line, or the default, that asks for it.
        route: the route that asks for it, if one does.
        forbidden: why it is not done at all; it is recorded as suppressed.
        held: why it is not sent now; likewise.
        wait_ms: how long it waits, since another issue may come that explains it.
        occasion: as the ledger's entry has it.
        asks: of a stop, why people must approve it; None: they need not.
    """

    action: str
    kind: str
    decided_by: str
    options: StopOptions | None = None
    forbidden: str | None = None
    route: RouteEntry | None = None
    held: Held | None = None
    wait_ms: int = 0
    occasion: str = ""
    asks: str | None = None

    @property
    def why_not(self) -> str | None:
        """Why it is not sent, whatever the reason; None if it is."""
        return self.forbidden or (None if self.held is None else self.held.reason)
