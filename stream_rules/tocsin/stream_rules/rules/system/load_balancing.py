"""`load_balancing`: some GPUs of the job work while others wait.

The rule makes a histogram of each GPU's utilisation in its last `window` samples, with 50 bins from
0 to 100 percent, both ends included. For two GPUs with the histograms P and Q and M = (P + Q) / 2,
the distance is the square root of the Jensen-Shannon divergence, sqrt((KL(P‖M) + KL(Q‖M)) / 2) with
natural logarithms, between 0 and 0.83. It compares all pairs, also across nodes; with more than 64
GPUs, the 32 least and the 32 most busy ones. A pair counts when its distance is above `threshold`
and its means are at least `least_points` apart: the histograms of a GPU always at 95 % and one
always at 99 % do not overlap, although the two are well balanced.

The rule only compares GPUs that are known to belong to the job; otherwise it could compare those of
two jobs. Samples from before the first step are ignored, and each GPU must have `patience` samples.
The last published version of SageMaker Debugger compares each GPU with itself and excludes a GPU at
100 % from its histogram, so it never fires. This rule compares different GPUs. SageMaker Debugger's
documented defaults are 0.5 and 10 samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import Doubles, SystemFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, system
from tocsin.stream_rules.signals.gpus import CAPTURE_HINT, gpus_with
from tocsin.stream_rules.signals.hysteresis import Hysteresis
from tocsin.stream_rules.signals.sliding_window import SlidingWindow, TrainingStart

_BINS: Final = 50
_CHECK_MS: Final = 20_000
"""How often all pairs are looked at, milliseconds."""

_MAX_GPUS: Final = 64
_SILENT_US: Final = 60_000_000
"""A GPU that was not heard of for that long is not compared, microseconds."""

_OVER_S: Final = 120.0


class LoadBalancingParams(Params):
    """Parameters of `load_balancing`."""

    threshold: float = Field(default=0.5, gt=0, lt=0.832)
    """Distance of two histograms, at most 0.83. Unit: Jensen-Shannon distance, nats."""
    least_points: float = Field(default=20.0, ge=0, lt=100)
    """Minimum difference of the means of two GPUs. Unit: points of percent."""
    window: int = Field(default=500, ge=10, le=10_000)
    """Number of samples in the histogram. Unit: samples of 0.5 s."""
    patience: int = Field(default=1000, ge=0, le=100_000)
    """Number of samples needed for each GPU. Unit: samples of 0.5 s."""


@dataclass(slots=True)
class _State:
    start: TrainingStart = field(default_factory=TrainingStart)
    gpus: dict[str, SlidingWindow] = field(default_factory=dict)
    looked_ms: int = 0
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


class LoadBalancing(Rule[LoadBalancingParams, _State]):
    """One episode for the run; it names the least busy GPU and the most different one."""

    meta = RuleMeta(
        name="load_balancing",
        version=1,
        family="system",
        meaning="Some GPUs of the job are busy while others wait or are idle.",
        severity="warning",
        available="later",
        inputs=(
            system("gpu.*.utilization_percent"),
            system("gpu.*.of_job", optional=True),
        ),
        capture_hint=f"{CAPTURE_HINT}; which are the job's is known from CUDA_VISIBLE_DEVICES or "
        "its processes",
        remedy="Give each GPU the same share of the batch and stages of equal cost; use "
        "DistributedDataParallel rather than DataParallel, which gathers everything on one GPU.",
        alias="LoadBalancing",
        params=LoadBalancingParams,
        presets={
            "sagemaker": {"threshold": 0.5, "least_points": 0.0, "window": 10, "patience": 10}
        },
        does_not_see="A GPU that waits inside a collective counts as busy: see straggler_rank for "
        "ranks that wait for each other. A single GPU is never out of balance.",
        resolve_after_steps=0,
    )
    state_type = _State

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        state = self.state
        trains = state.start.is_over(at)
        for gpu in gpus_with(frame, "utilization_percent"):
            rate = gpu.column("utilization_percent")
            if gpu.column("of_job") is None or not gpu.is_jobs:
                state.gpus.pop(gpu.name, None)
            elif rate is not None and trains:
                recent = state.gpus.setdefault(gpu.name, SlidingWindow())
                recent.add(frame.at_us, [rate], window=self.params.window)
        if at.now_ms >= state.looked_ms + _CHECK_MS:
            state.looked_ms = at.now_ms
            yield from self._compare(at)

    def _compare(self, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        least = max(params.patience, params.window)
        heard_us = max((recent.last_us for recent in state.gpus.values()), default=0)
        known = {
            name: recent.rows[:, 0]
            for name, recent in state.gpus.items()
            if recent.seen >= least and recent.last_us >= heard_us - _SILENT_US
        }
        names = sorted(known, key=lambda name: (float(known[name].mean()), name))
        if len(names) > _MAX_GPUS:
            names = names[: _MAX_GPUS // 2] + names[-_MAX_GPUS // 2 :]
        pair = self._furthest([known[name] for name in names]) if len(names) > 1 else None
        if pair is None:
            if state.hysteresis.gone(at.now_ms / 1000, least=_OVER_S):
                yield Clear()
            return
        state.hysteresis.holds(at)
        low, high, apart, others = pair
        yield self._finding(names[low], names[high], apart, [names[i] for i in others])

    def _furthest(self, values: list[Doubles]) -> tuple[int, int, float, list[int]] | None:
        """The pair whose means are furthest apart among those that count, its distance, and the
        GPUs beside the first that are as far from the second. None: no pair counts."""
        means = np.array([value.mean() for value in values])
        apart = distances(np.stack([histogram(value) for value in values]))
        points = means[None, :] - means[:, None]
        counts = (apart > self.params.threshold) & (points >= self.params.least_points)
        np.fill_diagonal(counts, val=False)
        if not counts.any():
            return None
        low, high = divmod(int(np.where(counts, points, -np.inf).argmax()), len(values))
        others = [i for i in np.flatnonzero(counts[:, high]).tolist() if i != low]
        return low, high, float(apart[low, high]), others

    def _finding(self, low: str, high: str, apart: float, others: list[str]) -> Finding:
        gpus, params = self.state.gpus, self.params
        idle, busy = (float(gpus[name].rows.mean()) for name in (low, high))
        also = f", and {len(others)} other GPUs like it" if others else ""
        return Finding(
            subject=Subject(kind="device", name=low),
            reason=f"{low} was busy for {idle:.0f} % of the last {gpus[low].span_s:,.0f} s, "
            f"{high} for {busy:.0f} %{also}",
            episode=self.state.hysteresis.episode,
            onset_ms=self.state.hysteresis.first_ms,
            facts=(
                fact("distance", apart, limit=params.threshold),
                fact("points_apart", busy - idle, limit=params.least_points, unit="percent"),
                fact("busiest", high),
            ),
            series=gpus[low].series(f"utilisation of {low}", "percent"),
            followed=len(others),
            also=tuple(others[:32]),
            explanation="Jensen-Shannon distance of the histograms of their utilisation",
        )


def histogram(percent: Doubles) -> Doubles:
    """Shares of 50 bins from 0 to 100, both ends within."""
    bins = np.clip(percent * (_BINS / 100), 0, _BINS - 1).astype(np.int64)
    return np.bincount(bins, minlength=_BINS) / len(bins)


def distances(histograms: Doubles) -> Doubles:
    """The root of the Jensen-Shannon divergence of each two rows, natural logarithms."""

    def entropy(shares: Doubles) -> Doubles:
        with np.errstate(all="ignore"):
            terms = np.where(shares > 0, shares * np.log(shares), 0.0)
        found: Doubles = -terms.sum(-1)
        return found

    own = entropy(histograms)
    middle = entropy((histograms[:, None] + histograms[None, :]) / 2)
    return np.sqrt(np.maximum(middle - (own[:, None] + own[None, :]) / 2, 0.0))
