"""What a person decides about a rule that was switched off for a run because it failed."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, example
from tocsin.schemas.records.feedback import MAX_BY
from tocsin.schemas.records.fields import Id, Incarnation, Millis, RunId, Text, Word


@EVENT_TYPES.register
class RuleReleased(Data):
    """A rule that failed in a run is tried again, from the records after this one.

    It is on the telemetry topic, so that all readers see it at the same position among the run's
    records.
    """

    model_config = example(
        release_id="5b0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        rule="loss_spike",
        by="ana@node-1",
        at_ms=1795258072300,
        why="the workers have the fix",
    )

    event_type: ClassVar[str] = "tocsin.rule.released"

    release_id: Id = Field(description="the same if the record is sent twice")
    run_id: RunId
    incarnation: Incarnation
    rule: Word = Field(min_length=1, max_length=100, description="the rule instance")
    by: Word = Field(
        min_length=1, max_length=MAX_BY, description="who released it: user@host, or a name"
    )
    at_ms: Millis
    why: Text = Field(default="", description="in the person's words")
