"""`weight_update_ratio`: one step changes weights too much, or hardly at all.

The ratio of a tensor is update_l2 / (l2 + epsilon): the norm of its change in one step against its
own norm. The condition is that at least `share` of the tensors are above `large_threshold`, or
below `small_threshold`, in each of the last `for_summaries` summaries; each side is a separate
episode. The first `warmup_steps` steps are skipped: biases start at zero, and any change is large
relative to zero. The large side ignores tensors of fewer than 16 values: the bias of a logistic
regression with a weighted loss may move by its own size at each step and still learn. The small
side only checks weights that their gradients could move: a gradient below 1e-4 of the usual
gradient (the upper quartile over the tensors, now or in the first summaries) is rounding noise,
such as that of a bias before a normalisation, or of a solved task. The small side pauses while the
learning rates of all parameter groups are zero, or below 1e-4 of their highest; if only some are,
as many tensors as their groups have are ignored.

In the first steps, the large side uses other conditions, for tensors that did not start at zero: a
median ratio above 0.5, and the same for all weights together, after which the loss more than
doubles within ten steps, or is NaN; a median ratio above 0.2, after which the loss is more than
four times as high; or, with eight tensors or more and whatever the loss does, a median ratio above
0.5 with a median norm of the change above 1. In 22 healthy programs with up to eight seeds, the
highest ratio of a first step was 0.1; in three programs with a learning rate a thousand times too
high, the lowest was 0.65.

In healthy runs the median over the tensors was 4e-3 to 5e-3 (a small GPT, AdamW) and 5e-3 to 2e-2
(a ResNet, SGD with momentum), and the largest of any tensor 0.06 and 0.17, in the first 30 steps. A
ratio that stays above 0.2 means that the learning rate is too high and that weight decay or
normalisation keeps the weights from growing. If the weights can grow, the ratio falls within ten
steps, and the loss shows the problem.

The preset `sagemaker` has SageMaker Debugger's documented limits, for any tensor and any summary
from the first on, without the exceptions of the small side. SageMaker Debugger's rule compares two
saved steps, by default 500 apart; this rule uses the change of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.schemas.records.runs import RunData, RunStarted
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.tensor_rows import Doubles, doubles
from tocsin.stream_rules.rule import Params, RuleMeta, event, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.frozen_groups import FrozenGroups, FrozenSince
from tocsin.stream_rules.signals.initial_learning_rate import STRETCH, InitialLearningRate
from tocsin.stream_rules.signals.significant_gradients import SignificantGradients
from tocsin.stream_rules.signals.streaks import Streak

Side = Literal["large", "small"]

_FEW: Final = 16
"""Values below which a tensor has no size of its own to speak of."""


class WeightUpdateRatioParams(Params):
    """Parameters of `weight_update_ratio`."""

    small_threshold: float = Field(default=1e-8, ge=0)
    """Ratio below which a tensor hardly changes."""
    large_threshold: float = Field(default=0.2, gt=0)
    """Ratio above which a tensor changes too much."""
    epsilon: float = Field(default=1e-9, gt=0)
    """Added to the norm of the tensor."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the checked tensors. Unit: share, 1 is all."""
    for_summaries: int = Field(default=3, ge=1)
    """How many consecutive summaries. Unit: summaries."""
    warmup_steps: int = Field(default=20, ge=0)
    """First steps that are ignored. Unit: steps."""
    only_pushed: bool = True
    """Whether the small side ignores weights that their gradients could not move, and those whose
    learning rate is paused."""


@dataclass(slots=True)
class _State(RowState):
    pushed: SignificantGradients = field(default_factory=SignificantGradients)
    first_step: int | None = None
    groups: FrozenGroups = field(default_factory=FrozenGroups)
    sides: dict[str, Streak] = field(default_factory=dict)
    medians: PointHistory = field(default_factory=PointHistory)
    first: InitialLearningRate = field(default_factory=InitialLearningRate)


