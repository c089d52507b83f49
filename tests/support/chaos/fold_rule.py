"""A rule whose findings depend on every number that it has read, and on their order.

A record that is lost, read twice or in another order changes each finding after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Finding, Moment, Outcome
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar

MODULUS = (1 << 61) - 1
EVERY = 5
FATAL = 999
"""A number that is worth a stop."""


class FoldParams(Params):
    """The rule has no parameters."""


@dataclass(slots=True)
class FoldState:
    """The fold of all numbers, and how many they are."""

    value: int = 1
    count: int = 0


class Fold(Rule[FoldParams, FoldState]):
    """Reports its state after each fifth number, and each number that is fatal."""

    meta = RuleMeta(
        name="fold",
        version=1,
        family="progress",
        meaning="A fold of all numbers.",
        severity="warning",
        inputs=(scalar("loss"),),
        remedy="None.",
        params=FoldParams,
        history_steps=0,
    )
    state_type = FoldState

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        numbers = frame.column("loss")
        assert numbers is not None
        for step, number in zip(frame.steps.tolist(), numbers.tolist(), strict=True):
            state, fatal = self.state, int(number) == FATAL
            state.value = (state.value * 31 + int(number) + 1) % MODULUS
            state.count += 1
            if fatal or state.count % EVERY == 0:
                yield Finding(
                    subject=Subject(kind="loss", name="loss"),
                    reason=f"{state.value} after {state.count}",
                    about=f"step {step}",
                    first_step=step,
                    severity="critical" if fatal else None,
                    stop_worthy=fatal,
                )


class NextFold(Fold):
    """The same rule in its next version, which goes on with a state of the version before."""

    meta = replace(Fold.meta, version=2)

    def migrate(self, payload: bytes, version: int) -> None:
        self.restore(payload)


class ColdFold(Fold):
    """A next version that cannot read the state of the version before."""

    meta = replace(Fold.meta, version=2, history_steps=1_000)
