"""`cold_start`: a rule has lost its state of this run and starts again in mid-run.

This happens when a snapshot cannot be read, was written by another version of the rule, or does not
exist although the run was in progress: the state was lost, the rule is new, or the workers started
late. The engine publishes it. A rule that depends on history (its `history_steps`) has none at that
point: its issues are reported as usual, but stop no run until it has seen that many steps again. If
the condition is still true then, the stop follows.

It resolves when all rules have enough history. It is a warning if state was lost, and an info if
there was none yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar


class ColdStartParams(Params):
    """The rule has no parameters."""


@dataclass(slots=True)
class _State:
    since_step: int | None = None
    history: int = 0
    open: bool = False
    names: list[str] = field(default_factory=list)


class ColdStart(Rule[ColdStartParams, _State]):
    """The engine publishes it; stops are held back even if it is switched off."""

    meta = RuleMeta(
        name="cold_start",
        version=1,
        family="about_rules",
        meaning="Rules start without their state of the run: their stops are held back for now.",
        severity="info",
        inputs=(scalar("*"),),
        available="maybe",
        history_steps=0,
        remedy="Nothing, after an update. Otherwise check why the state was lost: the retention of "
        "the state topic, a replaced bus, workers that started after the run.",
        does_not_see="A state that exists but is wrong.",
        params=ColdStartParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def lost(self, why: Mapping[str, str], history: int, *, grave: bool, at: Moment) -> Outcomes:
        """The engine's word: rules and why they begin anew, and the steps that they must see."""
        state = self.state
        state.names = sorted({*state.names, *why})
        state.history, state.since_step, state.open = history, at.run.last_step, True
        names = ", ".join(state.names[:8])
        more = f" and {len(state.names) - 8} more" if len(state.names) > 8 else ""
        yield Finding(
            subject=Subject(kind="rule", name=next(iter(why))),
            reason=f"{names}{more} start without state of this run ({next(iter(why.values()))}): "
            f"no stop because of them for {history:,} steps",
            first_step=at.run.last_step,
            first_rank=at.rank,
            episode=f"{at.boot}/{at.seq}",
            severity="warning" if grave else None,
            facts=tuple(fact(name, reason) for name, reason in sorted(why.items()))[:32],
            followed=len(why) - 1,
            also=tuple(sorted(why)[1:33]),
        )

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state, step = self.state, at.run.last_step
        if not state.open or step is None:
            return
        if state.since_step is None:
            state.since_step = step
        if step - state.since_step >= state.history:
            state.open, state.names = False, []
            yield Clear()
