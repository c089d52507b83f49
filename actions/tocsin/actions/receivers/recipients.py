"""Receivers with several recipients: none is named twice, and a repeat goes to those missing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from tocsin.schemas.configuration.problems import Loc, Problem

_KEPT: Final = 1_000


def between(what: str, values: tuple[str, ...], most: int) -> tuple[str, ...]:
    """The values. Raises ValueError: there are none, or more than `most`."""
    if not 1 <= len(values) <= most:
        raise ValueError(f"expected 1 to {most} {what}")
    return values


def named_twice(to: Sequence[str], loc: Loc) -> Iterator[Problem]:
    """A problem for each recipient of the list at `loc` that is in it already."""
    for index, one in enumerate(to):
        if one in to[:index]:
            message = "this entry is already in the list"
            yield Problem((*loc, index), message, "duplicate_recipient", "remove it")


class PartialRecipients:
    """Whom a delivery has reached so far.

    Kept in memory only: after a crash a repeat goes to all, with the same id as before.
    """

    def __init__(self) -> None:
        self._reached: OrderedDict[str, set[str]] = OrderedDict()

    def missing(self, delivery_id: str, all_of_them: Sequence[str]) -> list[str]:
        """The recipients that a delivery has not reached yet."""
        reached = self._reached.get(delivery_id, set())
        return [one for one in all_of_them if one not in reached]

    def add(self, delivery_id: str, *reached: str) -> None:
        """Note recipients that a delivery has reached."""
        self._reached.setdefault(delivery_id, set()).update(reached)
        if len(self._reached) > _KEPT:
            self._reached.popitem(last=False)

    def discard(self, delivery_id: str) -> None:
        """Forget a delivery that is not retried."""
        self._reached.pop(delivery_id, None)
