"""`class_imbalance`: labels of only a few classes, or a class that is never predicted correctly.

The training process counts, in samples of the batches, how often each class is the label, is
predicted, and is predicted correctly. There are three conditions, by branch:

- `one_class`: there were at least `one_class_samples` labels so far, all of the same class,
  although the model distinguishes several. If one class makes up 90 % of the data, 100 equal labels
  occur once in 38,000 times. With two classes, of which one may really be rare (fraud, a disease),
  the rule needs twenty times as many labels. With thousands of labels per batch (the pixels or
  tokens of a few images or texts), it needs five summaries. It is a warning if a layer has as many
  outputs as there are classes and one optimizer steps; otherwise an info: contrastive losses have
  the correct answer at index 0 in each row, and the discriminator of a GAN sees one kind at a time.
- `imbalance`: after `samples` labels, the most frequent class has more than `threshold_imbalance`
  times the labels of the rarest one that occurred. For the rarest class, the rule uses the upper
  bound of its frequency at `certainty` standard deviations (Poisson), since a ratio from few labels
  is not reliable. An info: many good trainings have such data.
- `misprediction`: in the last `samples` labels, more than `threshold_misprediction` of a class are
  predicted as another one (Wilson's lower bound), in `for_summaries` consecutive summaries,
  although the model predicts `least_accuracy` of all labels correctly. At the start every class is
  mispredicted, and in a hard task most are for a long time: only a class that lags behind the
  others is reported. Training and evaluations are counted separately. An info.

Labels that are the model's own tokens (an embedding has as many rows as there are classes) are
ignored by the last two conditions unless `tokens_too` is set: words are not equally frequent. The
values 10, 0.7 and 500 come from SageMaker Debugger; the preset has its conditions, without these
exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import Params, Rule, RuleMeta, tensors
from tocsin.stream_rules.signals.class_totals import ClassTotals
from tocsin.stream_rules.signals.output_width import OutputWidth
from tocsin.stream_rules.signals.proportion_bounds import at_least, count_at_most
from tocsin.stream_rules.signals.vocabulary import Vocabulary

_OF_TWO: Final = 20
_CROWDED: Final = 2000
_PICTURES: Final = 5


class ClassImbalanceParams(Params):
    """Parameters of `class_imbalance`."""

    threshold_imbalance: float = Field(default=10.0, gt=1)
    """Largest ratio of the labels of the most frequent class to the rarest. Unit: a ratio."""
    threshold_misprediction: float = Field(default=0.7, ge=0, lt=1)
    """Largest share of a class that is predicted wrongly. Unit: a share, 0 to 1."""
    samples: int = Field(default=500, ge=1)
    """Number of labels before the rule decides. Unit: labels."""
    one_class_samples: int = Field(default=100, ge=2)
    """Number of labels of a single class before the rule fires; for two classes twenty times as
    many. Unit: labels."""
    least_accuracy: float = Field(default=0.6, ge=0, le=1)
    """Share that the model must predict correctly before one class can lag behind. Unit: a share, 0
    to 1."""
    for_summaries: int = Field(default=3, ge=1)
    """Consecutive summaries in which a class is mispredicted. Unit: summaries."""
    certainty: float = Field(default=3.0, ge=0)
    """Certainty that the sample must give. Unit: standard deviations."""
    tokens_too: bool = False
    """Whether labels that are the model's own tokens count as classes."""


@dataclass(slots=True)
class _State:
    tallies: dict[str, ClassTotals] = field(default_factory=dict)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    outputs: OutputWidth = field(default_factory=OutputWidth)
    missed: dict[str, list[int]] = field(default_factory=dict)
    """By mode: how many summaries in a row each class was mispredicted."""
    missed_since: dict[str, int] = field(default_factory=dict)
    worst: dict[str, PointHistory] = field(default_factory=dict)


