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
    wall_s: float = Field(default=0.0, ge=0, description="seconds since then, up to this view")
    incarnations: Positive = Field(default=1, description="how many there were so far")
    productive_s: float = Field(default=0.0, ge=0, description="in steps that were kept")
    redone_s: float = Field(
        default=0.0, ge=0, description="in steps that a later incarnation had to repeat"
    )
    unknown_s: float = Field(
        default=0.0, ge=0, description="in steps of which it is unknown whether they were kept"
    )
    starting_s: float = Field(
        default=0.0, ge=0, description="from the start of an incarnation to its first step"
    )
    data_wait_s: float = Field(default=0.0, ge=0, description="waiting for data loaders")
    checkpoint_s: float = Field(default=0.0, ge=0, description="writing checkpoints")
    evaluation_s: float = Field(default=0.0, ge=0, description="evaluations and tests")
    other_s: float = Field(default=0.0, ge=0, description="other phases that the program named")
    stalled_s: float = Field(default=0.0, ge=0, description="far longer than a step without one")
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
    """What an incarnation had planned, and how long a step takes."""

    total_steps: Positive | None = Field(
        default=None, description="planned, over all incarnations; None: not known"
    )
    done_steps: Whole = Field(default=0, description="of those, made before this incarnation")
    source: Word = Field(
        default="", max_length=64, description="who knows it: transformers, lightning, run.plan"
    )
    step_s: float | None = Field(
        default=None,
        ge=0,
        description="time of a step with its share of data, evaluations and checkpoints, seconds",
    )
    ends_by_ms: Millis | None = Field(
        default=None, description="when the scheduler ends the job: its time limit"
    )
