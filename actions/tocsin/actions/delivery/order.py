"""The order of an issue's states at one receiver: which wait, which are not sent any more. Pure.

The ledger's entries decide alone, so that it is the same after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, get_args

from tocsin.schemas.records.deliveries import ACKNOWLEDGED, REPEAT, STOPPED, Delivery
from tocsin.schemas.records.issues import IssueState

SUPERSEDED: Final = "superseded: a later state of the issue is sent instead"

_STATES: Final[Sequence[IssueState]] = get_args(IssueState)
"""In the order in which an issue has them, each time that its condition comes."""


_FIRST: Final = (0, 0, False)
_FOLLOW: Final = frozenset({ACKNOWLEDGED, REPEAT, STOPPED})
"""Occasions of notices that follow the one of the same state, and do not replace it."""


def waits(delivery: Delivery, line: Iterable[Delivery], started: Collection[str]) -> bool:
    """Whether a delivery is not to start yet.

    Each earlier one in `line` (the pending ones of its issue and receiver) has its first attempt
    before it, and none is under way (`started`). It does not wait for the retries of another, nor
    for a repeat: that waits for its time, and then for all others.
    """
    mine = _position(delivery)
    return any(
        (other.attempts == 0 and other.occasion != REPEAT) or other.delivery_id in started
        for other in line
        if _position(other) < mine
    )


def superseded(line: Sequence[Delivery], started: Collection[str]) -> list[Delivery]:
    """The deliveries not to be sent any more, to a receiver that keeps one alert per issue.

    `line` has the pending ones of an issue and receiver. After a later state, an earlier one would
    set the alert back: one that has ended would stay open for good. What is under way (`started`)
    cannot be taken back; ask again when the attempt has ended.
    """
    states = (_position(one) for one in line if one.occasion not in _FOLLOW)
    newest = max(states, default=_FIRST)
    return [one for one in line if _position(one) < newest and one.delivery_id not in started]


def follows(other: Delivery, delivery: Delivery) -> bool:
    """Whether `other` is a later state of the same issue to the same receiver."""
    same = (other.issue_id, other.action) == (delivery.issue_id, delivery.action)
    return same and _position(other) > _position(delivery)


def _position(delivery: Delivery) -> tuple[int, int, bool]:
    state = _STATES.index(delivery.issue_state)
    return delivery.issue_times, state, delivery.occasion in _FOLLOW
