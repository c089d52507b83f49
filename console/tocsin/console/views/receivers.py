"""Receivers that fail and are left alone, as the ledger shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.text import plain_line, time_text


@dataclass(frozen=True, slots=True)
class Suspended:
    """Until when, and how many deliveries wait for it."""

    until_ms: int
    waiting: int


def suspended_receivers(deliveries: Iterable[Delivery]) -> dict[str, Suspended]:
    """The receivers whose newest attempt left their circuit open, if something waits for them."""
    newest: dict[str, tuple[int, int | None]] = {}
    waiting: dict[str, int] = {}
    for one in deliveries:
        if not one.final:
            waiting[one.action] = waiting.get(one.action, 0) + 1
        if one.last_attempts:
            attempt = one.last_attempts[-1]
            seen = (attempt.at_ms + attempt.duration_ms, one.suspended_until_ms)
            if one.action not in newest or newest[one.action][0] <= seen[0]:
                newest[one.action] = seen
    return {
        action: Suspended(until_ms, waiting[action])
        for action, (_, until_ms) in sorted(newest.items())
        if until_ms is not None and action in waiting
    }


def suspended_lines(suspended: Mapping[str, Suspended]) -> Iterator[str]:
    """A line for each."""
    for action, one in suspended.items():
        many = f"{one.waiting:,} deliver{'y waits' if one.waiting == 1 else 'ies wait'}"
        yield (
            f"receiver {plain_line(action)} fails, its circuit is open: {many}; "
            f"one is attempted after {time_text(one.until_ms)}"
        )