class ClassImbalance(Rule[ClassImbalanceParams, _State]):
    """An episode for each branch; mispredictions in training and in evaluations are separate."""

    meta = RuleMeta(
        name="class_imbalance",
        version=1,
        family="data",
        meaning="All labels are of one class, or class sizes are very unequal, or a class is "
        "hardly ever predicted correctly.",
        severity="info",
        available="maybe",
        inputs=(
            tensors("labels", mode=None),
            tensors("embeddings", optional=True),
            tensors("weights", optional=True),
        ),
        capture_hint="labels are found if the loss is a PyTorch cross-entropy over up to 1,000 "
        "classes; otherwise name them with run.data(labels=…, predictions=…)",
        remedy="Check how batches are sampled and shuffled, and check the label file; weight the "
        "loss or sample the rare classes more often.",
        alias="ClassImbalance",
        presets={
            "sagemaker": {
                "threshold_imbalance": 10.0,
                "threshold_misprediction": 0.7,
                "samples": 500,
                "least_accuracy": 0.0,
                "for_summaries": 1,
                "certainty": 0.0,
                "tokens_too": True,
            }
        },
        branches={
            "one_class": "All labels so far are of one class, but the model distinguishes several.",
            "imbalance": "The most frequent class has many times the labels of the rarest one.",
            "misprediction": "A class is mostly predicted wrongly, while the others are learned.",
        },
        does_not_see="A class without any label among several with labels; multi-label and soft "
        "targets (BCE); more than 1,000 classes.",
        params=ClassImbalanceParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        state = self.state
        if frame.collection == "embeddings":
            state.vocabulary.learn(frame)
            return
        if frame.collection == "weights":
            state.outputs.learn(frame)
            return
        tally = state.tallies.setdefault(frame.mode, ClassTotals())
        whole = tally.add(frame, self.params.samples)
        if whole is None:
            return
        if frame.mode == "train":
            yield from self._one_class(tally, whole.step, at)
        if self.params.tokens_too or not state.vocabulary.holds(len(tally.labels)):
            if frame.mode == "train":
                yield from self._imbalance(tally, whole.step)
            if tally.predicted:
                yield from self._mispredicted(tally, whole.step, frame.mode)

    # -- one class -------------------------------------------------------------------------

    def _one_class(self, tally: ClassTotals, step: int, at: Moment) -> Outcomes:
        classes, seen = len(tally.labels), float(tally.labels.sum())
        if classes < 2 or seen == 0:
            return
        if np.count_nonzero(tally.labels) > 1:
            yield Clear(step, about="one_class")
            return
        least = self.params.one_class_samples
        if seen < least:
            return
        rare = classes == 2 and seen < _OF_TWO * least
        rare |= seen > _CROWDED * tally.summaries and tally.summaries < _PICTURES
        plain = self.state.outputs.is_of(classes) and at.run.optimizers <= 1
        only = int(np.argmax(tally.labels))
        yield Finding(
            about="one_class",
            branch="one_class",
            subject=Subject(kind="tensor", name=f"class {only}", collection="labels"),
            reason=f"all of the {seen:,.0f} labels so far are class {only}, of {classes} classes",
            first_step=tally.since,
            first_rank=tally.frames.rank,
            severity="info" if rare or not plain else "warning",
            remedy="Check the labels that the data loader returns: a column that is not the label, "
            "a conversion that loses it, or data that is sorted instead of shuffled.",
            facts=(
                fact("labels_seen", seen, limit=least),
                fact("classes", classes),
                fact("classes_with_labels", 1.0),
            ),
            explanation="labels are counted in a sample of the batches; if one of two classes "
            "may be rare, or a batch has thousands of labels, a warning needs more of them",
        )

    # -- unequal classes -------------------------------------------------------------------

    def _imbalance(self, tally: ClassTotals, step: int) -> Outcomes:
        params, labels = self.params, tally.labels
        present = np.flatnonzero(labels)
        if labels.sum() < params.samples or len(present) < 2:
            return
        rarest = int(present[np.argmin(labels[present])])
        often = int(np.argmax(labels))
        most, least = float(labels[often]), float(labels[rarest])
        if not most / count_at_most(least, params.certainty) > params.threshold_imbalance:
            yield Clear(step, about="imbalance")
            return
        yield Finding(
            about="imbalance",
            branch="imbalance",
            subject=Subject(kind="tensor", name=f"class {rarest}", collection="labels"),
            reason=f"class {often} has {most / least:,.0f} times as many labels as class {rarest} "
            f"({most:,.0f} and {least:,.0f} in a sample)",
            first_step=tally.since,
            first_rank=tally.frames.rank,
            facts=(
                fact("ratio", most / least, limit=params.threshold_imbalance),
                fact("labels_of_most", most),
                fact("labels_of_least", least),
                fact("labels_seen", labels.sum()),
                fact("classes", len(labels)),
                fact("classes_with_labels", len(present)),
            ),
            also=tuple(str(i) for i in present[np.argsort(labels[present])][1:9]),
        )

    # -- a class left behind ---------------------------------------------------------------

    def _mispredicted(self, tally: ClassTotals, step: int, mode: str) -> Outcomes:
        state, params = self.state, self.params
        about = f"misprediction/{mode}"
        if tally.recent.seen < params.samples:
            return
        labels, hits = tally.recent.total().T
        accuracy = float(hits.sum() / labels.sum())
        wrong = labels - hits
        over = at_least(wrong, labels, params.certainty) > params.threshold_misprediction
        over &= accuracy >= params.least_accuracy
        before = np.zeros(len(labels))
        known = state.missed.get(mode, [])[: len(labels)]
        before[: len(known)] = known
        counted = np.where(over, before + 1, 0.0)
        state.missed[mode] = counted.astype(int).tolist()
        shares = np.where(labels > 0, wrong / np.maximum(labels, 1), 0.0)
        state.worst.setdefault(mode, PointHistory()).append(step, shares.max())
        found = [int(i) for i in np.flatnonzero(counted >= params.for_summaries)]
        if not over.any():
            state.missed_since.pop(mode, None)
            yield Clear(step, about=about)
        else:
            state.missed_since.setdefault(mode, step)
        if found:
            worst = max(found, key=lambda i: (shares[i], labels[i]))
            also = [i for i in found if i != worst]
            yield self._left_behind(tally, mode, worst, also, labels, shares, accuracy)

    def _left_behind(
        self,
        tally: ClassTotals,
        mode: str,
        worst: int,
        also: list[int],
        labels: Doubles,
        shares: Doubles,
        accuracy: float,
    ) -> Finding:
        where = "" if mode == "train" else f" in {mode}"
        others = f", and {len(also)} other classes" if also else ""
        return Finding(
            about=f"misprediction/{mode}",
            branch="misprediction",
            subject=Subject(kind="tensor", name=f"class {worst}", collection="labels"),
            reason=f"{100 * shares[worst]:.0f} % of class {worst} are predicted "
            f"wrongly{where}{others}, while {100 * accuracy:.0f} % of all labels are predicted "
            "correctly",
            first_step=self.state.missed_since.get(mode),
            first_rank=tally.frames.rank,
            facts=(
                fact("misprediction", shares[worst], limit=self.params.threshold_misprediction),
                fact("labels_of_class", labels[worst]),
                fact("accuracy", accuracy),
                fact("labels_seen", labels.sum()),
            ),
            series=self.state.worst[mode].series(
                "misprediction of the worst class", limit=self.params.threshold_misprediction
            ),
            followed=len(also),
            also=tuple(map(str, also[:32])),
        )
