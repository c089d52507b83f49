"""What a worker reports of its configuration, for those who look at the bus."""

from __future__ import annotations

from typing import ClassVar, Final

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, example
from tocsin.schemas.records.fields import Millis, Text, Word

MAX_PROBLEMS: Final = 20
"""Of a configuration with more, the first are named."""

KEY_PREFIX: Final = b"_workers/"

WORKERS_PARTITION: Final = 0
"""Of the control topic."""


def run_worker(run_id: str) -> str:
    """What the helper of a run is called, without its host."""
    return f"run {run_id}"


@EVENT_TYPES.register
class ConfigurationRefused(Data):
    """A worker keeps its old configuration because the new one cannot be used.

    The record is on the partition `WORKERS_PARTITION` of the control topic, under the worker's
    name. A tombstone follows when the worker has applied a configuration, or has ended.
    """

    model_config = example(
        worker="actions@node-1",
        at_ms=1795258072300,
        problems=["tocsin.yaml:5:5: unknown rule 'nonfinit'"],
        more=2,
    )

    event_type: ClassVar[str] = "tocsin.configuration.refused"

    worker: Word = Field(min_length=1, max_length=300, description="service and host")
    at_ms: Millis = Field(description="when it was refused, Unix milliseconds")
    problems: tuple[Text, ...] = Field(
        min_length=1, max_length=MAX_PROBLEMS, description="each with file, line and column"
    )
    more: int = Field(default=0, ge=0, description="how many problems are not listed")

    def is_of_run(self, run_id: str) -> bool:
        """Whether the worker is the helper of that run."""
        return self.worker.startswith(f"{run_worker(run_id)}@")

    @property
    def key(self) -> bytes:
        """Of its record."""
        return KEY_PREFIX + self.worker.encode()
