"""The section `silences`: issues that are known, of which nobody is notified for some time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.configuration.routing.matches import Match
from tocsin.schemas.configuration.sections import Entry
from tocsin.schemas.configuration.values import Moment, some

Muted = Literal["notify", "stop"]
"""What a silence keeps from being sent."""


class SilenceEntry(Entry):
    """Issues that match notify nobody for some time.

    `tocsin silence` adds such entries at any time, without a change of the file.
    """

    MATCHES = ("match",)

    match: Match = Field(examples=[{"run": "sweep-*"}])
    """What the issues must match; keys as in the `match` of a route."""
    until: Moment = Field(examples=["2026-12-01T00:00:00Z"])
    """When it ends."""
    from_: Moment | None = Field(default=None, alias="from", examples=["2026-11-24T08:00:00+01:00"])
    """When it starts; absent: it has started."""
    by: str = Field(default="", max_length=200, examples=["ana"])
    """Who wants it."""
    why: str = Field(default="", max_length=1000, examples=["known bad learning rates"])
    """The reason, for people."""
    mutes: Annotated[tuple[Muted, ...], AfterValidator(some)] = Field(
        default=("notify",), strict=False, examples=[["notify", "stop"]]
    )
    """What is not sent: `notify`, notices; `stop`, stops of the run."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.from_ is not None and self.from_ >= self.until:
            raise ValueError("expected 'from' before 'until'")
        return self


def silence_problems(entries: Sequence[SilenceEntry]) -> Iterator[Problem]:
    """Silences of everything, which nobody should write by leaving something out."""
    for entry in entries:
        if not entry.match:
            message = "expected at least one key: this would silence every issue"
            yield Problem((*entry.loc, "match"), message, hint='{run: "sweep-*"}')
