"""What to capture and where to send it, as the environment of a launched job says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

DEFAULT_EVERY: Final[Mapping[str, int]] = {
    "activations": 100,
    "gradients": 10,
    "weights": 10,
}
"""Steps between two full rows of a collection. `updates` come with the weights."""

DEFAULT_BUS: Final = "embedded:.tocsin/bus.db"
DEFAULT_PREFIX: Final = "tocsin"
HEARTBEAT_S: Final = 10.0

RUN_ID: Final = "TOCSIN_RUN_ID"
JOB_ID: Final = "TOCSIN_JOB_ID"
BUS: Final = "TOCSIN_BUS"
PREFIX: Final = "TOCSIN_BUS_PREFIX"
LABELS: Final = "TOCSIN_LABELS"
CAPTURE: Final = "TOCSIN_CAPTURE"
RUNTIME_DIR: Final = "TOCSIN_RUNTIME_DIR"
LAUNCHER: Final = "TOCSIN_LAUNCHER"


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """How often each collection is summarised, in steps."""

    every: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_EVERY))

    @property
    def collections(self) -> tuple[str, ...]:
        """What is captured, by name."""
        return ("losses", *sorted(self.every))

    def due(self, collection: str, step: int) -> bool:
        """Whether this collection is summarised at this step."""
        return step % self.every[collection] == 0


def capture_settings(text: str) -> CaptureSettings:
    """Read the `capture` section as JSON; empty text gives the defaults.

    Collections that this release does not capture are left out; `check` has said so before.

    Raises:
        ValueError: it is not JSON of that shape.
    """
    every = dict(DEFAULT_EVERY)
    if not text:
        return CaptureSettings(every)
    section = json.loads(text)
    collections = section.get("collections", {}) if isinstance(section, dict) else None
    if not isinstance(collections, dict):
        raise ValueError('expected {"collections": {"gradients": {"every": 10}}}')
    for name, options in collections.items():
        steps = options.get("every") if isinstance(options, dict) else None
        if steps is None:
            continue
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"collection {name!r}: expected 'every' of at least 1 step")
        if name in every:
            every[name] = steps
    return CaptureSettings(every)


def parse_labels(text: str) -> dict[str, str]:
    """`k=v,k2=v2` as a mapping; parts without '=' are left out."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
