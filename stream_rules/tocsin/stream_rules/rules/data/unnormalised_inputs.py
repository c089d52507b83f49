"""`unnormalised_inputs`: the inputs of the first layer are not on the expected scale.

If the first layer that is called is linear, convolutional or recurrent, the rule checks a sample of
its inputs in three of the first steps. With r the root mean square:

- `raw_pixels`: all values are integers, from 0 up to 50 … 255: bytes of images. A warning.
- `large`: r > `large`, a warning; r > `notable`, an info. Initialisations assume r = 1; the outputs
  of the first layer, and the gradient of its weight, are r times as large. 100 is far above any
  standardised data, even with heavy tails; pixels from 0 to 16 (r = 8) and most counts are below
  10.
- `constant`: all samples of all checks are the same: the data is lost before the model. A warning
  if there are targets to learn, otherwise an info: a small reinforcement-learning problem may have
  one state.

Models that normalise first, or start with an embedding, are not checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from tocsin.schemas.records.issues import Severity, Subject
from tocsin.schemas.records.program_facts import LayerInputsSeen, LossInputsSeen
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, event

_BYTE: Final = 255.0
_BYTES_FROM: Final = 50.0
_REMEDIES: Final = {
    "raw_pixels": "Divide by 255, and subtract the mean of the training data and divide by its "
    "standard deviation.",
    "constant": "Check the output of the data loader: all samples of a batch are the same.",
}


class UnnormalisedInputsParams(Params):
    """Parameters of `unnormalised_inputs`."""

    large: float = Field(default=100.0, gt=0)
    """Root mean square of the inputs that causes a warning."""
    notable: float = Field(default=10.0, gt=0)
    """Root mean square of the inputs that causes an info."""
    for_looks: int = Field(default=2, ge=1)
    """Consecutive checks. Unit: looks."""


@dataclass(slots=True)
class _State:
    rank: int | None = None
    supervised: bool = False
    branch: str = ""
    severities: list[Severity] = field(default_factory=list)
    """Of the last checks in a row that found the branch."""
    first_step: int = 0


class UnnormalisedInputs(Rule[UnnormalisedInputsParams, _State]):
    """One episode for the run."""

    meta = RuleMeta(
        name="unnormalised_inputs",
        version=2,
        family="data",
        meaning="The inputs of the first layer are not normalised.",
        severity="warning",
        available="maybe",
        inputs=(event(LayerInputsSeen), event(LossInputsSeen, optional=True)),
        capture_hint="the inputs of the first linear, convolutional or recurrent layer are "
        "captured in steps 2 to 4, unless the model is compiled",
        remedy="Subtract the mean of the training data from the inputs and divide by its standard "
        "deviation, feature by feature.",
        does_not_see="Inputs of other branches of a model, a single feature on another scale, "
        "compiled models, and changes after the first steps.",
        params=UnnormalisedInputsParams,
        branches={
            "raw_pixels": "Bytes of images.",
            "large": "Values far from a scale of 1.",
            "constant": "All samples are the same.",
        },
        resolve_after_steps=0,
    )
    state_type = _State

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        state = self.state
        if isinstance(data, LossInputsSeen):
            state.supervised = True
        if not isinstance(data, LayerInputsSeen):
            return
        if state.rank is not None and data.rank > state.rank:
            return
        if data.rank != state.rank:
            self.state = state = _State(rank=data.rank, supervised=state.supervised)
        branch, severity = self._evaluate(data)
        if branch != state.branch:
            state.branch, state.severities, state.first_step = branch, [], data.step
        state.severities = [*state.severities, severity][-self.params.for_looks :]
        if branch and len(state.severities) == self.params.for_looks:
            # Inputs around a limit are above the lower one in all of these checks.
            yield self._finding(data, branch, "info" if "info" in state.severities else severity)

    def _evaluate(self, data: LayerInputsSeen) -> tuple[str, Severity]:
        rms = math.hypot(data.mean, data.std)
        if not math.isfinite(rms):
            return "", "info"
        if data.sample_std == 0.0 and data.values > 1:
            return "constant", "warning" if self.state.supervised else "info"
        pixels = data.minimum >= 0 and _BYTES_FROM <= data.maximum <= _BYTE
        if pixels and data.whole_numbers and rms > self.params.notable:
            return "raw_pixels", "warning"
        if rms > self.params.large:
            return "large", "warning"
        return ("large", "info") if rms > self.params.notable else ("", "info")

    def _finding(self, data: LayerInputsSeen, branch: str, severity: Severity) -> Finding:
        rms = math.hypot(data.mean, data.std)
        reason = {
            "raw_pixels": f"{data.layer} receives raw pixels, from {data.minimum:.0f} to "
            f"{data.maximum:.0f}",
            "large": f"{data.layer} receives inputs of size {rms:.3g} (from {data.minimum:.3g} to "
            f"{data.maximum:.3g})",
            "constant": f"all samples that {data.layer} receives are the same",
        }[branch]
        limit = self.params.large if severity == "warning" else self.params.notable
        return Finding(
            branch=branch,
            subject=Subject(kind="layer", name=data.layer),
            reason=reason,
            first_step=self.state.first_step,
            first_rank=data.rank,
            severity=severity,
            remedy=_REMEDIES.get(branch),
            facts=(
                fact("class", data.kind),
                fact("mean", data.mean),
                fact("std", data.std),
                fact("smallest", data.minimum),
                fact("largest", data.maximum),
                fact("root_mean_square", rms, limit=limit),
            ),
            explanation=f"a sample of {data.values:,} numbers of a batch, at step {data.step}",
        )
