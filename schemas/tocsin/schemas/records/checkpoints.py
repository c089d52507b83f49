"""Checkpoints of a run: written, read after that, and pinned."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Model, example
from tocsin.schemas.records.fields import MAX_INT, Many, Text, Whole, Word
from tocsin.schemas.records.runs import RunData

VERIFIED_STEPS: Final = 50
"""Healthy steps after a checkpoint that make it a verified one: what it holds did train on."""


class Checkpoint(Model):
    """A checkpoint file that a run has written."""

    path: Text = Field(description="file or folder, as the training names it")
    step: Annotated[int, Field(ge=-1, le=MAX_INT)] = Field(
        description="the last step included in it; -1 before the first step"
    )
    size_bytes: Whole | None = Field(default=None, description="None if not known")
    finite: bool | None = Field(
        default=None, description="whether the saved numbers were finite; None if not known"
    )
    verified: bool | None = Field(
        default=None,
        description=(
            "whether enough healthy steps followed it; set where an issue or a stop names it"
        ),
    )
    whole: bool | None = Field(
        default=None, description="whether its files are complete; None if they were not read"
    )

    @property
    def sound(self) -> bool:
        """Whether nothing is known against it."""
        return self.finite is not False and self.whole is not False


@EVENT_TYPES.register
class CheckpointWritten(RunData):
    """A checkpoint was written: by `torch.save`, safetensors, or a framework's own function."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        checkpoint={"path": "/data/gpt/step-1000.pt", "step": 1000, "size_bytes": 1493172224},
        duration_s=3.5,
    )

    event_type: ClassVar[str] = "tocsin.run.checkpoint"

    checkpoint: Checkpoint
    duration_s: float = Field(default=0.0, ge=0, description="seconds")


@EVENT_TYPES.register
class CheckpointRead(RunData):
    """What was found in a checkpoint. A separate process reads it after it was written, without
    unpickling it.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        role="launcher",
        checkpoint={"path": "/data/gpt/step-1000.pt", "step": 1000, "size_bytes": 1493172224},
        tensors=444,
        matrices=148,
        bytes_read=1493171200,
        nonfinite=["model.blocks.3.attention.weight"],
        nonfinite_tensors=1,
    )

    event_type: ClassVar[str] = "tocsin.run.checkpoint_read"

    checkpoint: Checkpoint
    unread: Text = Field(
        default="", description="why it could not be read; there is no result then"
    )
    changed: bool = Field(
        default=False,
        description="it was overwritten while it was read; the result does not apply to it",
    )
    complete: bool = Field(
        default=True,
        description="whether all numbers were read; otherwise only the beginning of each tensor",
    )
    torn: Text = Field(
        default="", description="what is missing from its files; empty if nothing is"
    )
    tensors: Whole = Field(default=0, description="number of floating-point tensors found")
    matrices: Whole = Field(default=0, description="number of these with at least two dimensions")
    bytes_read: Whole = 0
    nonfinite: Many[Word] = Field(
        default=(),
        description="names of the first tensors with NaN or Inf; masks of -Inf do not count",
    )
    nonfinite_tensors: Whole = 0
    zeros: Many[Word] = Field(
        default=(), description="names of the first matrices that are all zero"
    )
    zero_tensors: Whole = 0

    def updated(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same, with what was found, if it is the one that was read."""
        read = self.checkpoint
        if (checkpoint.path, checkpoint.step) != (read.path, read.step):
            return checkpoint
        if self.unread or self.changed:
            return checkpoint
        finite = False if self.nonfinite_tensors else checkpoint.finite
        return checkpoint.model_copy(update={"whole": not self.torn, "finite": finite})


@EVENT_TYPES.register
class CheckpointPinned(RunData):
    """The checkpoint to resume from has a second name, which the job's rotation does not delete."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        checkpoint={"path": "/data/gpt/step-1000.pt", "step": 1000, "size_bytes": 1493172224},
        how="hard_link",
        pinned="/data/gpt/tocsin-pinned/step-1000.pt",
    )

    event_type: ClassVar[str] = "tocsin.run.checkpoint_pinned"

    checkpoint: Checkpoint
    how: Literal["hard_link", "copy"]
    pinned: Text = Field(default="", description="the second name; empty if pinning failed")
    reason: Text = Field(default="", description="why pinning failed")
