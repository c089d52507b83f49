"""`class_imbalance`: labels of few classes only, or a class that is never predicted right.

The training process counts, in samples of the batches, how often each class is the label, is
predicted, and is predicted rightly. Three conditions, by branch:

- `one_class`: after `one_class_samples` labels all were of one class, though the model tells
  several apart. Of 100 labels from a source in which one class has nine tenths this happens once in
  38,000 times; where there are two classes, of which one may really be rare (fraud, a disease),
  twenty times as many labels must have been seen; and where a batch has thousands of labels, which
  are pixels or tokens of few images or texts, five summaries. A warning then, if a layer puts out
  as many numbers as there are classes and one optimizer steps; otherwise an info: contrastive
  losses have the right answer at place 0 in each row, and the discriminator of a GAN is shown one
  kind at once.
- `imbalance`: after `samples` labels, the most frequent class has more than `threshold_imbalance`
  times the labels of the rarest one that came at all. The rarest is given the largest frequency
  that `certainty` standard deviations allow (Poisson): of few labels no ratio is known. An info:
  many good trainings have such data.
- `misprediction`: in the last `samples` labels more than `threshold_misprediction` of a class are
  taken for another one (Wilson's lower bound), in `for_summaries` summaries in a row, though the
  model is right in `least_accuracy` of all. In the beginning each class is mispredicted, and in a
  hard task most are for long: only a class that the others have left behind is news. Of training
  and of evaluations, each for itself. An info.

Labels that are the model's own tokens (an embedding has as many rows as there are classes) are left
out of the last two unless `tokens_too`: words are not equally frequent. 10, 0.7 and 500 are the
reference's; its verdicts, without any of the reserve, are those of the preset.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import Field

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Fact, Series, Subject
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS
from tocsin.stream_rules.reading.tensor_rows import Doubles
from tocsin.stream_rules.rule import (
    Clear,
    Finding,
    Moment,
    Outcome,
    Params,
    Rule,
    RuleMeta,
    tensors,
)
from tocsin.stream_rules.rules.data.class_tally import ClassTally
from tocsin.stream_rules.rules.data.output_width import OutputWidth
from tocsin.stream_rules.rules.data.shares import at_least, count_at_most
from tocsin.stream_rules.rules.data.vocabulary import Vocabulary

_OF_TWO: Final = 20
_CROWDED: Final = 2000
_PICTURES: Final = 5


class ClassImbalanceParams(Params):
    """Parameters of `class_imbalance`."""

    threshold_imbalance: float = Field(default=10.0, gt=1)
    """How many times as many labels as the rarest class the most frequent one has. Unit: a
    ratio."""
    threshold_misprediction: float = Field(default=0.7, ge=0, lt=1)
    """How much of a class is predicted wrongly. Unit: a share, 0 to 1."""
    samples: int = Field(default=500, ge=1)
    """How many labels are seen before it is judged. Unit: labels."""
    one_class_samples: int = Field(default=100, ge=2)
    """After how many labels of a single class it is said that there is no other; of two classes
    twenty times as many. Unit: labels."""
    least_accuracy: float = Field(default=0.6, ge=0, le=1)
    """How much the model must predict rightly before one class can stand out. Unit: a share, 0 to
    1."""
    for_summaries: int = Field(default=3, ge=1)
    """In how many summaries in a row a class is mispredicted. Unit: summaries."""
    certainty: float = Field(default=3.0, ge=0)
    """How surely the sample shows it. Unit: standard deviations."""
    tokens_too: bool = False
    """Whether labels that are the model's own tokens are judged like classes."""


@dataclass(slots=True)
class _State:
    tallies: dict[str, ClassTally] = field(default_factory=dict)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    outputs: OutputWidth = field(default_factory=OutputWidth)
    missed: dict[str, list[int]] = field(default_factory=dict)
    """By mode: how many summaries in a row each class was mispredicted."""
    missed_since: dict[str, int] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    worst: dict[str, list[float]] = field(default_factory=dict)


