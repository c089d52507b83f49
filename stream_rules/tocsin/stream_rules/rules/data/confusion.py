"""`confusion`: the model mistakes one class for another.

The training process counts, in samples of the batches, how often each class was predicted as each
other one (up to 100 classes). Each row of that confusion matrix is divided by its number of labels.
There are two conditions, by branch, on the last `samples` labels, separately for training and for
evaluations: `off_diagonal`, more than `max_off_diag` of a class are predicted as one other class;
`diagonal`, less than `min_diag` of a class are predicted correctly.

The sample must be significant (Wilson's bounds, `certainty` standard deviations), in
`for_summaries` consecutive summaries, and only while the model predicts `least_accuracy` of all
labels correctly: before it has learned, it confuses everything. With SageMaker Debugger's 0.9 and
0.1, every classifier that is not almost perfect would have a permanent issue. The defaults here
find contradictions to the labels: a class that is predicted more often as another one than as
itself, as when two classes are swapped in the labels. An info. The preset has SageMaker Debugger's
conditions. Labels that are the model's own tokens are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.state_codec import StateArray
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.class_totals import Recent
from tocsin.stream_rules.signals.proportion_bounds import at_least, at_most
from tocsin.stream_rules.signals.vocabulary import Vocabulary

Flags = npt.NDArray[np.bool_]


class ConfusionParams(Params):
    """Parameters of `confusion`."""

    min_diag: float = Field(default=0.3, ge=0, le=1)
    """Smallest share of a class that must be predicted correctly. Unit: a share, 0 to 1."""
    max_off_diag: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a class that may be predicted as one other class. Unit: a share, 0 to 1."""
    category_no: int | None = Field(default=None, ge=2)
    """Check only the first classes, this many; None: all. Unit: classes."""
    samples: int = Field(default=500, ge=1)
    """Number of labels before the rule decides. Unit: labels."""
    least_accuracy: float = Field(default=0.6, ge=0, le=1)
    """Share that the model must predict correctly. Unit: a share, 0 to 1."""
    for_summaries: int = Field(default=3, ge=1)
    """Consecutive summaries. Unit: summaries."""
    certainty: float = Field(default=3.0, ge=0)
    """Certainty that the sample must give. Unit: standard deviations."""
    tokens_too: bool = False
    """Whether labels that are the model's own tokens count as classes."""


@dataclass(slots=True)
class _Tally:
    recent: Recent = field(default_factory=Recent)
    bad: StateArray = field(default_factory=lambda: np.zeros((0, 0), np.uint32))
    since: int | None = None
    worst: PointHistory = field(default_factory=PointHistory)


@dataclass(slots=True)
class _State(RowState):
    tallies: dict[str, _Tally] = field(default_factory=dict)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)


