"""Summaries of tensors that no rule judges, because a worker cannot keep up with the run.

Which ones is a matter of steps, so that all ranks and collections of a step are treated alike, and
a part of the run's state, so that what is read again after a crash is left out again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.collections import Tier, tier_of
from tocsin.schemas.records.frames import TensorFrame

MAX_SPANS: Final = 32
"""Of a run so many are remembered: those that go on, and the last ones of the others."""


@dataclass(slots=True)
class Span:
    """Steps of which the summaries of one tier are left out; `until_step` None: to this day."""

    tier: Tier
    from_step: int
    why: str
    until_step: int | None = None
    records: int = 0

    def has(self, step: int) -> bool:
        """Whether the step is one of them."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)


@dataclass(slots=True)
class Shedding:
    """What is left out of one incarnation of a run. `records`: how many so far."""

    top_step: int = -1
    spans: list[Span] = field(default_factory=list)
    records: int = 0

    @property
    def tiers(self) -> frozenset[Tier]:
        """The tiers that are left out now."""
        return frozenset(span.tier for span in self.spans if span.until_step is None)

    def note_step(self, step: int) -> None:
        """A record of that step was read."""
        self.top_step = max(self.top_step, step)

    def start(self, tier: Tier, why: str) -> None:
        """Leave this tier out, from the first step of which nothing was read."""
        spans = [*self.spans, Span(tier, self.top_step + 1, why)]
        ended = (span for span in spans if span.until_step is not None)
        for span in list(ended)[: max(0, len(spans) - MAX_SPANS)]:
            spans.remove(span)
        self.spans = spans

    def end(self, tier: Tier) -> None:
        """Judge this tier again, from the first step of which nothing was read."""
        for span in self.spans:
            if span.tier == tier and span.until_step is None:
                span.until_step = self.top_step + 1

    def leaves_out(self, frame: TensorFrame) -> bool:
        """Whether this summary is not judged. One with NaN or Inf always is."""
        return bool(self.spans) and self._span(frame) is not None and not _has_nonfinite(frame)

    def count(self, frame: TensorFrame) -> None:
        """One that is left out has come."""
        span = self._span(frame)
        if span is not None:
            span.records += 1
            self.records += 1

    def _span(self, frame: TensorFrame) -> Span | None:
        tier = tier_of(frame.collection)
        return next((s for s in self.spans if s.tier == tier and s.has(frame.step)), None)


def _has_nonfinite(frame: TensorFrame) -> bool:
    counts = (frame.count(name) for name in ("nans", "infs"))
    return any(count is not None and bool(count.any()) for count in counts)
