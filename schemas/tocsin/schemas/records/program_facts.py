"""What a training process finds out about itself at the source, where no number of a step says it:
what its losses are given, what its first layer reads, and which mode its layers are in.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tocsin.schemas.records.collections import Mode
from tocsin.schemas.records.events import EVENT_TYPES, example
from tocsin.schemas.records.fields import Positive, Step, Whole, Word
from tocsin.schemas.records.real import Real
from tocsin.schemas.records.runs import RunData


@EVENT_TYPES.register
class LossInputsSeen(RunData):
    """What one call of a loss function of torch.nn.functional was given: a sample of it."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        function="cross_entropy",
        made_by="softmax",
        step=2,
        rows=64,
        classes=10,
        minimum=0.0004,
        maximum=0.91,
        row_sum_min=0.9999998,
        row_sum_max=1.0000001,
        exp_sum_min=10.61,
        exp_sum_max=11.41,
        spread=0.118,
    )

    event_type: ClassVar[str] = "tocsin.run.loss_inputs"

    function: Word = Field(max_length=100)
    made_by: Word = Field(
        default="",
        max_length=100,
        description="the operation that made the scores, as autograd calls it: softmax, sigmoid, …",
    )
    mode: Mode = "train"
    step: Step = Field(description="the step in progress; in an evaluation the last one")
    rows: Whole = Field(description="samples looked at")
    classes: Whole = Field(default=0, description="scores of each; 0: not scores of classes")
    minimum: Real = Field(description="smallest score")
    maximum: Real
    row_sum_min: Real | None = Field(default=None, description="smallest sum of a sample's scores")
    row_sum_max: Real | None = None
    exp_sum_min: Real | None = Field(
        default=None, description="smallest sum of the exponentials of a sample's scores"
    )
    exp_sum_max: Real | None = None
    spread: Real | None = Field(
        default=None,
        description="standard deviation over the samples, the mean over the scores of each",
    )
    target_min: Real | None = Field(default=None, description="None: class indices")
    target_max: Real | None = None
    target_spread: Real | None = None
    unreachable: Real | None = Field(
        default=None,
        description="share of the targets that what made the scores cannot put out",
    )
    broadcast: bool = Field(
        default=False,
        description="the loss is over more pairs than there are scores or targets: their shapes do "
        "not fit, and each is compared with each",
    )
    tokens: Whole = Field(
        default=0,
        description="places of sequences whose targets were compared with what an embedding was "
        "given in the step; only those whose next token is another one",
    )
    targets_are_inputs: Real | None = Field(
        default=None, description="share of them whose target is their own token"
    )
    targets_are_next_inputs: Real | None = Field(
        default=None, description="share of them whose target is the next token"
    )
    ahead_least: Real | None = Field(
        default=None,
        description="share of them that may look at the next place, in the attention in which the "
        "fewest may; None: not seen, or not of one kind",
    )
    ahead_most: Real | None = Field(
        default=None, description="the same, in the attention in which the most may"
    )


@EVENT_TYPES.register
class LayerInputsSeen(RunData):
    """What the first layer of a model that is linear or a convolution was given: a sample of it."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        layer="features.0",
        kind="Conv2d",
        step=1,
        values=16384,
        minimum=0.0,
        maximum=255.0,
        mean=112.7,
        std=66.2,
        sample_std=65.1,
        whole_numbers=True,
    )

    event_type: ClassVar[str] = "tocsin.run.layer_inputs"

    layer: Word = Field(max_length=500)
    kind: Word = Field(max_length=100, description="class of the layer")
    step: Step
    values: Whole = Field(description="numbers looked at")
    minimum: Real
    maximum: Real
    mean: Real
    std: Real
    sample_std: Real | None = Field(
        default=None, description="standard deviation over the samples, the mean over their numbers"
    )
    whole_numbers: bool = Field(default=False, description="whether all of them are")


@EVENT_TYPES.register
class OptimizersSeen(RunData):
    """How many optimizers step, and how many losses they have: those that step after the same
    backward call share one.

    Said of several optimizers, when it is first known and whenever it changes.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        optimizers=2,
        losses=1,
        step=1,
    )

    event_type: ClassVar[str] = "tocsin.run.optimizers"

    optimizers: Whole = Field(description="optimizers that have stepped")
    losses: Whole = Field(description="how many of them stepped after their own backward call")
    step: Step


@EVENT_TYPES.register
class ModeSeen(RunData):
    """Which mode the layers are in that work differently in training: dropout, batch normalisation.

    Said when it is first known and whenever it changes.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        doing="evaluation",
        layers_in="train",
        layers=3,
        first="features.1",
        kind="BatchNorm2d",
        step=499,
    )

    event_type: ClassVar[str] = "tocsin.run.mode"

    doing: Literal["training", "evaluation"]
    layers_in: Literal["train", "eval"]
    layers: Whole = Field(description="how many such layers are in that mode")
    first: Word = Field(default="", max_length=500, description="name of the first of them")
    kind: Word = Field(default="", max_length=100, description="its class")
    step: Step = Field(description="the step in progress; in an evaluation the last one")


@EVENT_TYPES.register
class TrainingPlanned(RunData):
    """How many steps a training is to make, from its framework or from `run.plan`."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        total_steps=10000,
        done_steps=4000,
        source="transformers",
    )

    event_type: ClassVar[str] = "tocsin.run.planned"

    total_steps: Positive | None = Field(
        default=None, description="over all incarnations; None: not known"
    )
    done_steps: Whole | None = Field(
        default=None, description="of those, made before this incarnation; None: not known"
    )
    source: Word = Field(
        default="", max_length=64, description="who reports it: transformers, lightning, run.plan"
    )
