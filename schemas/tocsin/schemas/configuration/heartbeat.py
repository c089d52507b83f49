"""The section `heartbeat`: where workers and runs report that they still work."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import Duration, SecretRef, UrlOrSecret, between

SENDER: Final = "{sender}"
"""In a URL, the place of the sender's name."""

# A worker with nothing to do makes a round each second: within less it may make none.
SHORTEST: Final = timedelta(seconds=2)
LONGEST: Final = timedelta(hours=1)

_PLACE: Final = re.compile(r"\{[^}]*\}?")


def _url(value: str | SecretRef) -> str | SecretRef:
    if isinstance(value, str) and set(_PLACE.findall(value)) - {SENDER}:
        raise ValueError(f"expected only the placeholder {SENDER}")
    return value


class HeartbeatConfig(Section):
    """Pings that show that tocsin works. They end when a worker dies, hangs or is cut off.

    Each ping is an HTTP POST to a dead man's switch: a service that alerts people when the pings
    stop, or `tocsin heartbeat check`.
    """

    url: Annotated[UrlOrSecret, AfterValidator(_url)] = Field(
        examples=["http://127.0.0.1:9480/{sender}", {"secret": "heartbeat-url"}]
    )
    """Where to post. `{sender}` stands for the name of the worker or run: `rules@HOST`,
    `actions@HOST` (with the port of `--http`, if there is one) or `run@ID`."""
    every: Annotated[Duration, AfterValidator(between(SHORTEST, LONGEST))] = Field(
        default=timedelta(seconds=60), examples=["60s"]
    )
    """How often, 2s to 1h. Nothing is sent if the last round of a worker is longer ago. Unit: a
    duration."""
    runs: bool = Field(default=True, examples=[False])
    """Whether runs on an embedded bus ping, too, once they are older than `every`."""