class Confusion(TensorRowRule[ConfusionParams, _State]):
    """An episode for training and one for evaluations; it names the worst pair of classes."""

    meta = RuleMeta(
        name="confusion",
        version=1,
        family="data",
        meaning="A class is predicted more often as another class than as itself.",
        severity="info",
        available="maybe",
        inputs=(tensors("confusion", mode=None), tensors("embeddings", optional=True)),
        capture_hint="labels and predictions are found if the loss is a PyTorch cross-entropy, for "
        "up to 100 classes; otherwise name them with run.data(labels=…, predictions=…)",
        remedy="Inspect some samples of the two classes and their labels: they may be swapped, or "
        "the inputs may not contain enough to distinguish them.",
        alias="Confusion",
        presets={
            "sagemaker": {
                "min_diag": 0.9,
                "max_off_diag": 0.1,
                "samples": 1,
                "least_accuracy": 0.0,
                "for_summaries": 1,
                "certainty": 0.0,
                "tokens_too": True,
            }
        },
        branches={
            "off_diagonal": "Much of a class is predicted as one other class.",
            "diagonal": "Only little of a class is predicted correctly.",
        },
        does_not_see="More than 100 classes; a model that has learned no class yet.",
        params=ConfusionParams,
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = False

    def table_key(self, frame: TensorFrame) -> str:
        return frame.mode

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        if frame.collection == "embeddings":
            self.state.vocabulary.learn(frame)
            return ()
        return super().on_tensors(frame, at)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, params = self.state, self.params
        if table.count_columns != table.rows:
            return
        if not params.tokens_too and state.vocabulary.holds(len(table.rows)):
            return
        of = state.tallies.setdefault(table.mode, _Tally())
        counted = table.counts.astype(np.float64)
        of.recent.add(counted, float(counted.sum()), params.samples)
        total = of.recent.total()[: params.category_no, : params.category_no]
        if of.recent.seen >= params.samples and total.any():
            yield from self._evaluate(of, total, table.step, table.mode)

    def _evaluate(self, of: _Tally, table: Doubles, step: int, mode: str) -> Outcomes:
        params, z = self.params, self.params.certainty
        labels = np.repeat(table.sum(1, keepdims=True), table.shape[1], axis=1)
        own = np.eye(len(table), dtype=bool)
        accuracy = float(np.trace(table) / table.sum())
        low = own & (labels > 0) & (at_most(table, labels, z) < params.min_diag)
        high = ~own & (at_least(table, labels, z) > params.max_off_diag)
        over = (low | high) & (accuracy >= params.least_accuracy)
        before = np.zeros(table.shape, np.uint32)
        known = of.bad[: len(table), : len(table)]
        before[: known.shape[0], : known.shape[1]] = known
        of.bad = np.where(over, before + 1, 0).astype(np.uint32)
        shares = table / np.maximum(labels, 1)
        of.worst.append(step, np.where(own, 0, shares).max())
        if not over.any():
            of.since = None
            yield Clear(step, about=mode)
            return
        of.since = step if of.since is None else of.since
        lasting = of.bad >= params.for_summaries
        if lasting.any():
            yield self._finding(of, table, shares, lasting, accuracy, mode)

    def _finding(
        self,
        of: _Tally,
        table: Doubles,
        shares: Doubles,
        lasting: Flags,
        accuracy: float,
        mode: str,
    ) -> Finding:
        own = np.eye(len(table), dtype=bool)
        pairs = lasting & ~own
        where = "" if mode == "train" else f" in {mode}"
        if pairs.any():
            i, j = divmod(int(np.argmax(np.where(pairs, shares, -1))), table.shape[1])
            others = [f"{a} as {b}" for a, b in np.argwhere(pairs).tolist() if (a, b) != (i, j)]
            text = f"{100 * shares[i, j]:.0f} % of class {i} are predicted as class {j}{where}"
            limit = self.params.max_off_diag
        else:
            i = j = int(np.argmin(np.where(lasting.diagonal(), shares.diagonal(), 2)))
            others = [str(a) for a in np.flatnonzero(lasting.diagonal()).tolist() if a != i]
            text = f"{100 * shares[i, i]:.0f} % of class {i} are predicted correctly{where}"
            limit = self.params.min_diag
        more = f", and so are {len(others)} other pairs" if others and i != j else ""
        more = f", and {len(others)} other classes" if others and i == j else more
        return Finding(
            about=mode,
            branch="off_diagonal" if i != j else "diagonal",
            subject=Subject(kind="tensor", name=f"class {i}", collection="confusion"),
            reason=f"{text}{more}, while {100 * accuracy:.0f} % of all are predicted correctly",
            first_step=of.since,
            first_rank=self.state.tables[mode].rank,
            facts=(
                fact("share", shares[i, j], limit=limit),
                fact("of_class", i),
                fact("taken_for", j),
                fact("rightly", shares[i, i], limit=self.params.min_diag),
                fact("labels_of_class", table[i].sum()),
                fact("accuracy", accuracy),
            ),
            series=of.worst.series(
                "largest share of a class that is predicted as another",
                limit=self.params.max_off_diag,
            ),
            followed=len(others),
            also=tuple(others[:32]),
        )
