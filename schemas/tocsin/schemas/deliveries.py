"""The ledger: what became of each (issue, action)."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from tocsin.schemas.events import EVENT_TYPES, MAX_TEXT, Data, Model
from tocsin.schemas.issues import IssueState

DeliveryState = Literal["pending", "delivered", "rejected", "suppressed", "expired"]
FINAL_STATES: Final = frozenset({"delivered", "rejected", "suppressed", "expired"})


class Attempt(Model):
    """One attempt that was made. `result` never holds the peer's body."""

    at_ms: int = Field(ge=0)
    result: str = Field(max_length=300)
    retry: bool = Field(description="whether it is worth another attempt")
    duration_ms: int = Field(default=0, ge=0)


@EVENT_TYPES.register
class Delivery(Data):
    """The newest state of one notice or stop: written before the first attempt and after each."""

    event_type: ClassVar[str] = "tocsin.delivery"

    delivery_id: str = Field(max_length=64)
    issue_id: str = Field(max_length=64)
    run_id: str = Field(max_length=200)
    incarnation: str = Field(max_length=64)
    rule: str = Field(max_length=100)
    issue_state: IssueState
    action: str = Field(max_length=100, description="the receiver's name, or `stop`")
    kind: str = Field(max_length=32, description="webhook, stop, …")
    state: DeliveryState
    reason: str = Field(max_length=MAX_TEXT, description="why it is in this state")
    decided_by: str = Field(
        default="", max_length=300, description="the config line, or the default, that asked for it"
    )
    created_ms: int = Field(ge=0)
    updated_ms: int = Field(ge=0)
    attempts: int = Field(default=0, ge=0)
    last_attempts: tuple[Attempt, ...] = Field(default=(), max_length=8)
    next_attempt_ms: int | None = Field(
        default=None, ge=0, description="the retry schedule; None when final"
    )
    give_up_ms: int = Field(ge=0, description="after this it expires")
    event: dict[str, Any] | None = Field(
        default=None,
        description="the issue's CloudEvent, so that a retry needs no other record; "
        "left out when final",
    )

    @property
    def key(self) -> str:
        """`issue/action`, with the issue's state where it is not the first."""
        suffix = "" if self.issue_state == "firing" else f"/{self.issue_state}"
        return f"{self.issue_id}/{self.action}{suffix}"

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in FINAL_STATES
