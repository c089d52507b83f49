"""`rule_has_no_input`: a rule without input is reported, so that its silence is not taken for a
healthy run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunData, RunEnded
from tocsin.stream_rules.outcomes import Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import (
    Input,
    InstanceFacts,
    Params,
    Rule,
    RuleMeta,
    scalar,
    tensors,
)

_NAMES: Final = 200
_LOGGED: Final = "/log."


class RuleHasNoInputParams(Params):
    """Parameters of `rule_has_no_input`."""

    grace: int = Field(default=100, ge=1)
    """Number of steps to wait for input. Unit: steps."""


@dataclass(slots=True)
class _State:
    scalars: list[str] = field(default_factory=list)
    collections: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    said: bool = False


class RuleHasNoInput(Rule[RuleHasNoInputParams, _State]):
    """A warning for rules that the configuration names; an info for those that run by default."""

    meta = RuleMeta(
        name="rule_has_no_input",
        version=1,
        family="about_rules",
        meaning="A rule got no input within the first steps, so it checks nothing.",
        severity="warning",
        inputs=(
            scalar("*", mode=None),
            tensors("*", mode=None),
            Input("system", "*", None),
            Input("event", "*", None, optional=True),
        ),
        remedy="Capture what is missing (see the evidence), or switch the rule off.",
        params=RuleHasNoInputParams,
        does_not_see="Input that ends: the rule does not report a rule that once had input. Input "
        "that only some runs have, like activations of a ReLU, is reported only if the "
        "configuration names its rule.",
    )
    state_type = _State
    by_presence = True

    def __init__(self, name: str, params: RuleHasNoInputParams) -> None:
        super().__init__(name, params)
        self._instances: tuple[InstanceFacts, ...] = ()

    def other_instances(self, instances: tuple[InstanceFacts, ...]) -> None:
        self._instances = instances

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        _note(self.state.scalars, (f"{frame.mode}/{name}" for name in frame.columns))
        if self.state.said or frame.mode != "train" or not frame.steps.size:
            return
        step = at.step_of(frame)
        if step >= self.params.grace:
            self.state.said = True
            waiting = [
                one
                for one in self._instances
                if one.available == "always" or (one.listed and one.available == "maybe")
            ]
            yield from self._missing(waiting, step, at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        _note(self.state.collections, (f"{frame.mode}/{frame.collection}",))
        return ()

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        _note(self.state.samples, frame.columns)
        return ()

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        _note(self.state.events, (data.event_type,))
        if isinstance(data, RunEnded) and at.run.ended and at.run.last_step is not None:
            late = [one for one in self._instances if one.listed and one.available == "later"]
            yield from self._missing(late, at.run.last_step, at, about="later")

    def _missing(
        self, instances: Iterable[InstanceFacts], step: int, at: Moment, *, about: str = ""
    ) -> Outcomes:
        here = [one for one in instances if one.inputs and labels_fit(one.match, at.run.labels)]
        waiting = [one for one in here if not self._has_input(one)]
        listed = [one for one in waiting if one.listed]
        if not waiting:
            return
        first = (listed or waiting)[0]
        state = self.state
        seen = [*state.scalars, *state.collections, *state.samples, *state.events]
        others = [one.name for one in waiting if one is not first]
        yield Finding(
            about=about,
            subject=Subject(kind="rule", name=first.name),
            reason=f"{', '.join(one.name for one in (listed or waiting)[:8])}: nothing to read in "
            f"the first {step + 1} steps",
            first_step=0,
            severity="warning" if listed else "info",
            remedy="; ".join([f"{first.name}: {first.capture_hint}"] if first.capture_hint else [])
            or None,
            facts=tuple(
                fact(one.name, "needs " + " or ".join(str(i) for i in one.inputs))
                for one in waiting[:32]
            ),
            followed=len(others),
            also=tuple(others[:32]),
            explanation=clip("seen so far: " + (", ".join(seen[:100]) or "nothing")),
        )

    def _has_input(self, one: InstanceFacts) -> bool:
        return any(self._seen(wanted) for wanted in one.inputs if not wanted.optional)

    def _seen(self, wanted: Input) -> bool:
        state = self.state
        if wanted.kind == "event":
            return any(wanted.fits(name) for name in state.events)
        if wanted.kind == "system":
            return any(wanted.fits(name) for name in state.samples)
        known = state.collections if wanted.kind == "tensors" else state.scalars
        return any(
            wanted.fits(name) and wanted.mode in (None, mode)
            for mode, _, name in (full.partition("/") for full in known)
        )


def _note(seen: list[str], names: Iterable[str]) -> None:
    """A user may log thousands of scalars; what tocsin captures has few names, and all of them."""
    for name in names:
        if name not in seen and (len(seen) < _NAMES or _LOGGED not in name):
            seen.append(name)
