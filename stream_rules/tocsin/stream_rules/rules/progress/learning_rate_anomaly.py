"""`learning_rate_anomaly`: the learning rate is zero or NaN, jumps, or does not follow its
scheduler.

It has these forms, each a separate episode:

- not finite, in any parameter group.
- zero in all groups for `zero_steps` steps: a schedule that started at zero and never rose, or that
  ended before the training did. If there is no scheduler and the first rate is zero,
  `zero_at_first` steps are enough. A single group at zero is a usual way to freeze a part of a
  model.
- vanished: in all groups below `vanished` times its highest value, for a quarter of the steps so
  far and at least `zero_steps`: a scheduler designed for epochs that steps at every batch. A cosine
  decay to zero is that low in the last 0.6 % of its steps; an exponential decay to a
  hundred-thousandth, in a fifth of them.
- unstepped: the program created a scheduler but did not call its `step()` in two epochs of the
  training's data loader, or before the end of the run. The training process counts the calls.
- a jump by more than `factor` from one step to the next, up or down. A fall is an info, because the
  next phase of a script may start with one. These are ignored: a rise to an earlier rate, or to the
  base rate of a scheduler (a warm restart or a warm-up by epochs); a change equal to the previous
  or the next one (a warm-up or a decay by steps, which is why the rule decides one step later); a
  factor of exactly ten (the usual decay); rates below a millionth of the highest one; and a step
  whose optimizer has another number of groups than that of the step before, because it is another
  optimizer, and its first group may be other parameters. The issue
  resolves when the rate is back within `factor` of its earlier value, not when it stays at the new
  one.
- constant although there is a scheduler, for the first `constant_steps` steps: only an info, since
  a scheduler that decays once per epoch stays constant for a long time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Severity, Subject
from tocsin.schemas.records.runs import RunData, RunEnded, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event, scalar

_ROUNDING: Final = 1.01
_STEADY: Final = 1.5
_NEXT_TO_NOTHING: Final = 1e-6
_LONG: Final = 0.25
_MIN_STEPS: Final = 20
_FOR_ALL: Final = ("zero", "constant", "vanished", "unstepped")


class LearningRateAnomalyParams(Params):
    """Parameters of `learning_rate_anomaly`."""

    factor: float = Field(default=10.0, gt=1)
    """Largest factor by which the rate may change from one step to the next."""
    zero_steps: int = Field(default=20, ge=1)
    """For how many steps all groups may have a rate of zero. Unit: steps."""
    zero_at_first: int = Field(default=5, ge=1)
    """The same at the start of a run without a scheduler. Unit: steps."""
    vanished: float = Field(default=1e-4, ge=0, lt=1)
    """Share of its highest value below which the rate has vanished."""
    unstepped_epochs: int = Field(default=2, ge=1)
    """For how many epochs a scheduler may go without a step. Unit: epochs."""
    constant_steps: int = Field(default=1000, ge=2)
    """For how many steps a scheduler may keep the first rate. Unit: steps."""


@dataclass(slots=True)
class _Group:
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
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
    beside: int = 0
    """How many groups its optimizer had at its last step."""


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
    """A warning. A scheduler that never changes the rate is reported as info."""

    meta = RuleMeta(
        name="learning_rate_anomaly",
        version=2,
        family="progress",
        meaning="The learning rate is (nearly) zero, NaN, jumps, or does not follow its scheduler.",
        severity="warning",
        available="maybe",
        inputs=(
            scalar("lr.*"),
            scalar("schedule_steps", optional=True),
            scalar("epochs", optional=True),
            event(RunStarted, optional=True),
        ),
        capture_hint="learning rates are captured when a PyTorch optimizer steps",
        remedy="Check the scheduler: its length in steps, that scheduler.step() is called once and "
        "in the right place, and that its state is restored when you resume a run.",
        params=LearningRateAnomalyParams,
        branches={
            "not_finite": "A rate is NaN or infinite.",
            "zero": "All rates are zero.",
            "vanished": "All rates are tiny compared with their earlier values.",
            "unstepped": "A scheduler exists, but its step() is never called.",
            "jump": "A rate has changed by more than the factor in one step.",
            "constant": "A scheduler does not change the rate. An info.",
        },
        does_not_see="A rate that is wrong from the start and stays constant, and a rate that a "
        "custom optimizer does not expose.",
        resolve_after_steps=20,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        if isinstance(data, RunStarted) and data.role == "trainer":
            for group in data.groups:
                if group.initial_lr is not None and math.isfinite(group.initial_lr):
                    self.state.bases[group.index] = group.initial_lr
            self.state.declared = bool(self.state.bases)
        elif isinstance(data, RunEnded) and data.role == "trainer" and data.rank == 0:
            yield from self._at_the_end(data.last_step)

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        yield from self._schedule(frame)
        names = [name for name in frame.columns if name.startswith("lr.")]
        zeros: dict[int, bool] = {}
        rates: dict[int, dict[str, tuple[float, float]]] = {}
        for name in names:
            group = self.state.groups.setdefault(name, _Group())
            if group.rank_series.overtaken_by(frame):
                group = self.state.groups[name] = _Group(rank_series=group.rank_series)
            if not group.rank_series.accepts(frame):
                continue
            for step, rate in group.rank_series.points(frame, name):
                zeros[step] = zeros.get(step, True) and rate == 0
                if group.beside != len(names):
                    # Groups were added, or another optimizer steps: of other parameters.
                    group.beside, group.highest = len(names), 0.0
                    group.last = group.jump = group.jumped_from = None
                yield from self._point(name, group, step, rate, at)
                rates.setdefault(step, {})[name] = (group.last or 0.0, group.highest)
        for step, zero in sorted(zeros.items()):
            yield from self._zero(step, zero, at)
            yield from self._low(step, rates[step])

    def _point(self, name: str, group: _Group, step: int, rate: float, at: Moment) -> Outcomes:
        group.steps += 1
        if not math.isfinite(rate):
            group.bad_last = step
            if group.bad_since is None:
                group.bad_since = step
            reason = f"the learning rate of {name} has been {rate} since step {group.bad_since}"
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

    def _jump(self, name: str, group: _Group, step: int, last: float, rate: float) -> Outcomes:
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

    def _constant(self, name: str, group: _Group, step: int, rate: float) -> Outcomes:
        if rate != group.first:
            self.state.changed = True
            yield Clear(step, about="constant")
        declared = self._base(name) is not None and not self.state.changed
        if declared and rate > 0 and group.steps == self.params.constant_steps:
            reason = (
                f"a scheduler exists, but the learning rate has been {rate:.3g} in all of the "
                f"first {group.steps:,} steps"
            )
            first = group.first_step
            yield self._finding("constant", name, first, reason, group, rate, None, "info")

    def _schedule(self, frame: StepFrame) -> Outcomes:
        made, epochs = frame.column("schedule_steps"), frame.column("epochs")
        if made is None or epochs is None or not len(made) or frame.origin.rank:
            return
        step = int(frame.steps[-1])
        self.state.schedule = (step, float(made[-1]), float(epochs[-1]))
        if made[-1] > 0:
            yield Clear(step, about="unstepped")
        elif epochs[-1] >= self.params.unstepped_epochs and step >= _MIN_STEPS:
            yield from self._unstepped(step, f"in {epochs[-1]:.0f} epochs")

    def _at_the_end(self, last_step: int | None) -> Outcomes:
        """The run is over: a schedule that was not stepped by its end never will be."""
        known = self.state.schedule
        if known is None or last_step is None or known[1] > 0:
            return
        # A training that ends with its function has no optimizer to be asked at its very end.
        if last_step >= _MIN_STEPS and known[0] >= last_step / 2:
            yield from self._unstepped(known[0], f"in {known[0] + 1:,} steps")

    def _unstepped(self, step: int, how_long: str) -> Outcomes:
        name = next(iter(self.state.groups), None)
        if name is None or self.state.changed:
            return
        group = self.state.groups[name]
        reason = f"a learning-rate scheduler exists, but its step() was not called {how_long}"
        first = group.first_step
        yield self._finding("unstepped", name, first, reason, group, group.last or 0.0, None)

    def _low(self, step: int, rates: Mapping[str, tuple[float, float]]) -> Outcomes:
        """Whether all groups are next to nothing at this step, and for how long.

        `rates` has those of its groups then, and the highest until then: a frame has many steps.
        """
        state = self.state
        state.steps += 1
        newest = {name: (one.last or 0.0, one.highest) for name, one in state.groups.items()}
        groups = [
            (name, rate, highest)
            for name, (rate, highest) in {**newest, **rates}.items()
            if highest > 0
        ]
        share = self.params.vanished
        if not groups or any(rate >= share * highest for _, rate, highest in groups):
            state.low_since, state.low_steps = None, 0
            yield Clear(step, about="vanished")
            return
        if state.low_since is None:
            state.low_since = step
        state.low_steps += 1
        name, rate, highest = groups[0]
        if rate > 0 and state.low_steps >= max(self.params.zero_steps, _LONG * state.steps):
            reason = (
                f"the learning rate has fallen from {highest:.3g} below "
                f"{share * highest:.3g}, and is {rate:.3g} after "
                f"{state.low_steps} steps there"
            )
            group, limit = state.groups[name], share * highest
            yield self._finding("vanished", name, state.low_since, reason, group, rate, limit)
        else:
            yield Holds(step, about="vanished")

    def _zero(self, step: int, zero: bool, at: Moment) -> Outcomes:
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
            reason = (
                f"the learning rate has been zero since step {state.zero_since}: the model does "
                "not learn"
            )
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
        facts = [fact("reason", why), fact(name, rate, limit=limit)]
        base = self._base(name)
        if base is not None:
            facts.append(fact("base_of_schedule", base))
        facts.append(fact("highest_before", group.highest))
        return Finding(
            about=why if why in _FOR_ALL else f"{why} {name}",
            branch=why.replace(" ", "_"),
            subject=Subject(kind="learning_rate", name=name),
            reason=reason,
            first_step=step,
            first_rank=group.rank_series.rank,
            severity=severity,
            facts=tuple(facts),
            series=group.rank_series.series(name, limit=limit),
        )


def _goes_on(jump: tuple[int, float, float], rate: float) -> bool:
    """Whether a rise goes on by about the same amount, up or (at the top of a cycle) down."""
    _, last, risen = jump
    return risen > last and abs(abs(rate - risen) - (risen - last)) < 0.2 * (risen - last)


def _within(rate: float, other: float, factor: float) -> bool:
    """Whether two rates are at most a factor apart."""
    return other <= rate * factor and rate <= other * factor
