"""The section `time_windows`: hours of the week, for routes and receivers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import some

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES: Final = 24 * 60

_DAY: Final = f"(?:{'|'.join(DAYS)})"
_SPAN: Final = f"{_DAY}(?:-{_DAY})?"
_DAYS: Final = f"{_SPAN}(?:,{_SPAN})*"
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIMES: Final = rf"{_TIME}-(?:{_TIME}|24:00)"
_PATTERN: Final = rf"(?:{_DAYS}(?: {_TIMES})?|{_TIMES})"
_ZONE: Final = r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+){0,2}"
_PARTS: Final = re.compile(rf"(?P<days>{_DAYS})?(?: ?(?P<times>{_TIMES}))?")


@dataclass(frozen=True, slots=True)
class WeeklyHours:
    """The same hours on some days of each week.

    Attributes:
        days: on which they begin, 0 is Monday.
        start: minutes after midnight, local time.
        end: likewise; when it is not after `start`, they end on the next day.
    """

    days: frozenset[int]
    start: int
    end: int


def parse_weekly(text: object) -> WeeklyHours:
    """`mon-fri 08:00-18:00`, `sat,sun`, `22:00-06:00` (on each day, until the next morning).

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    matched = re.fullmatch(_PATTERN, text) if isinstance(text, str) and len(text) <= 100 else None
    parts = _PARTS.fullmatch(str(text)) if matched else None
    if parts is None:
        raise ValueError("expected days and hours: mon-fri 08:00-18:00, sat,sun or 22:00-06:00")
    days = frozenset(_days(parts["days"])) if parts["days"] else frozenset(range(len(DAYS)))
    if parts["times"] is None:
        return WeeklyHours(days, 0, DAY_MINUTES)
    start, end = (60 * int(time[:2]) + int(time[3:]) for time in parts["times"].split("-"))
    if start == end:
        raise ValueError("expected hours that end later than they start, or on the next day")
    return WeeklyHours(days, start, end)


def _days(text: str) -> set[int]:
    found = set()
    for span in text.split(","):
        first, _, last = span.partition("-")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        found |= {day % len(DAYS) for day in range(begin, end + 1 + (end < begin) * len(DAYS))}
    return found


def _checked(value: object) -> str:
    parse_weekly(value)
    return str(value)


Weekly = Annotated[
    str,
    PlainValidator(_checked),
    WithJsonSchema({"type": "string", "pattern": f"^{_PATTERN}$"}),
]
"""Days and hours of the week, as `parse_weekly` reads them."""


def _zone(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(_ZONE, value):
        raise ValueError("expected the name of a time zone, like Europe/Berlin")
    return value


Zone = Annotated[
    str, PlainValidator(_zone), WithJsonSchema({"type": "string", "pattern": f"^{_ZONE}$"})
]
"""The name of a time zone; whether this machine knows it is asked by whoever needs it."""


class TimeWindow(Section):
    """Hours of the week. Routes and receivers name it in `active` or `mute`."""

    weekly: Annotated[tuple[Weekly, ...], AfterValidator(some)] = Field(
        strict=False, examples=[["mon-fri 08:00-18:00", "sat 10:00-14:00"]]
    )
    """Days and hours, as `mon-fri 08:00-18:00`, `sat,sun` or `22:00-06:00`: without days on each
    day, without hours all day. Hours that end before they start end on the next day."""
    time_zone: Zone = Field(default="UTC", examples=["Europe/Berlin"])
    """The time zone of these hours, by its name in the IANA database."""
