"""Silences that people set: issues that are known, of which nobody is notified for some time."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, example
from tocsin.schemas.records.fields import Id, Many, Mapped, Millis, Text, Word
from tocsin.schemas.topics import ALL_RUNS

SILENCES: Final = f"{ALL_RUNS}/silence/"
"""How the keys of silences begin on the control topic."""


@EVENT_TYPES.register
class SilenceSet(Data):
    """A silence, signed. Each partition of the control topic has a copy, under one key.

    A later record under the same key replaces it. A silence ends at its time, or when a person ends
    it.
    """

    model_config = example(
        silence_id="5b0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
        match={"run": ["sweep-*"]},
        from_ms=1795258012300,
        until_ms=1795265212300,
        by="ana@node-1",
        why="known bad learning rates",
        mutes=["notify"],
        set_ms=1795258012300,
    )

    event_type: ClassVar[str] = "tocsin.silence.set"

    silence_id: Id
    match: Mapped[Many[Word]] = Field(
        min_length=1, description="labels of the issues, each with its patterns"
    )
    from_ms: Millis = Field(description="when it starts")
    until_ms: Millis = Field(description="when it ends")
    by: Word = Field(max_length=200, description="who set it: user@host, or a name")
    why: Text = ""
    mutes: Many[Literal["notify", "stop"]] = Field(
        default=("notify",), max_length=2, description="what is held back: notices, stops or both"
    )
    set_ms: Millis = Field(description="when this record was written")
    ended_by: Word = Field(
        default="", max_length=200, description="who ended it early; empty if nobody did"
    )

    @property
    def key(self) -> str:
        """The key on the control topic."""
        return f"{SILENCES}{self.silence_id}"
