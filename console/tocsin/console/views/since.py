"""What `--since` means, in each command and in the API: only what changed at that time or later.

A run changed when something was last heard of it, an issue and a delivery with their newest state.
Pure.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from tocsin.schemas.configuration.values import parse_duration, parse_moment
from tocsin.schemas.errors import ConfigurationError

_SAMPLE: Final = "a duration like 30s, 10m, 2h or 7d, or a time with its zone"


def since_ms(text: str | None, now_ms: int, *, name: str = "--since") -> int | None:
    """The time that `text` means, Unix milliseconds; None for None.

    A duration reaches back from `now_ms`. `name` is what the user gave it as, for the error.

    Raises:
        ConfigurationError: it is neither a duration nor a time with its zone.
    """
    if text is None:
        return None
    try:
        return max(0, now_ms - parse_duration(text) // timedelta(milliseconds=1))
    except ValueError:
        pass
    try:
        # A `+` in a URL that nobody quoted arrives as a space.
        moment = parse_moment(text.strip().replace(" ", "+") if "T" in text else text)
    except ValueError:
        raise ConfigurationError(
            f"{name} {text[:60]!r}: expected {_SAMPLE}, like 2026-12-01T00:00:00Z"
        ) from None
    return round(1000 * moment.timestamp())
