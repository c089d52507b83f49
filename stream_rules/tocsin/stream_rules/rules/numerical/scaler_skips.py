"""`scaler_skips`: the loss scaler of mixed precision skips too many steps.

A GradScaler skips a step whose scaled gradients are not finite, halves its scale, and doubles it
again after 2,000 good steps: one skip in 2,000 is normal, and so are a few at the start, while it
searches for the scale. There are two conditions, each a separate episode:

- share: of the last `window` attempts more than `share` were skipped. Skips before the first
  completed step are the search for the scale, and do not count until there are `search` of them.
- floor: the scale is below `floor`. Starting from PyTorch's 65,536, this takes 17 more skips than
  recoveries. The scale then reduces gradients instead of enlarging them, and small values become 0
  in float16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import RankSeries
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar

SKIPPED, SCALE = "scaler_skipped", "scaler_scale"


class ScalerSkipsParams(Params):
    """Parameters of `scaler_skips`."""

    share: float = Field(default=20.0, gt=0, lt=100)
    """Share of the attempts that were skipped. Unit: percent."""
    window: int = Field(default=50, ge=5)
    """Number of attempts that are counted. Unit: steps."""
    floor: float = Field(default=1.0, ge=0)
    """Lower limit of the scale; 0 switches this condition off."""
    search: int = Field(default=20, ge=0)
    """How many consecutive attempts may be skipped at the start. Unit: steps."""


@dataclass(slots=True)
class _State:
    skips: RankSeries = field(default_factory=RankSeries)
    scales: RankSeries = field(default_factory=RankSeries)
    attempts: list[tuple[int, int]] = field(default_factory=list)
    """(step, how many attempts of it were skipped before it was made), the last `window`."""
    made: bool = False


class ScalerSkips(Rule[ScalerSkipsParams, _State]):
    """A warning: the model learns from the steps that are not skipped, and the scaler may still
    find its scale."""

    meta = RuleMeta(
        name="scaler_skips",
        version=1,
        family="numerical",
        meaning="The loss scaler skips many steps, or its scale has fallen very low.",
        severity="warning",
        available="maybe",
        inputs=(scalar(SKIPPED), scalar(SCALE, optional=True)),
        capture_hint="skips of torch.amp.GradScaler are captured",
        remedy="Train in bfloat16, which needs no scaler. Otherwise find what is too large: the "
        "learning rate, a loss that is a sum instead of a mean, a division or logarithm in "
        "float16. Clip gradients after scaler.unscale_.",
        does_not_see="Custom scalers, and steps that are lost in another way.",
        params=ScalerSkipsParams,
        branches={
            "share": "Many of the last steps were skipped.",
            "floor": "The scale has fallen below the floor.",
        },
        resolve_after_steps=20,
    )
    state_type = _State

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        if state.skips.overtaken_by(frame):
            self.state = state = _State(skips=state.skips, scales=state.scales)
        if not state.skips.accepts(frame):
            return
        state.scales.accepts(frame)
        skipped = frame.column(SKIPPED)
        if skipped is not None:
            # A scaler that skips step after step sends rows of the step that does not come.
            stepped = any(name.startswith("lr.") for name in frame.columns)
            for step, count in zip(frame.steps.tolist(), skipped.tolist(), strict=True):
                if math.isfinite(count) and count >= 0:
                    yield from self._attempt(step, int(count), made=stepped)
        for step, scale in state.scales.points(frame, SCALE):
            if scale < self.params.floor:
                yield self._floor(step, scale)
            else:
                yield Clear(step, about="floor")

    def _attempt(self, step: int, skipped: int, *, made: bool) -> Outcomes:
        state, params = self.state, self.params
        if state.attempts and step < state.attempts[-1][0]:
            return
        if state.attempts and step == state.attempts[-1][0]:
            skipped = max(skipped, state.attempts.pop()[1])
        state.attempts = [*state.attempts, (step, skipped)][-params.window :]
        state.skips.add(step, float(skipped))
        searching = not state.made and skipped < params.search
        if made and not state.made:
            state.made = True
            if searching:
                state.attempts[-1] = (step, 0)
        share, first = self._share()
        if share > params.share and not searching:
            yield self._finding(share, first)
        else:
            yield Clear(step, about="share")

    def _share(self) -> tuple[float, int]:
        """Percent of the last attempts, and the first step of them that was skipped."""
        window, skipped, attempts = self.params.window, 0, 0
        first = self.state.attempts[-1][0]
        for step, count in reversed(self.state.attempts):
            if attempts >= window:
                break
            counted = min(count, window - attempts)
            attempts += counted + 1
            skipped += counted
            if count:
                first = step
        return 100 * skipped / window, first

    def _finding(self, share: float, first: int) -> Finding:
        params, state = self.params, self.state
        never = "" if state.made else "; no step has been completed yet"
        return Finding(
            about="share",
            branch="share",
            subject=Subject(kind="scalar", name=SKIPPED),
            reason=f"the loss scaler has skipped {share:.0f} % of the last {params.window} steps, "
            f"since step {first}{never}",
            first_step=first,
            first_rank=state.skips.rank,
            facts=(fact("skipped", share, limit=params.share, unit="percent"),),
            series=state.skips.series("attempts skipped before each step"),
            explanation="a step is skipped if its scaled gradients are not finite",
        )

    def _floor(self, step: int, scale: float) -> Finding:
        state, floor = self.state, self.params.floor
        return Finding(
            about="floor",
            branch="floor",
            subject=Subject(kind="scalar", name=SCALE),
            reason=f"the scale of the loss scaler is {scale:.3g} at step {step}, below {floor:.3g}",
            first_step=step,
            first_rank=state.scales.rank,
            facts=(fact("scale", scale, limit=floor),),
            series=state.scales.series("scale of the loss", limit=floor),
        )
