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
    """A sample of what one call of a loss function of torch.nn.functional received."""

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
        description=(
            "the operation that computed the scores, by autograd's name: softmax, sigmoid, …"
        ),
    )
    mode: Mode = "train"
    step: Step = Field(description="the current step; in an evaluation, the last training step")
    rows: Whole = Field(description="number of samples that were read")
    classes: Whole = Field(
        default=0, description="scores per sample; 0 if they are not class scores"
    )
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
        description="standard deviation over the samples, averaged over the scores",
    )
    target_min: Real | None = Field(
        default=None, description="None if the targets are class indices"
    )
    target_max: Real | None = None
    target_spread: Real | None = None
    unreachable: Real | None = Field(
        default=None,
        description=(
            "share of targets outside the output range of the operation that computed the scores"
        ),
    )
    broadcast: bool = Field(
        default=False,
        description=(
            "score and target shapes broadcast against each other, so every score is compared with "
            "every target"
        ),
    )
    tokens: Whole = Field(
        default=0,
        description=(
            "number of token positions where targets were compared with the embedding's input ids; "
            "only positions whose next token differs"
        ),
    )
    targets_are_inputs: Real | None = Field(
        default=None, description="share of these positions whose target is their own token"
    )
    targets_are_next_inputs: Real | None = Field(
        default=None, description="share of these positions whose target is the next token"
    )
    ahead_least: Real | None = Field(
        default=None,
        description=(
            "lowest share, over the attention layers, of these positions that can attend to the "
            "next token; None if it is not known for all of them"
        ),
    )
    ahead_most: Real | None = Field(
        default=None, description="highest such share over the attention layers"
    )


@EVENT_TYPES.register
class LayerInputsSeen(RunData):
    """A sample of the input of a model's first layer, where that is linear or a convolution."""

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
    values: Whole = Field(description="how many numbers were read")
    minimum: Real
    maximum: Real
    mean: Real
    std: Real
    sample_std: Real | None = Field(
        default=None,
        description="standard deviation over the samples, averaged over the numbers of a sample",
    )
    whole_numbers: bool = Field(default=False, description="whether all numbers are whole")


@EVENT_TYPES.register
class OptimizersSeen(RunData):
    """How many optimizers step, and how many losses they have. Optimizers that step after the same
    backward call share a loss.

    Sent for several optimizers: as soon as the numbers are known, and whenever they change.
    """

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        optimizers=2,
        losses=1,
        step=1,
    )

    event_type: ClassVar[str] = "tocsin.run.optimizers"

    optimizers: Whole = Field(description="number of optimizers that have stepped")
    losses: Whole = Field(
        description="number of losses: optimizers that step after the same backward call share one"
    )
    step: Step


@EVENT_TYPES.register
class ModeSeen(RunData):
    """The mode of layers that behave differently in training: dropout and batch normalisation.

    Sent as soon as it is known, and whenever it changes.
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
    layers: Whole = Field(description="number of such layers in this mode")
    first: Word = Field(default="", max_length=500, description="name of the first such layer")
    kind: Word = Field(default="", max_length=100, description="class of the first such layer")
    step: Step = Field(description="the current step; in an evaluation, the last training step")


@EVENT_TYPES.register
class TrainingPlanned(RunData):
    """How many steps a training plans to make, from its framework or from `run.plan`."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        total_steps=10000,
        done_steps=4000,
        source="transformers",
    )

    event_type: ClassVar[str] = "tocsin.run.planned"

    total_steps: Positive | None = Field(
        default=None, description="over all incarnations; None if not known"
    )
    done_steps: Whole | None = Field(
        default=None, description="steps made before this incarnation; None if not known"
    )
    source: Word = Field(
        default="", max_length=64, description="who reported it: transformers, lightning, run.plan"
    )