class ClassImbalance(Rule[ClassImbalanceParams, _State]):
    """An episode for each branch; mispredictions of training and of evaluations are two."""

    meta = RuleMeta(
        name="class_imbalance",
        version=1,
        family="data",
        meaning="The labels are of one class, or of very unequal ones, or a class is hardly ever "
        "predicted rightly.",
        severity="info",
        comes="maybe",
        inputs=(
            tensors("labels", mode=None),
            tensors("embeddings", beside=True),
            tensors("weights", beside=True),
        ),
        capture_hint="labels are found where the loss is a cross-entropy of PyTorch over up to "
        "1,000 classes; else name them with run.data(labels=…, predictions=…)",
        remedy="Look at how the batches are drawn and shuffled and at the file of the labels; "
        "weight the loss or sample the rare classes more often.",
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
            "one_class": "All labels so far are of one class; the model tells several apart.",
            "imbalance": "The most frequent class has many times the labels of the rarest one.",
            "misprediction": "A class is mostly predicted wrongly, while the others are learned.",
        },
        does_not_see="A class that has no label at all, beside several that have; classes of "
        "targets that are shares or several at once (BCE, soft labels); more than 1,000 classes.",
        params=ClassImbalanceParams,
        resolve_after_steps=0,
    )
    state_type = _State

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Iterable[Outcome]:
        state = self.state
        if frame.collection == "embeddings":
            state.vocabulary.learn(frame)
            return
        if frame.collection == "weights":
            state.outputs.learn(frame)
            return
        tally = state.tallies.setdefault(frame.mode, ClassTally())
        whole = tally.take(frame, self.params.samples)
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

    def _one_class(self, tally: ClassTally, step: int, at: Moment) -> Iterable[Outcome]:
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
            remedy="Look at the labels as they come out of the data loader: a column that is not "
            "the label, a conversion that loses it, or data that is sorted and not shuffled.",
            evidence=Evidence(
                facts=(
                    Fact(name="labels_seen", value=seen, limit=float(least)),
                    Fact(name="classes", value=float(classes)),
                    Fact(name="classes_with_labels", value=1.0),
                ),
                explanation="labels are counted in a sample of the batches; where one of two "
                "classes may be rare, or a batch has thousands of them, more must have been seen "
                "before this is a warning",
            ),
        )

    # -- unequal classes -------------------------------------------------------------------

    def _imbalance(self, tally: ClassTally, step: int) -> Iterable[Outcome]:
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
            evidence=Evidence(
                facts=(
                    Fact(name="ratio", value=most / least, limit=params.threshold_imbalance),
                    Fact(name="labels_of_most", value=most),
                    Fact(name="labels_of_least", value=least),
                    Fact(name="labels_seen", value=float(labels.sum())),
                    Fact(name="classes", value=float(len(labels))),
                    Fact(name="classes_with_labels", value=float(len(present))),
                ),
                also=tuple(str(i) for i in present[np.argsort(labels[present])][1:9]),
            ),
        )

    # -- a class left behind ---------------------------------------------------------------

    def _mispredicted(self, tally: ClassTally, step: int, mode: str) -> Iterable[Outcome]:
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
        state.steps[mode] = [*state.steps.get(mode, []), step][-SERIES_POINTS:]
        state.worst[mode] = [*state.worst.get(mode, []), float(shares.max())][-SERIES_POINTS:]
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
        tally: ClassTally,
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
            reason=f"{100 * shares[worst]:.0f} % of class {worst} are predicted wrongly{where}"
            f"{others}, while {100 * accuracy:.0f} % of all labels are predicted rightly",
            first_step=self.state.missed_since.get(mode),
            first_rank=tally.frames.rank,
            evidence=Evidence(
                facts=(
                    Fact(
                        name="misprediction",
                        value=float(shares[worst]),
                        limit=self.params.threshold_misprediction,
                    ),
                    Fact(name="labels_of_class", value=float(labels[worst])),
                    Fact(name="accuracy", value=accuracy),
                    Fact(name="labels_seen", value=float(labels.sum())),
                ),
                series=Series(
                    name="misprediction of the worst class",
                    steps=tuple(self.state.steps[mode]),
                    values=tuple(self.state.worst[mode]),
                    limit=self.params.threshold_misprediction,
                ),
                followed=len(also),
                also=tuple(map(str, also[:32])),
            ),
        )