class WeightUpdateRatio(TensorRowRule[WeightUpdateRatioParams, _State]):
    """Small updates are not checked while all learning rates are paused: `learning_rate_anomaly`
    reports that."""

    meta = RuleMeta(
        name="weight_update_ratio",
        version=2,
        family="numerical",
        meaning="One step changes many weights by a large part of their size, or hardly at all.",
        severity="warning",
        available="maybe",
        inputs=(
            tensors("updates"),
            tensors("gradients", optional=True),
            scalar("lr.*", optional=True),
            scalar("loss", optional=True),
            event(RunStarted, optional=True),
        ),
        capture_hint="updates of weights are captured when a PyTorch optimizer steps",
        remedy="Large: lower the learning rate or the weight decay. Small: raise the rate; with "
        "weights in bfloat16 keep a float32 copy, since small updates are rounded away.",
        alias="WeightUpdateRatio",
        params=WeightUpdateRatioParams,
        branches={
            "large": "One step changes many weights by a large part of their size.",
            "small": "One step hardly changes many weights.",
        },
        presets={
            "sagemaker": {
                "small_threshold": 1e-8,
                "large_threshold": 10.0,
                "epsilon": 1e-9,
                "share": 1e-9,
                "for_summaries": 1,
                "warmup_steps": 0,
                "only_pushed": False,
            }
        },
        does_not_see="A single step that is far too large, between two summaries; a rate that "
        "becomes too high through a warm-up; and weights that oscillate without progress.",
        resolve_after_steps=20,
    )
    state_type = _State
    columns = ("update_l2", "l2")

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        self.state.groups.add_start(data)
        return ()

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        self.state.groups.add_rates(frame)
        self.state.first.add_losses(frame)
        return self._ruined(at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if frame.collection == "gradients":
            self.state.pushed.add(frame)
            return ()
        return super().on_tensors(frame, at)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        change, size = doubles(table, "update_l2"), table.column("l2")
        assert size is not None
        if state.first_step is None:
            state.first_step = table.step
        if table.step - state.first_step < params.warmup_steps:
            state.first.add_updates(table.step, table.rows, change, size.astype(np.float64))
            yield from self._ruined(at)
            return
        ratio = change / (size + params.epsilon)
        state.medians.append(table.step, np.median(ratio))
        every = np.ones(len(table.rows), bool)
        known = state.pushed.moved is not None and params.only_pushed
        pushed = every if not known else state.pushed.among(table.rows)
        small = ratio < params.small_threshold
        yield from self._large(table, ratio, at)
        rest = (
            state.groups.inspect()
            if params.only_pushed
            else FrozenSince(everywhere=False, tensors=0)
        )
        if not rest.everywhere:
            yield from self._side("small", small, pushed, rest.tensors, ratio, table, at)

    def _large(self, table: TensorFrame, ratio: Doubles, at: Moment) -> Outcomes:
        params = self.params
        numel = table.count("numel") if params.only_pushed else None
        asked = np.ones(len(table.rows), bool) if numel is None else numel >= _FEW
        if asked.any():
            large = ratio > params.large_threshold
            yield from self._side("large", large, asked, 0, ratio, table, at)

    def _ruined(self, at: Moment) -> Outcomes:
        """Whether one of the first steps has thrown the weights away."""
        first = self.state.first
        found = first.ruined()
        if found is None or first.step is None:
            return
        facts = [
            fact("reason", "large"),
            fact("ratio", first.worst_ratio),
            fact("median_ratio", first.ratio, limit=found.limit),
            fact("median_norm", first.norm, limit=STRETCH),
        ]
        if found.first_loss is not None and found.loss is not None:
            facts[-1:] = [
                fact("first_loss", found.first_loss),
                fact("loss", found.loss, limit=found.loss_limit),
            ]
        yield Finding(
            about="large",
            branch="large",
            subject=Subject(kind="tensor", name=first.worst, collection="weights"),
            reason=f"step {first.step} changed half of {first.tensors} weights by more than "
            f"{first.ratio:.2g} of their norm, {found.reason}",
            first_step=first.step,
            first_rank=self.state.tables["updates"].rank,
            facts=tuple(facts),
            followed=first.tensors // 2,
        )

    def _side(
        self,
        side: Side,
        over: npt.NDArray[np.bool_],
        among: npt.NDArray[np.bool_],
        resting: int,
        ratio: Doubles,
        table: TensorFrame,
        at: Moment,
    ) -> Outcomes:
        params, large = self.params, side == "large"
        out, watched = over & among, int(among.sum())
        more, of = int(out.sum()) - resting, watched - resting
        holds = more > 0 and more >= params.share * of
        streak = self.state.sides.setdefault(side, Streak())
        streak.update(table.step, at.now_ms, holds=holds)
        if not holds:
            yield Clear(table.step, about=side)
        if not holds or streak.length < params.for_summaries:
            return
        rows = np.flatnonzero(out)
        order = rows[np.argsort(ratio[rows])].tolist()
        worst = order.pop(-1 if large else 0)
        limit = params.large_threshold if large else params.small_threshold
        yield self.row_finding(
            table,
            [worst, *order],
            collection="weights",
            branch=side,
            reason=f"one step changes {len(rows)} of {watched} weights by "
            f"{'more' if large else 'less'} than {limit:.3g} of their norm since step "
            f"{streak.first_step}: {table.rows[worst]} by {ratio[worst]:.3g}",
            first_step=streak.first_step,
            onset_ms=streak.first_ms,
            facts=(
                fact("reason", side),
                fact("ratio", ratio[worst], limit=limit),
                fact("share", len(rows) / watched, limit=params.share),
                fact("median_ratio", self.state.medians.values[-1]),
                fact("summaries", streak.length),
            ),
            series=self.state.medians.series("median ratio of update to weight", limit=limit),
        )
