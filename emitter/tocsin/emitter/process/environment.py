"""What to capture and where to send it, from the environment of a launched job."""

from __future__ import annotations

from typing import Final

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
SCHEDULER: Final = "TOCSIN_SCHEDULER"
LAUNCHER: Final = "TOCSIN_LAUNCHER"
AFTER_STOP: Final = "TOCSIN_AFTER_STOP"
"""Why the incarnation before was stopped, for the job itself."""


def parse_labels(text: str) -> dict[str, str]:
    """`k=v,k2=v2` as a mapping; parts without '=' are left out."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


# -- from JSON to plans
