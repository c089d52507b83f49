"""`nonfinite`: NaN or Inf in the loss, a gradient or a weight, and where it started.

A rank sends the scalars and the tensor summaries of a bad step immediately, in either order. Under
data parallelism, all ranks are bad in the same step. The rule determines the origin when every rank
has reported the step completely, or after 1 s. If no rank that has reported is the origin and one
rank is missing, it waits up to 5 s.

- It names the earliest bad step, and a rank whose loss or own gradients were bad.
- If the loss is bad, or all gradients at once: the first input or module in forward order with bad
  values, if the summaries of the step show it (the activations of its forward pass); otherwise the
  loss.
- If the loss is bad because a weight was: the weight, and the step whose update has written it, the
  last one with a finite loss. If the optimizer's state of the weight is bad, too, the issue starts
  at that step: most probably its gradient was not finite.
- If some gradients are bad: the first in backward order. If only a weight is bad: that weight.

Inputs and activations alone do not cause an issue, unless `tensors` names them. A batch with a bad
loss that the loop or a loss scaler skips is a warning; after several consecutive ones the emitter
sends the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import Counts, Floats, StepFrame, TensorFrame
from tocsin.schemas.records.runs import RunData, RunEnded
from tocsin.stream_rules.outcomes import Clear, Holds, Moment, Outcome, Outcomes
from tocsin.stream_rules.reading.rank_series import RankSeries, StoredRankSeries
from tocsin.stream_rules.reading.tensor_rows import is_asked_for
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, scalar, tensors
from tocsin.stream_rules.rules.numerical.nonfinite_origin.evidence import (
    GRADIENTS,
    LOCAL,
    Pending,
    RankEvidence,
    add_rows,
    bad_rows,
    first_backward,
)
from tocsin.stream_rules.rules.numerical.nonfinite_origin.finding import (
    BRANCHES,
    origin_finding,
    scalar_finding,
    skipped_finding,
)
from tocsin.stream_rules.rules.numerical.nonfinite_origin.forward_pass import Forward, is_forward

HOLD_MS: Final = 1_000
LATE_RANKS_HOLD_MS: Final = 5_000
"""Where it began in none of the ranks that have reported the step, and one has not."""

SKIPPED: Final = "nonfinite_skipped"

_MAX_COUNTED: Final = 2**53
_COLLECTIONS: Final = (GRADIENTS, LOCAL, "weights", "optimizer_state")


class NonfiniteParams(Params):
    """Parameters of `nonfinite`."""

    only_nan: bool = False
    """Ignore infinities; report only NaN."""
    tensors: tuple[str, ...] = Field(default=(), strict=False)
    """Further tensors to watch, as COLLECTION/NAME; `*` and `?` stand for any characters."""
    for_steps: int = Field(default=1, ge=1)
    """How many consecutive steps must be bad. Unit: steps."""


@dataclass(slots=True)
class _State:
    pending: Pending | None = None
    open_since: int | None = None
    open_rank: int | None = None
    """Where it began: the issue is over after healthy steps of this rank. Others send theirs in
    longer frames, and may never have been bad. None: any rank, as that one has ended."""
    healthy_since: int | None = None
    with_lr: set[int] = field(default_factory=set)
    skipped: dict[int, int] = field(default_factory=dict)
    rank_series: StoredRankSeries = field(default_factory=RankSeries)
    forward: dict[int, Forward] = field(default_factory=dict)
    skipped_at: int | None = None
    """The step in place of which a bad batch was skipped lately."""


class Nonfinite(Rule[NonfiniteParams, _State]):
    """Evaluation losses, named scalars and skipped batches are warnings, never a stop."""

    meta = RuleMeta(
        name="nonfinite",
        version=2,
        family="numerical",
        meaning="The loss, a gradient or a weight has become NaN or infinite.",
        severity="critical",
        stop_worthy=True,
        history_steps=0,
        stops_because="a NaN cannot recover: the next step destroys the weights, and every later "
        "step is wasted money",
        inputs=(
            scalar("loss", mode=None),
            scalar("gradient_nonfinite"),
            scalar("gradient_norm"),
            scalar(SKIPPED),
            scalar("log.*", mode=None),
            tensors("*"),
        ),
        capture_hint="the loss is captured when backward() is called on it, gradients when a "
        "PyTorch optimizer steps",
        remedy="Go back to a checkpoint from before the first bad step. Check the batch of that "
        "step, divisions, logarithms and square roots before the first bad tensor, and the "
        "learning rate.",
        alias="ExplodingTensor",
        params=NonfiniteParams,
        branches=BRANCHES,
        presets={"sagemaker": {"only_nan": False, "tensors": ("*",), "for_steps": 1}},
        does_not_see="Values that are large but finite, infinities that a loss scaler keeps away "
        "from the weights (`scaler_skips`), and, unless `tensors` names them, activations: masks "
        "and log-probabilities are infinite by design.",
        resolve_after_steps=20,
    )
    state_type = _State

    def next_due_ms(self) -> int | None:
        pending = self.state.pending
        if pending is None or pending.since_ms is None:
            return None
        if pending.late_ranks:
            return pending.since_ms + LATE_RANKS_HOLD_MS
        return pending.since_ms + HOLD_MS

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        yield from self._named_scalars(frame, at)
        if frame.mode != "train" or not frame.steps.size or frame.is_logged:
            return
        if frame.column(SKIPPED) is not None:
            yield self._skipped(frame)
            return
        if self.state.skipped_at is not None:
            yield from self._no_more_skipped(int(frame.steps[-1]))
        if self.state.rank_series.accepts(frame):
            for _ in self.state.rank_series.points(frame, "loss"):
                pass
        rank = frame.origin.rank
        loss, gradients, skipped = frame.column("loss"), *self._gradients(frame)
        bad_loss = self._bad(loss) if loss is not None else np.zeros(len(frame.steps), bool)
        bad = bad_loss | (gradients > 0)
        steps = frame.steps.tolist()
        if self.state.pending is None and not bad.any():
            yield from self._healthy(rank, steps[0], steps[-1])
            return
        for i, step in enumerate(steps):
            if bad[i]:
                value = float(loss[i]) if loss is not None and bad_loss[i] else None
                yield from self._bad_row(rank, step, value, int(gradients[i]), at)
                pending = self.state.pending
                if pending is not None and pending.step == step and rank in pending.ranks:
                    pending.ranks[rank].clipped = "gradient_norm_clipped" in frame.columns
            else:
                self._good_row(rank, step, skipped=skipped)
                yield from self._healthy(rank, step, step)
        yield from self._if_settled(at)

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if frame.mode != "train":
            return
        state, rank = self.state, frame.origin.rank
        if is_forward(frame) and state.open_since is None:
            state.forward.setdefault(rank, Forward()).add(frame)
        counts = self._counts(frame)
        bad = counts is not None and bool(counts.any())
        if frame.collection in (GRADIENTS, LOCAL) and state.skipped.get(rank) == frame.step:
            return
        if bad and state.open_since is not None:
            state.healthy_since = None
            yield Holds(frame.step)
            return
        pending = self._pending(frame.step, at) if bad else state.pending
        if pending is None or counts is None:
            return
        if frame.step == pending.step:
            evidence = self._evidence(pending, rank, at)
            found = evidence.collections.get(frame.collection)
            evidence.collections[frame.collection] = add_rows(found, frame, counts)
            if frame.collection == LOCAL and bad:
                backward = first_backward(frame, counts)
                fresh = found is None or not found.bad
                evidence.backward = backward if fresh else min(backward, evidence.backward)
        elif frame.step > pending.step and rank in pending.ranks:
            pending.ranks[rank].passed = True
        if bad:
            self._count_row(pending, rank, frame.step, at)
        yield from self._if_settled(at)

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        pending = self.state.pending
        if not isinstance(data, RunEnded):
            return
        if data.role == "trainer" and data.rank == self.state.open_rank:
            self.state.open_rank = None
        if pending is None:
            return
        if data.role == "trainer" and data.rank in pending.ranks:
            pending.ranks[data.rank].passed = True
        if at.run.ended and pending.since_ms is not None:
            yield from self._decide(pending, at)
        else:
            yield from self._if_settled(at)

    def on_timer(self, at: Moment) -> Outcomes:
        pending = self.state.pending
        if pending is None:
            return
        elsewhere = pending.several_ranks and not pending.begun_at_home
        if elsewhere and not pending.late_ranks and not at.run.all_reported(pending.step):
            pending.late_ranks = True
        else:
            yield from self._decide(pending, at)

    # -- rows ------------------------------------------------------------------------------

    def _bad_row(
        self, rank: int, step: int, loss: float | None, gradients: int, at: Moment
    ) -> Outcomes:
        if self.state.open_since is not None:
            self.state.healthy_since = None
            yield Holds(step)
            return
        pending = self._pending(step, at)
        if step == pending.step:
            evidence = self._evidence(pending, rank, at)
            evidence.scalars, evidence.loss, evidence.bad_gradients = True, loss, gradients
        elif rank in pending.ranks:
            pending.ranks[rank].passed = True
        self._count_row(pending, rank, step, at)

    def _good_row(self, rank: int, step: int, *, skipped: bool) -> None:
        pending = self.state.pending
        if pending is None or rank not in pending.ranks:
            return
        evidence = pending.ranks[rank]
        if step == pending.step:
            evidence.scalars = True
            if skipped:
                # The loss scaler has kept these gradients from the weights.
                for collection in (GRADIENTS, LOCAL):
                    evidence.collections.pop(collection, None)
        elif step > pending.step:
            evidence.passed = True
            if pending.since_ms is None:
                evidence.collections.clear()
                evidence.loss, evidence.bad_gradients = None, 0
        if not any(evidence.bad for evidence in pending.ranks.values()):
            self.state.pending = None

    def _healthy(self, rank: int, first: int, last: int) -> Outcomes:
        state = self.state
        if state.open_since is None or state.open_rank not in (None, rank):
            return
        if state.healthy_since is None:
            state.healthy_since = first
        if last - state.healthy_since >= self.meta.resolve_after_steps:
            state.open_since = state.open_rank = state.healthy_since = None
        yield Clear(last, since=first)

    def _skipped(self, frame: StepFrame) -> Outcome:
        """The loop, or a loss scaler, has skipped a batch whose loss is bad: nothing is lost."""
        step, rank = int(frame.steps[-1]), frame.origin.rank
        self.state.skipped_at = step
        forward = self.state.forward.pop(rank, None)
        began = None if forward is None else forward.origin(step)
        return skipped_finding(frame, step, began)

    def _no_more_skipped(self, step: int) -> Outcomes:
        since = self.state.skipped_at or 0
        if step - since >= self.meta.resolve_after_steps:
            self.state.skipped_at = None
        yield Clear(step, about=SKIPPED, since=since)

    # -- the decision ----------------------------------------------------------------------

    def _pending(self, step: int, at: Moment) -> Pending:
        """What is to be decided: the step, unless an earlier one is."""
        pending = self.state.pending
        if pending is None or step < pending.step:
            several = at.run.world_size > 1
            pending = Pending(step=step, opened_ms=at.now_ms, several_ranks=several)
            self.state.pending = pending
        return pending

    def _evidence(self, pending: Pending, rank: int, at: Moment) -> RankEvidence:
        if rank not in pending.ranks:
            last = at.run.rank_last_step(rank)
            # Scalars that came before were good, else they would have been noted.
            pending.rank(rank).scalars = last is not None and last >= pending.step
        return pending.ranks[rank]

    def _count_row(self, pending: Pending, rank: int, step: int, at: Moment) -> None:
        if rank not in pending.ranks:
            return
        pending.ranks[rank].bad_again(step)
        if pending.since_ms is None and pending.ranks[rank].row >= self.params.for_steps:
            pending.since_ms = at.now_ms

    def _if_settled(self, at: Moment) -> Outcomes:
        pending = self.state.pending
        if pending is None or pending.since_ms is None or not pending.settled():
            return
        if not pending.several_ranks or at.run.all_reported(pending.step):
            yield from self._decide(pending, at)

    def _decide(self, pending: Pending, at: Moment) -> Outcomes:
        self.state.pending = None
        rank, _ = pending.origin()
        self.state.open_since, self.state.open_rank = pending.step, rank
        self.state.healthy_since = None
        forward = self.state.forward.get(rank)
        began = None if forward is None else forward.origin(pending.step)
        self.state.forward.clear()
        yield origin_finding(pending, self.state.rank_series, began)

    # -- reading ---------------------------------------------------------------------------

    def _bad(self, values: Floats) -> npt.NDArray[np.bool_]:
        bad = np.isnan(values) if self.params.only_nan else ~np.isfinite(values)
        return np.asarray(bad, bool)

    def _gradients(self, frame: StepFrame) -> tuple[npt.NDArray[np.int64], bool]:
        """How many gradients were bad at each step, and whether the optimizer skipped the steps.

        A rank that has sent learning rates and sends none for a step has not stepped: a loss scaler
        has seen the bad gradients and deals with them.
        """
        none = np.zeros(len(frame.steps), np.int64)
        rank = frame.origin.rank
        if any(name.startswith("lr.") for name in frame.columns):
            self.state.with_lr.add(rank)
            self.state.skipped.pop(rank, None)
        elif rank in self.state.with_lr:
            self.state.skipped[rank] = int(frame.steps[-1])
            return none, True
        counted, norm = frame.column("gradient_nonfinite"), frame.column("gradient_norm")
        if counted is not None and not counted.any() and not self.params.only_nan:
            return none, False  # all were counted, and none was bad
        by_norm = none if norm is None else self._bad(norm).astype(np.int64)
        if counted is None or self.params.only_nan:
            return by_norm, False
        # NaN: not counted at this step. A number beyond the bound is none of a training's.
        known = np.clip(np.nan_to_num(counted, nan=0.0), 0, _MAX_COUNTED).astype(np.int64)
        return np.where(np.isnan(counted), by_norm, known), False

    def _counts(self, frame: TensorFrame) -> Counts | None:
        """The bad values of each row that is watched; None: none is."""
        counts = bad_rows(frame, only_nan=self.params.only_nan)
        if counts is None or frame.collection in _COLLECTIONS:
            return counts
        asked = self.params.tensors
        if not asked:
            return None
        watched = [is_asked_for(frame.collection, name, asked) for name in frame.rows]
        return counts * np.asarray(watched, np.uint64) if any(watched) else None

    def _named_scalars(self, frame: StepFrame, at: Moment) -> Outcomes:
        """Evaluation losses and `log.NAME`: warnings, each for itself."""
        for name in frame.columns:
            evaluation = name == "loss" and frame.mode != "train"
            if not (evaluation or name.startswith("log.")) or not frame.steps.size:
                continue
            values = frame.column(name)
            if values is None:
                continue
            bad = self._bad(values)
            about = f"{frame.mode}/{name}"
            last = int(frame.steps[-1])
            if not bad[-1]:
                yield Clear(last, about=about)
            if bad.any():
                i = int(bad.argmax())
                yield scalar_finding(
                    about, frame, name, int(frame.steps[i]), float(values[i]), evaluation
                )
