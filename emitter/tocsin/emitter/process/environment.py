"""What to capture and where to send it, from the environment of a launched job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

DEFAULT_BUS: Final = "embedded:.tocsin/bus.db"
DEFAULT_PREFIX: Final = "tocsin"
HEARTBEAT_S: Final = 10.0

RUN_ID: Final = "TOCSIN_RUN_ID"
JOB_ID: Final = "TOCSIN_JOB_ID"
BUS: Final = "TOCSIN_BUS"
PREFIX: Final = "TOCSIN_BUS_PREFIX"
LABELS: Final = "TOCSIN_LABELS"
LABELS_JSON: Final = "TOCSIN_LABELS_JSON"
"""All labels of the launcher: a value with a comma cannot be written in `TOCSIN_LABELS`."""
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


def labels_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's labels, and over them those of TOCSIN_LABELS, which the job may have set."""
    try:
        found = json.loads(environ.get(LABELS_JSON, "{}"))
    except ValueError:
        found = {}
    labels = found.items() if isinstance(found, dict) else ()
    return {str(key): str(value) for key, value in labels} | parse_labels(environ.get(LABELS, ""))


def labels_for_job(labels: Mapping[str, str]) -> dict[str, str]:
    """Variables from which `labels_of_job` reads these."""
    pairs = {f"{key}={value}": {key: value} for key, value in labels.items()}
    plain = (text for text, pair in pairs.items() if parse_labels(text) == pair)
    return {LABELS_JSON: json.dumps(dict(labels)), LABELS: ",".join(plain)}


# -- from JSON to plans
