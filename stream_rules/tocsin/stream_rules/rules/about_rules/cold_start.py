"""`cold_start`: a rule's memory of this run is gone, and it begins anew in the middle of it.

That is so when a snapshot cannot be read, was written by another version of the rule, or is not
there although the run was under way: the state was lost, the rule is new, or the workers began
late. The engine says so. A rule that judges by what came before (its `history_steps`) has nothing
to judge by then: what it finds is told as usual, but stops no run until it has seen so many steps
again. If what it found still holds then, the stop is due.

It is over when all of them have. A warning where state was lost; an info where there was none yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Evidence, Fact, Subject
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    scalar,
)


class ColdStartParams(Params):
    """It has no parameters."""


@dataclass(slots=True)
class _State:
    since_step: int | None = None
    history: int = 0
    open: bool = False
    names: list[str] = field(default_factory=list)


class ColdStart(Rule[ColdStartParams, _State]):
    """Told by the engine; stops are held back all the same where it is switched off."""

    meta = RuleMeta(
        name="cold_start",
        version=1,
        family="about_rules",
        meaning="Rules begin without their memory of the run: their stops are held back for now.",
        severity="info",
        inputs=(scalar("*"),),
        comes="maybe",
        history_steps=0,
        remedy="Nothing, after an update. Else see why the state was lost: the retention of the "
        "state topic, a bus that was replaced, workers that began after the run.",
        does_not_see="A memory that is there and wrong.",
        params=ColdStartParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def lost(
        self, why: Mapping[str, str], history: int, *, grave: bool, at: Moment
    ) -> Iterable[Outcome]:
        """The engine's word: rules and why they begin anew, and the steps that they must see."""
        state = self.state
        state.names = sorted({*state.names, *why})
        state.history, state.since_step, state.open = history, at.run.last_step, True
        names = ", ".join(state.names[:8])
        more = f" and {len(state.names) - 8} more" if len(state.names) > 8 else ""
        yield Finding(
            subject=Subject(kind="rule", name=next(iter(why))),
            reason=f"{names}{more} begin without memory of this run "
            f"({next(iter(why.values()))}): no stop because of them for {history:,} steps",
            first_step=at.run.last_step,
            first_rank=at.rank,
            episode=f"{at.boot}/{at.seq}",
            severity="warning" if grave else None,
            evidence=Evidence(
                facts=tuple(Fact(name=name, value=reason) for name, reason in sorted(why.items()))[
                    :32
                ],
                followed=len(why) - 1,
                also=tuple(sorted(why)[1:33]),
            ),
        )

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        state, step = self.state, at.run.last_step
        if not state.open or step is None:
            return
        if state.since_step is None:
            state.since_step = step
        if step - state.since_step >= state.history:
            state.open, state.names = False, []
            yield Clear()
