"""Commands to a run, and what the run answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tocsin.schemas.events import EVENT_TYPES, MAX_TEXT, Data, Model
from tocsin.schemas.runs import Checkpoint, RunData


@EVENT_TYPES.register
class StopRequested(Data):
    """A signed command to leave, for one incarnation of one run and worth nothing to others."""

    event_type: ClassVar[str] = "tocsin.stop.requested"

    command_id: str = Field(
        max_length=64, description="the delivery id, or a fresh one for a person's stop"
    )
    run_id: str = Field(max_length=200)
    incarnation: str = Field(max_length=64)
    issue_id: str | None = Field(default=None, max_length=64)
    rule: str | None = Field(default=None, max_length=100)
    reason: str = Field(max_length=MAX_TEXT)
    requested_by: str = Field(default="", max_length=200)
    requested_ms: int = Field(ge=0)
    not_after_ms: int = Field(ge=0, description="refused when it is read later than this")
    nonce: str = Field(max_length=64)
    grace_s: float = Field(
        default=30.0, ge=0, le=86_400, description="between edge, SIGTERM and SIGKILL, seconds each"
    )
    checkpoint: Literal["protect_last_good", "skip"] = "protect_last_good"
    last_good_checkpoint: Checkpoint | None = None

    @property
    def key(self) -> str:
        """The key on the control topic."""
        return stop_key(self.run_id, self.incarnation)


def stop_key(run_id: str, incarnation: str) -> str:
    """`run/incarnation/stop`."""
    return f"{run_id}/{incarnation}/stop"


class StopAnswer(RunData):
    """What each answer to a stop names: the command."""

    command_id: str = Field(max_length=64)
    issue_id: str | None = Field(default=None, max_length=64)


@EVENT_TYPES.register
class StopAcknowledged(StopAnswer):
    """The command was verified and will be obeyed, by this rank or by the launcher."""

    event_type: ClassVar[str] = "tocsin.stop.acknowledged"

    step: int | None = Field(default=None, description="the rank's step when it heard")
    leave_at: int | None = Field(
        default=None, description="the step at which the ranks agreed to leave"
    )


@EVENT_TYPES.register
class StopLeft(StopAnswer):
    """This rank has left its training loop at an edge."""

    event_type: ClassVar[str] = "tocsin.stop.left"

    step: int | None = None
    edge: str = Field(
        max_length=64, description="which edge: optimizer_step, scaler_update, backward, …"
    )
    left_us: int = Field(
        default=0, ge=0, description="the rank's clock when it left (Unix, microseconds)"
    )


@EVENT_TYPES.register
class StopEscalated(StopAnswer):
    """The job did not leave in time; the launcher went one step further."""

    event_type: ClassVar[str] = "tocsin.stop.escalated"

    how: Literal["SIGTERM", "SIGKILL"]
    reason: str = Field(default="", max_length=MAX_TEXT)


@EVENT_TYPES.register
class StopExited(StopAnswer):
    """The job is gone: seen, not assumed."""

    event_type: ClassVar[str] = "tocsin.stop.exited"

    how: Literal["edge", "SIGTERM", "SIGKILL", "itself"]
    exit_code: int


@EVENT_TYPES.register
class StopRefused(StopAnswer):
    """The command was not obeyed, and why."""

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
    reason: str = Field(default="", max_length=MAX_TEXT)


class SignedDatagram(Model):
    """A command as the launcher hands it to the ranks of its node.

    Key and value are the bytes as they stood on the bus (UTF-8), with their signature.
    """

    key: str
    value: str
    key_id: str
    signature: str
