"""A condition of a node that goes on and off many times is one issue, not many."""

from __future__ import annotations

from dataclasses import dataclass

from tocsin.stream_rules.outcomes import Moment


@dataclass(slots=True)
class Hysteresis:
    """Opens at once, and closes only when its condition has been gone for long enough.

    `episode` and `first_ms` are of the record that opened it; `gone_at` is since when the condition
    is gone, on the clock of whoever asks.
    """

    episode: str = ""
    first_ms: int = 0
    gone_at: float | None = None

    @property
    def open(self) -> bool:
        """Whether an issue is open."""
        return bool(self.episode)

    def holds(self, at: Moment) -> None:
        """The condition holds now."""
        self.gone_at = None
        if not self.open:
            self.episode, self.first_ms = f"{at.boot}/{at.seq}", at.now_ms

    def doubtful(self) -> None:
        """Neither true nor clearly false: an open episode stays open."""
        self.gone_at = None

    def gone(self, now: float, *, least: float) -> bool:
        """The condition is gone at `now`. Whether it is closed: gone for `least`, or never open."""
        if not self.open:
            return True
        if self.gone_at is None:
            self.gone_at = now
        if now - self.gone_at < least:
            return False
        self.episode, self.gone_at = "", None
        return True
