"""When the sender's thread looks at what was handed in: soon if it is rare or urgent, seldom if
not.

Each look takes the interpreter's lock from the training for about half a millisecond (two cores:
steps of 1 ms were slowed by 17 % when each waited 20 ms for company and woke the thread). So what
comes all the time is sent four times a second, and nobody has to wake the thread for it.

Pure: time is a parameter, in seconds of any clock that never goes back.
"""

from __future__ import annotations

import math
from typing import Final

COALESCE_S: Final = 0.02
"""How long what comes by itself waits for company."""

SPACING_S: Final = 0.25
"""From one look to the next while records come all the time."""

EARLY_S: Final = 1.0
"""So long a flow of records is young: people look at the first steps, and rules wait for them."""

CALM_S: Final = 2.0
"""A flow is over after so long without a record."""

HURRIES: Final = 8
"""Urgent looks that may follow each other at once; one more each SPACING_S."""


class Pace:
    """What is known of the flow of records so far."""

    def __init__(self) -> None:
        self._began = -math.inf
        self._last = -math.inf
        self._hurries = float(HURRIES)
        self._counted = -math.inf

    def checked(self, now: float, *, found: bool) -> None:
        """The outbox was checked, and there was something or nothing."""
        if not found:
            return
        if now - self._last > CALM_S:
            self._began = now
        self._last = now

    def steady(self, now: float) -> bool:
        """Whether records come all the time, such that nobody has to announce one."""
        return now - self._last <= CALM_S and now - self._began >= EARLY_S

    def hurry(self, now: float) -> bool:
        """Whether something urgent may go at once; if so, one hurry less is left."""
        if now > self._counted:
            gained = (now - self._counted) / SPACING_S
            self._hurries = min(self._hurries + gained, float(HURRIES))
            self._counted = now
        if self._hurries < 1:
            return False
        self._hurries -= 1
        return True
