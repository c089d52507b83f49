"""Who has gone silent: decided from when each sender pinged, and the time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

MAX_SENDERS: Final = 1_000
"""Senders that are followed at the same time."""


@dataclass(frozen=True, slots=True)
class Change:
    """A sender that has gone silent, or is back; and why it is reported.

    Attributes:
        since_ms: when it was last heard before, or first expected: the same for both states.
    """

    sender: str
    state: Literal["silent", "back"]
    since_ms: int
    reason: str


@dataclass(slots=True)
class _Sender:
    heard_ms: int
    expected: bool
    pinged: bool = False
    silent: bool = False


class Senders:
    """What is known of the senders.

    Args:
        after_ms: how long a sender may be silent.
        expect: senders that are followed from the beginning, and never forgotten.
    """

    def __init__(self, *, after_ms: int, expect: Iterable[str] = (), now_ms: int) -> None:
        self._after_ms = after_ms
        self._senders = {name: _Sender(now_ms, expected=True) for name in expect}
        self._last_check_ms = now_ms

    def pinged(self, name: str, now_ms: int, *, ending: bool = False) -> Change | None:
        """A ping came. The change, if the sender was silent before.

        With `ending` it reports its end: nobody waits for another ping, unless it is expected.

        Raises:
            TooManySenders: it would be one more than `MAX_SENDERS`.
        """
        sender = self._senders.get(name)
        if sender is None:
            if ending:
                return None
            if len(self._senders) >= MAX_SENDERS:
                raise TooManySenders(f"{MAX_SENDERS:,} senders are followed already")
            sender = self._senders[name] = _Sender(now_ms, expected=False)
        was_silent, since_ms = sender.silent, sender.heard_ms
        sender.heard_ms, sender.pinged, sender.silent = now_ms, True, False
        if ending and not sender.expected:
            del self._senders[name]
        if not was_silent:
            return None
        reason = f"{name} pings again, after {_seconds(now_ms - since_ms)}"
        return Change(name, "back", since_ms, reason)

    def check(self, now_ms: int) -> list[Change]:
        """Who has gone silent since the last look; each outage is reported once.

        After a pause of this process (a suspended machine) nobody could be heard: all senders get
        that time, too.
        """
        paused_ms = now_ms - self._last_check_ms
        self._last_check_ms = now_ms
        if paused_ms > self._after_ms // 2:
            for sender in self._senders.values():
                if not sender.silent:
                    sender.heard_ms = min(sender.heard_ms + paused_ms, now_ms)
        changes = []
        for name, sender in self._senders.items():
            if not sender.silent and now_ms - sender.heard_ms > self._after_ms:
                sender.silent = True
                words = "no heartbeat for" if sender.pinged else "no heartbeat yet, waited"
                reason = (
                    f"{words} {_seconds(now_ms - sender.heard_ms)}: "
                    f"{name} is dead, hangs, or is cut off"
                )
                changes.append(Change(name, "silent", sender.heard_ms, reason))
        return changes


class TooManySenders(Exception):
    """More senders than can be followed: mostly names that change at each start."""


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.0f} s"
