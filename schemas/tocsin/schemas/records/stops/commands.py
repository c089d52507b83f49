"""Commands to a run, and what the run answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import EVENT_TYPES, Data, Model, example
from tocsin.schemas.records.fields import (
    ExitCode,
    Id,
    Incarnation,
    Millis,
    Positive,
    RunId,
    Step,
    Text,
    Whole,
    Word,
)
from tocsin.schemas.records.runs import RunData


@EVENT_TYPES.register
class StopRequested(Data):
    """A signed command to stop one incarnation of one run. It is not valid for any other."""

    model_config = example(
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        issue_id="b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        rule="nonfinite",
        reason="NaN in the gradients",
        requested_by="actions@node-1",
        requested_ms=1795258012300,
        not_after_ms=1795258312300,
        nonce="c9b0a2f6-1a53-4bb7-8a6e-1c0e5a0d3f42",
        grace_s=30.0,
    )

    event_type: ClassVar[str] = "tocsin.stop.requested"

    command_id: Id = Field(
        description="the delivery id, or a new id if a person requested the stop"
    )
    run_id: RunId
    incarnation: Incarnation
    issue_id: Id | None = None
    rule: str | None = Field(default=None, max_length=100)
    reason: Text
    requested_by: Word = Field(default="", max_length=200)
    requested_ms: Millis
    not_after_ms: Millis = Field(description="refused if it is read after this time")
    nonce: str = Field(max_length=64)
    grace_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="seconds to wait before SIGTERM, and again before SIGKILL",
    )
    checkpoint: Literal["protect_last_good", "save", "skip"] = "protect_last_good"
    last_good_checkpoint: Checkpoint | None = None

    @property
    def key(self) -> str:
        """The key on the control topic."""
        return stop_key(self.run_id, self.incarnation)


def stop_key(run_id: str, incarnation: str) -> str:
    """`run/incarnation/stop`."""
    return f"{run_id}/{incarnation}/stop"


@EVENT_TYPES.register
class DetailRequest(Data):
    """Requests more capture of this training for some steps, because a rule has found something.

    Unsigned, so it can do nothing else; each rank limits steps and rate itself.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rule="exploding_gradient",
        issue_id="b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        steps=50,
        not_after_ms=1795258312300,
    )

    event_type: ClassVar[str] = "tocsin.run.look_closer"

    run_id: RunId
    incarnation: Incarnation
    rule: str = Field(max_length=100, description="the rule instance that requests it")
    issue_id: Id = Field(description="the issue that it has found")
    steps: Positive = Field(
        description="number of steps, from the next one on; a rank uses at most 200"
    )
    not_after_ms: Millis = Field(description="ignored if it is read after this time")

    @property
    def key(self) -> str:
        """The key on the control topic."""
        return detail_request_key(self.run_id)


def detail_request_key(run_id: str) -> str:
    """`run/look_closer`."""
    return f"{run_id}/look_closer"


class StopAnswer(RunData):
    """The fields of every answer to a stop: the command and its issue."""

    command_id: Id
    issue_id: Id | None = None


@EVENT_TYPES.register
class StopAcknowledged(StopAnswer):
    """This rank or the launcher has verified the command and will obey it."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rank=1,
        world_size=2,
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        step=1201,
        leave_at=1203,
    )

    event_type: ClassVar[str] = "tocsin.stop.acknowledged"

    step: Step | None = Field(
        default=None, description="the rank's step when it received the command"
    )
    leave_at: Step | None = Field(
        default=None, description="the step at which the ranks have agreed to exit"
    )


@EVENT_TYPES.register
class StopCheckpoint(StopAnswer):
    """What happens to the checkpoint of a stop. It is decided at the exit point, before the rank
    exits its loop.

    Sent by rank 0, and by each rank that should have saved and did not.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        world_size=2,
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        decision="saved",
        checkpoint={"path": "/data/gpt/step-1203.pt", "step": 1203, "finite": True},
    )

    event_type: ClassVar[str] = "tocsin.stop.checkpoint"

    decision: Literal["saved", "protected", "skipped", "not_saved"] = Field(
        description=(
            "saved; protected (resume from the checkpoint before the fault); skipped; or saving "
            "failed"
        )
    )
    checkpoint: Checkpoint | None = None
    reason: Text = Field(
        default="", description="why no checkpoint was saved although one was requested"
    )


@EVENT_TYPES.register
class StopLeft(StopAnswer):
    """This rank has exited its training loop at an exit point."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rank=1,
        world_size=2,
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        step=1203,
        edge="optimizer_step",
        left_us=1795258012612345,
    )

    event_type: ClassVar[str] = "tocsin.stop.left"

    step: Step | None = None
    edge: str = Field(
        max_length=64, description="the exit point: optimizer_step, scaler_update, backward, …"
    )
    left_us: Whole = Field(
        default=0, description="when the rank exited, by its clock (Unix, microseconds)"
    )


@EVENT_TYPES.register
class StopEscalated(StopAnswer):
    """The job did not exit in time; the launcher escalates to the next signal."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        role="launcher",
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        how="SIGTERM",
        reason="no rank left within 30 s",
    )

    event_type: ClassVar[str] = "tocsin.stop.escalated"

    how: Literal["SIGTERM", "SIGKILL"]
    reason: Text = ""


@EVENT_TYPES.register
class StopExited(StopAnswer):
    """The job has exited. Its end was observed, not assumed."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        role="launcher",
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        how="edge",
        exit_code=79,
    )

    event_type: ClassVar[str] = "tocsin.stop.exited"

    how: Literal["edge", "SIGTERM", "SIGKILL", "itself"]
    exit_code: ExitCode


@EVENT_TYPES.register
class StopRefused(StopAnswer):
    """The command was not obeyed, and why."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        why="other_incarnation",
        reason="the command names an earlier training",
    )

    event_type: ClassVar[str] = "tocsin.stop.refused"

    why: Literal[
        "bad_signature",
        "untrusted_key",
        "other_run",
        "other_incarnation",
        "expired",
        "replayed",
        "stops_off",
        "malformed",
    ]
    reason: Text = ""


@EVENT_TYPES.register
class StopExpired(StopAnswer):
    """The command was read after it had expired, and was ignored."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        command_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        not_after_ms=1795258312300,
        reason="no rank answered",
    )

    event_type: ClassVar[str] = "tocsin.stop.expired"

    not_after_ms: Millis = Field(description="when it expired")
    reason: Text = ""


class SignedDatagram(Model):
    """A command as the launcher passes it to the ranks of its node.

    Key and value are the bytes of the bus record (UTF-8), with their signature.
    """

    key: str = Field(max_length=400, description="the record's key")
    value: str = Field(max_length=60_000, description="the record's value")
    key_id: str = Field(max_length=16, description="id of the public key")
    signature: str = Field(max_length=88, description="base64 of the 64 bytes of the signature")
