"""What people decide about stops: the switch for all of them, and approvals of single ones."""

from __future__ import annotations

import hashlib
from typing import ClassVar, Final, Literal

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, example
from tocsin.schemas.records.fields import Id, Incarnation, Millis, RunId, Text, Word

SWITCH_KEY: Final = "_all/stops"
"""The key of the switch, on each partition of the control topic."""


@EVENT_TYPES.register
class StopsSwitched(Data):
    """All stops are switched off, or on again. Signed; the newest record applies."""

    model_config = example(
        off=True, by="ana@node-1", why="the new rule is wrong", at_ms=1795258012300
    )

    event_type: ClassVar[str] = "tocsin.stops.switched"

    off: bool = Field(description="whether stops are off from now on")
    by: Word = Field(max_length=200, description="who switched: user@host, or a name")
    why: Text = ""
    at_ms: Millis = Field(description="when, by that person's clock")


@EVENT_TYPES.register
class StopAnswered(Data):
    """A person's answer to a stop that is waiting for approval. Signed."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        delivery_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        verdict="approve",
        by="ana@node-1",
        why="the loss is lost",
        at_ms=1795258012300,
    )

    event_type: ClassVar[str] = "tocsin.stop.answered"

    run_id: RunId
    incarnation: Incarnation
    delivery_id: Id = Field(description="the stop that is waiting")
    verdict: Literal["approve", "reject"]
    by: Word = Field(max_length=200, description="who answered: user@host, or a name")
    why: Text = ""
    at_ms: Millis = Field(description="when, by that person's clock")

    @property
    def key(self) -> str:
        """The key on the control topic: one for each stop and person, so that compaction keeps the
        newest answer of each.
        """
        who = hashlib.sha256(f"{self.delivery_id}\0{self.by}".encode()).hexdigest()[:16]
        return f"{self.run_id}/{self.incarnation}/approval/{who}"

    def is_under(self, key: str) -> bool:
        """Whether a record with this key may hold it: releases before had one for all answers of an
        incarnation.
        """
        return key in (self.key, f"{self.run_id}/{self.incarnation}/approval")


def is_answer_key(key: bytes) -> bool:
    """Whether a record of the control topic with this key is a person's answer to a stop."""
    return key.endswith(b"/approval") or b"/approval/" in key
