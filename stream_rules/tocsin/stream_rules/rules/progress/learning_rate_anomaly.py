"""`learning_rate_anomaly`: the learning rate is zero, no number, jumps, or stands still.

Six reasons, each an episode of its own:

- not finite, in any parameter group.
- zero in all groups for `zero_steps` steps: a schedule that began at zero and never rose, or that
  ended before the training did. Where no schedule was declared and the first rate is zero,
  `zero_at_first` steps are enough. One group at zero is how people freeze a part of a model.
- vanished: in all groups below `vanished` times the highest it was, for a quarter of the steps so
  far and `zero_steps` at least: a schedule that is stepped for each batch and was made for epochs.
  A cosine to zero is that low for the last 0.6 % of its steps, an exponential decay to a
  hundred-thousandth for a fifth of them.
- unstepped: a schedule was made, and its `step()` was not called in two epochs of the training's
  data loader, or by the end of the run. The training process counts it.
- a jump: from one step to the next by more than `factor`, up or down. A rise to where it has been
  already, or to the base rate of a schedule, is a warm restart or a warm-up by epochs; a fall is an
  info, as the next phase of a script may begin with it; a change like the one before, or like the
  one after, belongs to a warm-up or a decay by steps, which is why a jump is decided one step
  later; a factor of ten exactly is how most schedules decay, and below a millionth of the highest
  rate nothing is at stake. None of them counts. It is over when the rate is back within `factor` of
  what it was before, not when it stays where it has jumped to.
- constant where a schedule was declared, for the first `constant_steps` steps: an info only, since
  a schedule that decays by epochs is constant for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Evidence, Fact, Severity, Subject
from tocsin.schemas.records.runs import RunData, RunEnded, RunStarted
from tocsin.stream_rules.reading.rank_series import Lead
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Holds,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    event,
    scalar,
)

_ROUNDING: Final = 1.01
_STEADY: Final = 1.5
_NEXT_TO_NOTHING: Final = 1e-6
_LONG: Final = 0.25
_LEAST_STEPS: Final = 20
_FOR_ALL: Final = ("zero", "constant", "vanished", "unstepped")


class LearningRateAnomalyParams(Params):
    """Parameters of `learning_rate_anomaly`."""

    factor: float = Field(default=10.0, gt=1)
    """By how much the rate may change from one step to the next."""
    zero_steps: int = Field(default=20, ge=1)
    """How long all groups may have a rate of zero. Unit: steps."""
    zero_at_first: int = Field(default=5, ge=1)
    """The same at the beginning of a run that has declared no schedule. Unit: steps."""
    vanished: float = Field(default=1e-4, ge=0, lt=1)
    """Below which share of its highest value the rate is next to nothing."""
    unstepped_epochs: int = Field(default=2, ge=1)
    """How many epochs a schedule may not be stepped. Unit: epochs."""
    constant_steps: int = Field(default=1000, ge=2)
    """How long a declared schedule may leave the rate as it was at first. Unit: steps."""


@dataclass(slots=True)
class _Group:
    lead: Lead = field(default_factory=Lead)
    first: float | None = None
    first_step: int = 0
    last: float | None = None
    highest: float = 0.0
    change: float = 0.0
    jump: tuple[int, float, float] | None = None
    jumped_from: float | None = None
    bad_since: int | None = None
    bad_last: int = 0
    steps: int = 0


@dataclass(slots=True)
class _State:
    groups: dict[str, _Group] = field(default_factory=dict)
    bases: dict[int, float] = field(default_factory=dict)
    zeros: dict[int, int] = field(default_factory=dict)
    zero_since: int | None = None
    zero_ms: int = 0
    zero_steps: int = 0
    changed: bool = False
    declared: bool | None = None
    first_step: int | None = None
    steps: int = 0
    low_since: int | None = None
    low_steps: int = 0
    schedule: tuple[int, float, float] | None = None


class LearningRateAnomaly(Rule[LearningRateAnomalyParams, _State]):
    """Warnings; a schedule that stands still is an info."""

    meta = RuleMeta(
        name="learning_rate_anomaly",
        version=2,
        family="progress",
        meaning="The learning rate is zero or next to it, no number, jumps, or ignores its "
        "schedule.",
        severity="warning",
        comes="maybe",
        inputs=(
            scalar("lr.*"),
            scalar("schedule_steps", beside=True),
            scalar("epochs", beside=True),
            event(RunStarted, beside=True),
        ),
        capture_hint="learning rates are captured when an optimizer of PyTorch steps",
        remedy="Check the schedule: its length in steps, whether scheduler.step() is called once "
        "where it should be, and that its state is restored when a run is resumed.",
        params=LearningRateAnomalyParams,
        branches={
            "not_finite": "A rate is no number.",
            "zero": "All rates are zero.",
            "vanished": "All rates are next to nothing beside what they were.",
            "unstepped": "A schedule was made, and is never stepped.",
            "jump": "A rate has changed by more than the factor in one step.",
            "constant": "A declared schedule leaves the rate as it is: an info.",
        },
        does_not_see="A rate that is wrong from the start and stays there, and one that a user's "
        "own optimizer keeps to itself.",
        resolve_after_steps=20,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Iterable[Outcome]:
        if isinstance(data, RunStarted) and data.role == "trainer":
            for group in data.groups:
                if group.initial_lr is not None and math.isfinite(group.initial_lr):
                    self.state.bases[group.index] = group.initial_lr
            self.state.declared = bool(self.state.bases)
        elif isinstance(data, RunEnded) and data.role == "trainer" and data.rank == 0:
            yield from self._at_the_end(data.last_step)

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        yield from self._schedule(frame)
        names = [name for name in frame.columns if name.startswith("lr.")]
        zeros: dict[int, bool] = {}
        for name in names:
            group = self.state.groups.setdefault(name, _Group())
            if group.lead.overtaken_by(frame):
                group = self.state.groups[name] = _Group(lead=group.lead)
            if not group.lead.takes(frame):
                continue
            for step, rate in group.lead.points(frame, name):
                zeros[step] = zeros.get(step, True) and rate == 0
                yield from self._point(name, group, step, rate, at)
        for step, zero in sorted(zeros.items()):
            yield from self._zero(step, zero, at)
            yield from self._low(step, at)

    def _point(
        self, name: str, group: _Group, step: int, rate: float, at: Moment
    ) -> Iterable[Outcome]:
        group.steps += 1
        if not math.isfinite(rate):
            group.bad_last = step
            if group.bad_since is None:
                group.bad_since = step
            reason = f"the learning rate of {name} is {rate} since step {group.bad_since}"
            yield self._finding("not finite", name, group.bad_since, reason, group, rate, None)
            return
        if step - group.bad_last > self.meta.resolve_after_steps:
            group.bad_since = None
        yield Clear(step, about=f"not finite {name}")
        last, group.last = group.last, rate
        if group.first is None:
            group.first, group.first_step = rate, step
        if last is not None:
            yield from self._jump(name, group, step, last, rate)
            yield from self._constant(name, group, step, rate)
        group.highest = max(group.highest, rate)

    def _jump(
        self, name: str, group: _Group, step: int, last: float, rate: float
    ) -> Iterable[Outcome]:
        limit = self.params.factor * _ROUNDING
        before, group.jump = group.jump, None
        if before is not None and not _goes_on(before, rate):
            if group.jumped_from is None:
                group.jumped_from = before[1]
            yield self._jumped(name, group, before)
        back = group.jumped_from is not None and _within(rate, group.jumped_from, limit)
        if back:
            group.jumped_from = None
        if group.jumped_from is not None:
            yield Holds(step, about=f"jump {name}")
        elif before is None:
            yield Clear(step, about=f"jump {name}")
        known = max(group.highest, self._base(name) or 0.0)
        up = 0 < last * limit < rate and rate > known * _ROUNDING
        down = 0 < rate * limit < last
        # The last steps of a decay to near zero are large against the rate, not against the ones
        # before.
        steady = abs(rate - last) <= _STEADY * group.change
        group.change = abs(rate - last)
        nothing = max(last, rate) < _NEXT_TO_NOTHING * group.highest
        if (up or down) and not steady and not back and not nothing:
            group.jump = (step, last, rate)

    def _jumped(self, name: str, group: _Group, jump: tuple[int, float, float]) -> Finding:
        step, last, rate = jump
        reason = f"the learning rate of {name} jumped from {last:.3g} to {rate:.3g} at step {step}"
        edge = last * self.params.factor if rate > last else last / self.params.factor
        # A script that trains a head, then all of it with a lower rate and another optimizer.
        severity: Severity | None = None if rate > last else "info"
        return self._finding("jump", name, step, reason, group, rate, edge, severity)

    def _constant(self, name: str, group: _Group, step: int, rate: float) -> Iterable[Outcome]:
        if rate != group.first:
            self.state.changed = True
            yield Clear(step, about="constant")
        declared = self._base(name) is not None and not self.state.changed
        if declared and rate > 0 and group.steps == self.params.constant_steps:
            reason = (
                f"a schedule was declared, but the learning rate has been {rate:.3g} in all of the "
                f"first {group.steps:,} steps"
            )
            first = group.first_step
            yield self._finding("constant", name, first, reason, group, rate, None, "info")

    def _schedule(self, frame: StepFrame) -> Iterable[Outcome]:
        made, epochs = frame.column("schedule_steps"), frame.column("epochs")
        if made is None or epochs is None or not len(made) or frame.speaker.rank:
            return
        step = int(frame.steps[-1])
        self.state.schedule = (step, float(made[-1]), float(epochs[-1]))
        if made[-1] > 0:
            yield Clear(step, about="unstepped")
        elif epochs[-1] >= self.params.unstepped_epochs and step >= _LEAST_STEPS:
            yield from self._unstepped(step, f"in {epochs[-1]:.0f} epochs")

    def _at_the_end(self, last_step: int | None) -> Iterable[Outcome]:
        """The run is over: a schedule that was not stepped by its end never will be."""
        known = self.state.schedule
        if known is None or last_step is None or known[1] > 0:
            return
        # A training that ends with its function has no optimizer to be asked at its very end.
        if last_step >= _LEAST_STEPS and known[0] >= last_step / 2:
            yield from self._unstepped(known[0], f"in {known[0] + 1:,} steps")

    def _unstepped(self, step: int, how_long: str) -> Iterable[Outcome]:
        name = next(iter(self.state.groups), None)
        if name is None or self.state.changed:
            return
        group = self.state.groups[name]
        reason = f"a learning-rate schedule was made, and its step() was not called {how_long}"
        first = group.first_step
        yield self._finding("unstepped", name, first, reason, group, group.last or 0.0, None)

    def _low(self, step: int, at: Moment) -> Iterable[Outcome]:
        """Whether all groups are next to nothing at this step, and for how long."""
        state = self.state
        state.steps += 1
        groups = [(name, group) for name, group in state.groups.items() if group.highest > 0]
        share = self.params.vanished
        if not groups or any((g.last or 0.0) >= share * g.highest for _, g in groups):
            state.low_since, state.low_steps = None, 0
            yield Clear(step, about="vanished")
            return
        if state.low_since is None:
            state.low_since = step
        state.low_steps += 1
        name, group = groups[0]
        rate = group.last or 0.0
        if rate > 0 and state.low_steps >= max(self.params.zero_steps, _LONG * state.steps):
            reason = (
                f"the learning rate has fallen from {group.highest:.3g} below "
                f"{share * group.highest:.3g}, and is {rate:.3g} after "
                f"{state.low_steps} steps there"
            )
            limit = share * group.highest
            yield self._finding("vanished", name, state.low_since, reason, group, rate, limit)
        else:
            yield Holds(step, about="vanished")

    def _zero(self, step: int, zero: bool, at: Moment) -> Iterable[Outcome]:
        state = self.state
        if state.first_step is None:
            state.first_step = step
        if not zero:
            state.zero_since, state.zero_steps = None, 0
            yield Clear(step, about="zero")
            return
        if state.zero_since is None:
            state.zero_since, state.zero_ms = step, at.now_ms
        state.zero_steps += 1
        at_first = state.declared is False and state.zero_since == state.first_step
        if state.zero_steps >= (self.params.zero_at_first if at_first else self.params.zero_steps):
            name = next(iter(state.groups))
            reason = f"the learning rate is zero since step {state.zero_since}: nothing is learned"
            first = state.zero_since
            yield self._finding("zero", name, first, reason, state.groups[name], 0.0, None)

    def _base(self, name: str) -> float | None:
        number = name.removeprefix("lr.")
        return self.state.bases.get(int(number)) if number.isdigit() else None

    def _finding(
        self,
        why: str,
        name: str,
        step: int,
        reason: str,
        group: _Group,
        rate: float,
        limit: float | None,
        severity: Severity | None = None,
    ) -> Finding:
        facts = [Fact(name="reason", value=why), Fact(name=name, value=rate, limit=limit)]
        base = self._base(name)
        if base is not None:
            facts.append(Fact(name="base_of_schedule", value=base))
        facts.append(Fact(name="highest_before", value=group.highest))
        return Finding(
            about=why if why in _FOR_ALL else f"{why} {name}",
            branch=why.replace(" ", "_"),
            subject=Subject(kind="learning_rate", name=name),
            reason=reason,
            first_step=step,
            first_rank=group.lead.rank,
            severity=severity,
            evidence=Evidence(facts=tuple(facts), series=group.lead.series(name, limit=limit)),
        )


def _goes_on(jump: tuple[int, float, float], rate: float) -> bool:
    """Whether a rise goes on by about the same amount, up or (at the top of a cycle) down."""
    _, last, risen = jump
    return risen > last and abs(abs(rate - risen) - (risen - last)) < 0.2 * (risen - last)


def _within(rate: float, other: float, factor: float) -> bool:
    """Whether two rates are at most a factor apart."""
    return other <= rate * factor and rate <= other * factor
