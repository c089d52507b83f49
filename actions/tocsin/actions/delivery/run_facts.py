"""What actions must know of runs, kept small: which incarnation lives, and how far its stop is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tocsin.schemas.records.issues import Issue
from tocsin.schemas.records.runs import RunState, RunView, StopView


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as its newest view says; `as_of_ms` is the time up to which the view speaks.

    `stop_before` is the stop of the incarnation before, as far as it had come.
    """

    incarnation: str
    state: RunState
    exit_code: int | None
    stop: StopView | None
    next_offset: int
    as_of_ms: int
    stop_before: StopView | None = None

    @classmethod
    def of(cls, view: RunView, as_of_ms: int) -> RunFacts:
        """What of a view matters here."""
        return cls(
            view.incarnation, view.state, view.exit_code, view.stop, view.next_offset, as_of_ms
        )

    def after(self, known: RunFacts | None) -> RunFacts:
        """The same, with what `known`, an older view, says of the incarnation before."""
        if known is None:
            return self
        same = known.incarnation == self.incarnation
        return replace(self, stop_before=known.stop_before if same else known.stop)

    def behind(self, issue: Issue) -> bool:
        """Whether the issue is of an incarnation of which this view cannot know yet.

        Issues are on the bus before the view that covers them.
        """
        return self.incarnation != issue.incarnation and self.as_of_ms <= issue.at_ms

    def over(self, incarnation: str) -> str | None:
        """Why an incarnation cannot be stopped any more; None if it may still run."""
        if self.incarnation != incarnation:
            return "another incarnation of the run has begun"
        if self.state == "ended":
            code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
            return f"the run has ended{code}"
        return None
