"""`check_input_images`: images that are not normalised.

For an input that you name (`run.data(inputs=images)`), the training process sends the mean and
standard deviation of each channel, from a sample of the values. For an input with up to
`most_channels` channels, and once it has seen `threshold_samples` values of each, the rule fires
when

- `mean`: a channel's mean is further from 0 than `threshold_mean`,
- `scale`: a channel's standard deviation is outside [`least_std`, `largest_std`]; pixels from 0 to
  255 have about 70. A constant channel, such as a mask, is ignored.

Each must be true over the values of `for_summaries` consecutive summaries. The defaults 0.2 and 500
come from SageMaker Debugger, which checks only the mean. Pixels from 0 to 1, as `ToTensor` makes
them, have a mean of 0.1 (handwritten digits) to 0.5 (photographs): many models learn well from
them, and others normalise within the model. This is therefore an info.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles, doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.streaks import Streak


class CheckInputImagesParams(Params):
    """Parameters of `check_input_images`."""

    threshold_mean: float = Field(default=0.2, ge=0)
    """Largest distance of a channel's mean from 0. Unit: that of the input."""
    least_std: float = Field(default=0.1, ge=0)
    """Smallest standard deviation of a channel. Unit: that of the input."""
    largest_std: float | None = Field(default=10.0, gt=0)
    """Largest standard deviation; None: the standard deviation is not checked. Unit: that of the
    input."""
    threshold_samples: int = Field(default=500, ge=1)
    """Number of values of a channel before it is checked. Unit: values."""
    most_channels: int = Field(default=4, ge=1)
    """An input with more channels does not count as an image. Unit: channels."""
    for_summaries: int = Field(default=1, ge=1)
    """Consecutive summaries. Unit: summaries."""


@dataclass(slots=True)
class _Input:
    seen: float = 0.0
    mean: StateArray = field(default_factory=lambda: np.zeros(0))
    std: StateArray = field(default_factory=lambda: np.zeros(0))
    bad: Streak = field(default_factory=Streak)
    worst: PointHistory = field(default_factory=PointHistory)


@dataclass(slots=True)
class _State(RowState):
    inputs: dict[str, _Input] = field(default_factory=dict)


class CheckInputImages(TensorRowRule[CheckInputImagesParams, _State]):
    """An episode for each input."""

    meta = RuleMeta(
        name="check_input_images",
        version=1,
        family="data",
        meaning="The channels of the input images are not centred, or not scaled.",
        severity="info",
        available="later",
        inputs=(tensors("input_channels"),),
        capture_hint="name the images in the loop: run.data(inputs=images)",
        remedy="Subtract the mean of each channel over the data set and divide by its standard "
        "deviation, in the transforms of the data loader or as the model's first layer.",
        alias="CheckInputImages",
        presets={
            "sagemaker": {
                "threshold_mean": 0.2,
                "threshold_samples": 500,
                "largest_std": None,
                "most_channels": 1024,
                "for_summaries": 1,
            }
        },
        branches={
            "mean": "The mean of a channel is far from 0.",
            "scale": "The standard deviation of a channel is far from 1.",
        },
        does_not_see="Images that are not named; normalisation within the model; the channels of "
        "images whose last dimension they are (NHWC), which count as features of pixels in batches "
        "of four dimensions.",
        params=CheckInputImagesParams,
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = False
    columns = ("mean", "std", "numel")

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        mean, std, values = doubles(table, "mean"), doubles(table, "std"), table.count("numel")
        assert values is not None
        channels: dict[str, list[int]] = {}
        for row, name in enumerate(table.rows):
            channels.setdefault(name.rpartition(".")[0], []).append(row)
        for name, rows in channels.items():
            least = float(values[rows].min())
            if len(rows) <= self.params.most_channels and least > 0:
                yield from self._input(name, mean[rows], std[rows], least, table.step, at)

    def _input(
        self, name: str, mean: Doubles, std: Doubles, values: float, step: int, at: Moment
    ) -> Outcomes:
        if not (np.isfinite(mean).all() and np.isfinite(std).all()):
            return  # nonfinite says that; in the means it would stay for ever
        known = self.state.inputs.setdefault(name, _Input())
        if len(known.mean) != len(mean):
            known = self.state.inputs[name] = _Input(mean=mean, std=std)
        share = values / (known.seen + values)
        centre = known.mean + share * (mean - known.mean)
        apart = (1 - share) * (known.mean - centre) ** 2 + share * (mean - centre) ** 2
        known.std = np.sqrt((1 - share) * known.std**2 + share * std**2 + apart)
        known.mean = centre
        known.seen += values
        if known.seen < self.params.threshold_samples:
            return
        off = np.abs(known.mean) > self.params.threshold_mean
        wide = np.zeros(len(mean), bool)
        if (largest := self.params.largest_std) is not None:
            wide = (known.std > largest) | ((known.std < self.params.least_std) & (known.std > 0.0))
        known.worst.append(step, np.abs(known.mean).max())
        bad = off | wide
        length = known.bad.update(step, at.now_ms, holds=bool(bad.any()))
        if not length:
            yield Clear(step, about=name)
        elif length >= self.params.for_summaries:
            yield self._finding(name, known, np.flatnonzero(bad).tolist(), wide)

    def _finding(self, name: str, known: _Input, bad: list[int], wide: StateArray) -> Finding:
        scale = bool(wide.any())
        first = int(np.flatnonzero(wide)[0]) if scale else bad[0]
        params = self.params
        others = f", and {len(bad) - 1} other channels" if len(bad) > 1 else ""
        return Finding(
            about=name,
            branch="scale" if scale else "mean",
            subject=Subject(kind="tensor", name=f"{name}.{first}", collection="input_channels"),
            reason=f"channel {first} of {name} has the mean {known.mean[first]:.3g} and the "
            f"standard deviation {known.std[first]:.3g}{others}: the images are not normalised",
            first_step=known.bad.first_step,
            first_rank=self.state.tables["input_channels"].rank,
            facts=(
                fact("mean", known.mean[first], limit=params.threshold_mean),
                fact("std", known.std[first], limit=params.largest_std),
                fact("values_seen", known.seen),
            ),
            series=known.worst.series(
                "distance of the worst mean from 0", limit=params.threshold_mean
            ),
            followed=len(bad) - 1,
            also=tuple(f"{name}.{i}" for i in bad if i != first),
        )
