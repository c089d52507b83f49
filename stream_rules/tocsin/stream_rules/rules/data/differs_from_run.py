"""`differs_from_run`: this run differs from another one.

Use it for two runs that should give the same numbers: the same program after a refactoring, on
another machine, or with another version of a library. The rule compares values at each step whose
loss both runs have reported, and in each summary of the same collection, step and tensor: values
differ if they are further apart than `rtol` times the larger one (for minimum, maximum, mean and
standard deviation: times the largest absolute value of the tensor). It reports only the first
difference, because later ones follow from it. With an `rtol` of 0, as in the preset, all reported
values must be identical.

The other run must be on the same bus within its retention, a day by default, and be ahead of this
one, usually completed. The rule keeps its losses and the first 64 MiB of its summaries. If the
other run is unknown at this run's first step, that is an issue (`not_found`), once. The other run
itself, with the same configuration, is not compared with anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Finding, Holds, Moment, Outcomes, fact
from tocsin.stream_rules.reading.other_runs import COLLECTIONS, Reference, References, differs
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule


class DiffersFromRunParams(Params):
    """Parameters of `differs_from_run`."""

    other_run: str = ""
    """The id of the run with which this one is compared."""
    rtol: float = Field(default=1e-3, ge=0)
    """Largest difference of two values. Unit: a share of the larger one."""
    losses: bool = True
    """Whether the losses of the steps are compared, too."""


@dataclass(slots=True)
class _State(RowState):
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    looked: bool = False
    different: bool = False
    compared: int = 0


class DiffersFromRun(TensorRowRule[DiffersFromRunParams, _State]):
    """One episode, at the first difference; another if the other run is not there."""

    meta = RuleMeta(
        name="differs_from_run",
        version=1,
        family="data",
        meaning="The run differs from another one that it should be like.",
        severity="warning",
        by_default=False,
        inputs=(scalar("loss"), *(tensors(collection) for collection in COLLECTIONS)),
        capture_hint="losses, gradients and weights are captured by default",
        remedy="Compare seeds, data order, versions and flags of the two runs at the first step "
        "that differs; torch.use_deterministic_algorithms(True) makes the kernels deterministic.",
        alias="SimilarAcrossRuns",
        presets={"sagemaker": {"rtol": 0.0, "losses": False}},
        branches={
            "difference": "The loss, or a tensor, differs at the same step.",
            "not_found": "The other run is unknown.",
        },
        does_not_see="Steps and tensors that only one of the runs has reported; ranks other than "
        "the first; later steps of the other run once this one has overtaken it.",
        params=DiffersFromRunParams,
    )
    state_type = _State
    by_part = False

    def __init__(self, name: str, params: DiffersFromRunParams) -> None:
        super().__init__(name, params)
        self._other: Reference | None = None

    def other_runs(self) -> Sequence[str]:
        return (self.params.other_run,) if self.params.other_run else ()

    def on_references(self, references: References) -> None:
        self._other = references.get(self.params.other_run)

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        state = self.state
        if not state.rank_series.accepts(frame):
            return
        yield from self._inspect(at)
        for step, loss in state.rank_series.points(frame, "loss"):
            other = None if self._other is None else self._other.loss(step)
            if other is None or not self.params.losses:
                continue
            state.compared += 1
            same = loss == other or (math.isnan(loss) and math.isnan(other))
            apart, most = abs(loss - other), self.params.rtol * max(abs(loss), abs(other))
            # An infinite one is as far from all others as it is large.
            if same or (math.isfinite(apart) and apart <= most):
                continue
            subject = Subject(kind="loss", name="loss")
            yield from self._differs(step, subject, "the loss", loss, other, 0)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state = self.state
        yield from self._inspect(at)
        other = None if self._other is None else self._other.frame(table.collection, table.step)
        if other is None:
            return
        state.compared += 1
        found = differs(table, other, self.params.rtol)
        if found:
            name, statistic, ours, theirs = found[0]
            subject = Subject(kind="tensor", name=name, collection=table.collection)
            what = f"{statistic} of {table.collection}/{name}"
            yield from self._differs(table.step, subject, what, ours, theirs, len(found) - 1)

    def _inspect(self, at: Moment) -> Outcomes:
        """Once: whether the other run is there."""
        state, name = self.state, self.params.other_run
        if state.looked:
            return
        state.looked = True
        if name == at.run.run_id or (self._other is not None and self._other.known):
            return
        if name:
            reason = f"the run {name} is unknown: there is nothing to compare with"
        else:
            reason = "no run is configured for comparison"
        yield Finding(
            about="not_found",
            branch="not_found",
            subject=Subject(kind="rule", name=self.name),
            reason=reason,
            remedy="Set `other_run` to a completed run on this bus, within the retention of the "
            "telemetry (`tocsin status` lists them).",
        )

    def _differs(
        self, step: int, subject: Subject, what: str, ours: float, theirs: float, others: int
    ) -> Outcomes:
        state = self.state
        if state.different:
            yield Holds(step)
            return
        state.different = True
        more = f", and {others} other tensors differ" if others else ""
        yield Finding(
            branch="difference",
            subject=subject,
            reason=f"{what} is {ours:.6g} at step {step}, and {theirs:.6g} in the run "
            f"{self.params.other_run}{more}",
            first_step=step,
            first_rank=state.rank_series.rank,
            facts=(
                fact("here", ours),
                fact("there", theirs),
                fact("compared_before", state.compared - 1),
                fact("other_run", self.params.other_run),
            ),
            followed=others,
            explanation=f"values are the same up to {self.params.rtol:g} of the larger one",
        )
