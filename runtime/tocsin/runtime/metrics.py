"""Counters and gauges of a service, by names that are written down here alone.

Kept by hand in a dictionary: nothing has to be installed to count, and the text that Prometheus
reads is a few lines.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

RECORDS: Final = "tocsin_records_total"
DEAD_LETTERS: Final = "tocsin_dead_letters_total"
OUTPUTS: Final = "tocsin_outputs_total"
OVERSIZE: Final = "tocsin_oversize_outputs_total"
CHECKPOINTS: Final = "tocsin_checkpoints_total"
CHECKPOINT_SECONDS: Final = "tocsin_checkpoint_seconds_total"
APPLY_SECONDS: Final = "tocsin_apply_seconds_total"
RESTORES: Final = "tocsin_restores_total"
RESTORE_SECONDS: Final = "tocsin_restore_seconds_total"
FENCED: Final = "tocsin_fenced_total"
BUS_AWAY: Final = "tocsin_bus_unavailable_total"
PARTITIONS: Final = "tocsin_partitions"
DELIVERIES: Final = "tocsin_deliveries_total"
ATTEMPTS: Final = "tocsin_delivery_attempts_total"
PENDING: Final = "tocsin_deliveries_pending"

HELP: Final[Mapping[str, str]] = {
    RECORDS: "Records applied",
    DEAD_LETTERS: "Records that could not be used",
    OUTPUTS: "Records published before a commit: issues, ledger entries",
    OVERSIZE: "Own records over the bus's limit, left out",
    CHECKPOINTS: "Checkpoints completed",
    CHECKPOINT_SECONDS: "Time spent in checkpoints",
    APPLY_SECONDS: "Time spent in applying records and firing timers",
    RESTORES: "Partitions restored",
    RESTORE_SECONDS: "Time spent in restoring partitions",
    FENCED: "Times this member was found to have left its group",
    BUS_AWAY: "Times the bus did not answer",
    PARTITIONS: "Input partitions owned now",
    DELIVERIES: "Deliveries that reached a final state, by kind and state",
    ATTEMPTS: "Attempts to deliver, by kind",
    PENDING: "Deliveries that are not final",
}
"""All metrics and what they mean. Names that end in `_total` are counters, the others gauges."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    """The figures of one process. Safe to be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[_Key, float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count on. Raises KeyError for a name that is not in `HELP` (a bug)."""
        HELP[name]
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Raises KeyError for a name that is not in `HELP` (a bug)."""
        HELP[name]
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] = value

    def value(self, name: str, **labels: str) -> float:
        """One figure; 0 if it was never counted."""
        with self._lock:
            return self._values.get((name, tuple(sorted(labels.items()))), 0)

    def text(self) -> str:
        """All of them in the text format of Prometheus."""
        with self._lock:
            values = sorted(self._values.items())
        lines: list[str] = []
        last = ""
        for (name, labels), value in values:
            if name != last:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}"]
                last = name
            shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
            lines.append(f"{name}{{{shown}}} {value:g}" if shown else f"{name} {value:g}")
        return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
