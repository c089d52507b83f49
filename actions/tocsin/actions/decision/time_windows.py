"""The stage of the time windows: hours of the week in which nobody is notified. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from tocsin.actions.decision.planned import Held
from tocsin.schemas.configuration.routing.time_windows import DAY_MINUTES, TimeWindow, parse_weekly
from tocsin.schemas.text import time_text

_WEEK: Final = 7


class TimeWindows:
    """The windows of a configuration, by name.

    Raises:
        ZoneInfoNotFoundError: this machine does not know a time zone.
    """

    def __init__(self, windows: Mapping[str, TimeWindow]) -> None:
        self._hours = {
            name: [parse_weekly(text) for text in window.weekly] for name, window in windows.items()
        }
        self._zones = {name: ZoneInfo(window.time_zone) for name, window in windows.items()}

    def open(self, name: str, now_ms: int) -> bool:
        """Whether a window is open."""
        local = datetime.fromtimestamp(now_ms / 1000, self._zones[name])
        day, minute = local.weekday(), 60 * local.hour + local.minute
        return any(
            (day in hours.days and hours.start <= minute and (minute < hours.end or overnight))
            or (overnight and (day - 1) % _WEEK in hours.days and minute < hours.end)
            for hours in self._hours[name]
            for overnight in [hours.end < hours.start]
        )

    def held(
        self, active: Sequence[str], mute: Sequence[str], now_ms: int, where: str
    ) -> Held | None:
        """What holds a notice now, of a route or receiver (`where` is its line) with these windows.

        `until_ms` is when none of them does so any more.
        """
        if (what := self._closed(active, mute, now_ms)) is None:
            return None
        names = {*active, *mute}
        ends = sorted({at for name in names for at in self._edges(name, now_ms)})
        until = next((at for at in ends if self._closed(active, mute, at) is None), None)
        again = "" if until is None else f" until {time_text(until)}"
        return Held("time_window", f"{what}{again} ({where})", until)

    def _closed(self, active: Sequence[str], mute: Sequence[str], now_ms: int) -> str | None:
        muting = next((name for name in mute if self.open(name, now_ms)), None)
        if muting is not None:
            return f"in the time window {muting}"
        if active and not any(self.open(name, now_ms) for name in active):
            return f"outside the time window {' or '.join(active)}"
        return None

    def _edges(self, name: str, now_ms: int) -> Iterator[int]:
        """The moments of the week to come at which a window may open or close."""
        zone = self._zones[name]
        today = datetime.fromtimestamp(now_ms / 1000, zone).replace(tzinfo=None)
        midnight = today.replace(hour=0, minute=0, second=0, microsecond=0)
        for days in range(_WEEK + 2):
            for hours in self._hours[name]:
                for minute in (hours.start, hours.end % DAY_MINUTES):
                    local = midnight + timedelta(days=days, minutes=minute)
                    at = local.replace(tzinfo=zone).astimezone(UTC)
                    if (at_ms := round(1000 * at.timestamp())) > now_ms:
                        yield at_ms
