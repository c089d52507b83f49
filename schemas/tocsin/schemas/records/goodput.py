"""Where the time of a run went, and what is left of it: parts of the view of a run."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from tocsin.schemas.records.events import Model
from tocsin.schemas.records.fields import Millis, Positive, Whole, Word

PARTS: Final = (
    "productive",
    "redone",
    "unknown",
    "starting",
    "data_wait",
    "checkpoint",
    "evaluation",
    "other",
    "stalled",
    "ending",
    "down",
)
"""The parts of a run's time, in the order in which they are shown; fields of `Goodput`."""


class Goodput(Model):
    """Where the time of a run went, over all its incarnations. The parts add up to `wall_s`."""

    started_ms: Millis = Field(default=0, description="start of the first incarnation")
    wall_s: float = Field(default=0.0, ge=0, description="seconds from that start to this view")
    incarnations: Positive = Field(default=1, description="number of incarnations so far")
    productive_s: float = Field(default=0.0, ge=0, description="in steps whose result was kept")
    redone_s: float = Field(
        default=0.0, ge=0, description="in steps that a later incarnation had to repeat"
    )
    unknown_s: float = Field(
        default=0.0, ge=0, description="in steps that may or may not have been kept"
    )
    starting_s: float = Field(
        default=0.0, ge=0, description="from the start of an incarnation to its first step"
    )
    data_wait_s: float = Field(default=0.0, ge=0, description="waiting for data loaders")
    checkpoint_s: float = Field(default=0.0, ge=0, description="writing checkpoints")
    evaluation_s: float = Field(default=0.0, ge=0, description="evaluations and tests")
    other_s: float = Field(default=0.0, ge=0, description="other phases named by the program")
    stalled_s: float = Field(
        default=0.0, ge=0, description="without a step for far longer than a step takes"
    )
    ending_s: float = Field(
        default=0.0, ge=0, description="from the last step of an incarnation to its end"
    )
    down_s: float = Field(default=0.0, ge=0, description="between incarnations")

    def part(self, name: str) -> float:
        """Seconds of one of `PARTS`."""
        seconds: float = getattr(self, f"{name}_s")
        return seconds

    @property
    def share(self) -> float | None:
        """The productive share of the time, 0 to 1; None: no time has passed."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None


class Outlook(Model):
    """The planned steps of an incarnation, and how long a step takes."""

    total_steps: Positive | None = Field(
        default=None, description="planned steps over all incarnations; None if not known"
    )
    done_steps: Whole = Field(default=0, description="steps made before this incarnation")
    source: Word = Field(
        default="", max_length=64, description="who reported it: transformers, lightning, run.plan"
    )
    step_s: float | None = Field(
        default=None,
        ge=0,
        description="time per step including data loading, evaluations and checkpoints, seconds",
    )
    ends_by_ms: Millis | None = Field(
        default=None, description="when the scheduler ends the job: its time limit"
    )
