"""Pages of a list: the newest first, and where the next page begins. Pure.

A cursor names the last item of a page by its time and id. So what is added meanwhile is on no later
page, and nothing is there twice.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar

from tocsin.console.api.problems import ProblemError

T = TypeVar("T")

LARGEST: Final = 1_000
"""Items of a page at most."""

Place = tuple[int, str]
"""Where an item is in the order: its time, Unix milliseconds, and its id."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some items, and the cursor of the next page; None: there are no more."""

    items: Sequence[T]
    next: str | None


def page_of(
    items: Iterable[T], place: Callable[[T], Place], *, limit: int, cursor: str | None
) -> Page[T]:
    """The newest `limit` items after `cursor`.

    Raises:
        ProblemError: the cursor is none that a page has given.
    """
    ordered = sorted(((place(item), item) for item in items), key=lambda one: one[0], reverse=True)
    if cursor is not None:
        after = _place(cursor)
        ordered = [one for one in ordered if one[0] < after]
    shown = ordered[:limit]
    more = len(ordered) > limit
    return Page([item for _, item in shown], _cursor(shown[-1][0]) if more else None)


def time_of(at_ms: int) -> str:
    """RFC 3339 in UTC, with milliseconds: what `since` takes."""
    moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _place(cursor: str) -> Place:
    try:
        at_ms, name = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(at_ms, int) or not isinstance(name, str):
            raise ValueError
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise ProblemError(
            "wrong_request", "cursor: expected the `next` of a page, as it was given"
        ) from None
    return at_ms, name
