"""Digests: a notice to a receiver, once in an interval, that all is well."""

from __future__ import annotations

from typing import ClassVar, Final

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Data, Model, example
from tocsin.schemas.records.fields import Many, Mapped, Millis, RunId, Step, Whole, Word
from tocsin.schemas.records.real import Real
from tocsin.schemas.records.run_view import RunState
from tocsin.schemas.records.runs import Outcome

MAX_RUNS: Final = 20
"""Of more runs, those that started last are named."""


class DigestRun(Model):
    """One run of the interval, in its newest state."""

    run_id: RunId
    state: RunState
    outcome: Outcome | None = None
    last_step: Step | None = None
    last_loss: Real | None = None


@EVENT_TYPES.register
class Digest(Data):
    """What happened from `from_ms` to `until_ms`. It is part of a delivery, and sent unchanged.

    Issues of severity `info` are not counted.
    """

    model_config = example(
        receiver="vision-mail",
        from_ms=1795219200000,
        until_ms=1795305600000,
        runs=[{"run_id": "gpt-2026-11-21", "state": "running", "last_step": 1200}],
        suppressed={"silence": 2},
    )

    event_type: ClassVar[str] = "tocsin.digest"

    receiver: Word = Field(max_length=100)
    from_ms: Millis
    until_ms: Millis
    runs: Many[DigestRun] = Field(default=(), max_length=MAX_RUNS)
    more_runs: Whole = Field(default=0, description="how many runs are not listed")
    issues: Whole = Field(default=0, description="issues that started in the interval")
    open: Whole = Field(default=0, description="active issues of running runs")
    sent: Whole = Field(default=0, description="notices that the receiver got in the interval")
    suppressed: Mapped[Whole] = Field(
        default_factory=dict, description="cause -> number of notices and stops that it held back"
    )

    @property
    def all_runs(self) -> int:
        """How many runs there were."""
        return len(self.runs) + self.more_runs
