"""What brings what: which rule's condition is known to bring another's about.

Read from the front of training to its end: the data, then activations, then the loss, then
gradients, then weights; a learning rate or an initialisation before all of them; a machine that is
short of something before the times that get longer. A row says that the one on its left is a
cause of those on its right, not that these have no others. `tocsin.stream_rules.causes` decides
from it, and from where and when the issues began, which issue is the consequence of which.

The rows are mechanisms, not correlations: each is a sentence that can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SOON: Final = 100
"""Steps within which something that is not a lasting obstacle shows its effects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One mechanism.

    Attributes:
        cause: a rule, or RULE/BRANCH for one of its conditions.
        effects: rules or conditions, likewise.
        how: how it does so, as the end of "…, and".
        within: steps from the cause's beginning to the effect's at most; None: as long as it lasts.
    """

    cause: str
    effects: tuple[str, ...]
    how: str
    within: int | None = None


_LOSS_RISES: Final = ("loss_spike", "loss_diverged", "nonfinite")
_NO_PROGRESS: Final = ("loss_not_decreasing", "overtraining", "collapsed_predictions")
_SLOWER: Final = ("throughput_regression", "step_outlier", "straggler_rank")
_IDLE: Final = ("low_gpu_utilization", "batch_size", "load_balancing")

CAUSAL_ORDER: Final[tuple[Link, ...]] = (
    # -- data ------------------------------------------------------------------------------
    Link(
        cause="nonfinite/input",
        effects=("loss_spike", "loss_diverged", "exploding_gradient", "scaler_skips", "dead_relu"),
        how="what is computed from a NaN is NaN",
    ),
    Link(
        cause="unnormalised_inputs",
        effects=(
            *_LOSS_RISES,
            *_NO_PROGRESS,
            "poor_weight_initialization",
            "exploding_gradient",
            "weight_update_ratio",
            "saturated_activation",
            "dead_relu",
            "vanishing_gradient",
        ),
        how="large inputs make large activations and gradients at any usual learning rate",
        within=SOON,
    ),
    Link(
        cause="check_input_images",
        effects=("exploding_gradient", "saturated_activation", "dead_relu", *_LOSS_RISES),
        how="large inputs make large activations and gradients at any usual learning rate",
        within=SOON,
    ),
    Link(
        cause="class_imbalance/one_class",
        effects=(
            "collapsed_predictions",
            "confusion",
            "vanishing_gradient",
            "overfit",
            "overtraining",
        ),
        how="a model that has seen one class only learns to say that class",
    ),
    Link(
        cause="class_imbalance",
        effects=("collapsed_predictions", "confusion"),
        how="the common class is the easiest answer",
    ),
    # -- the program -----------------------------------------------------------------------
    Link(
        cause="loss_input_mismatch",
        effects=(
            "exploding_gradient",
            "weight_update_ratio",
            *_NO_PROGRESS,
            *_LOSS_RISES,
            "vanishing_gradient",
            "overfit",
        ),
        how="the loss then measures something else than the error",
    ),
    Link(
        cause="gradients_not_cleared",
        effects=(
            *_LOSS_RISES,
            *_NO_PROGRESS,
            "exploding_gradient",
            "weight_update_ratio",
            "excessive_clipping",
            "saturated_activation",
            "dead_relu",
            "vanishing_gradient",
        ),
        how="the sum of all earlier gradients grows and points where the loss fell long ago",
    ),
    Link(
        cause="no_gradient",
        effects=(*_NO_PROGRESS, "unchanged_tensor", "all_zero", "dead_optimizer_state"),
        how="a parameter without a gradient stays as it was",
    ),
    Link(
        cause="evaluation_in_train_mode",
        effects=("overfit", "overtraining"),
        how="dropout and batch statistics spoil the evaluation's loss",
    ),
    Link(
        cause="learning_rate_anomaly",
        effects=(
            "poor_weight_initialization/flat_loss",
            "scaler_skips",
            "attention_logit_growth",
            "logit_drift",
            "embedding_norm_growth",
            "moe_imbalance",
            *_LOSS_RISES,
            *_NO_PROGRESS,
            "weight_update_ratio",
            "exploding_gradient",
            "unchanged_tensor",
            "dead_relu",
            "saturated_activation",
            "vanishing_gradient",
        ),
        how="the size of every update is the learning rate's",
    ),
    Link(
        cause="poor_weight_initialization",
        effects=(
            "all_zero/gradients",
            *_LOSS_RISES,
            *_NO_PROGRESS,
            "saturated_activation",
            "dead_relu",
            "vanishing_gradient",
            "exploding_gradient",
            "weight_update_ratio",
        ),
        how="scales that differ from layer to layer are multiplied through the depth",
        within=SOON,
    ),
    # -- activations -----------------------------------------------------------------------
    Link(
        cause="saturated_activation",
        effects=("all_zero/gradients", "vanishing_gradient", "unchanged_tensor", *_NO_PROGRESS),
        how="the slope of a saturated unit is zero",
    ),
    Link(
        cause="dead_relu",
        effects=("vanishing_gradient", "all_zero", "unchanged_tensor", *_NO_PROGRESS),
        how="no gradient flows through a unit that is never active",
    ),
    Link(
        cause="embedding_norm_growth",
        effects=("vanishing_gradient", "attention_logit_growth", "logit_drift", *_LOSS_RISES),
        how="the scale of an embedding is that of all that is computed from it",
    ),
    Link(
        cause="attention_logit_growth",
        effects=("exploding_gradient", *_LOSS_RISES),
        how="attention that looks at one place only passes on a gradient that jumps",
    ),
    Link(
        cause="logit_drift",
        effects=("exploding_gradient", "low_precision_range", *_LOSS_RISES),
        how="large logits overflow, and make the loss steep",
    ),
    Link(
        cause="moe_imbalance",
        effects=("no_gradient", "unchanged_tensor", *_NO_PROGRESS, "loss_spike"),
        how="an expert that gets no tokens gets no gradient",
    ),
    # -- gradients and updates -------------------------------------------------------------
    Link(
        cause="low_precision_range",
        effects=("all_zero", "scaler_skips", "vanishing_gradient", "unchanged_tensor", "nonfinite"),
        how="values beyond the number format's range become zero or infinite",
    ),
    Link(
        cause="weight_update_ratio",
        effects=(
            "poor_weight_initialization/flat_loss",
            "attention_logit_growth",
            "logit_drift",
            "embedding_norm_growth",
            "moe_imbalance",
            "exploding_gradient",
            *_LOSS_RISES,
            *_NO_PROGRESS,
            "saturated_activation",
            "dead_relu",
            "vanishing_gradient",
            "unchanged_tensor",
        ),
        how="a step that moves weights too far, or not at all, leaves the loss where it should "
        "not be",
    ),
    Link(
        cause="excessive_clipping",
        effects=("vanishing_gradient", "unchanged_tensor", *_NO_PROGRESS),
        how="next to nothing of the gradient is left for the update",
    ),
    Link(
        cause="dead_optimizer_state",
        effects=("unchanged_tensor", *_NO_PROGRESS),
        how="the optimizer does not use what it is given",
    ),
    Link(
        cause="evaluation_in_train_mode/training_in_eval_mode",
        effects=("loss_not_decreasing",),
        how="statistics that are not learned do not fit what is",
    ),
    Link(
        cause="loss_diverged/wrong_sign",
        effects=(
            "exploding_gradient",
            "weight_update_ratio",
            "nonfinite",
            "vanishing_gradient",
            "saturated_activation",
            "dead_relu",
            "collapsed_predictions",
            "poor_weight_initialization",
            "overfit",
            "overtraining",
        ),
        how="climbing the loss has no end",
    ),
    Link(
        cause="loss_diverged/falling",
        effects=(
            "exploding_gradient",
            "weight_update_ratio",
            "nonfinite",
            "vanishing_gradient",
            "saturated_activation",
            "dead_relu",
        ),
        how="a loss without a lower bound is followed for ever",
    ),
    Link(
        cause="exploding_gradient",
        effects=(*_LOSS_RISES, "dead_relu", "saturated_activation", "scaler_skips"),
        how="one step along a gradient of that size throws the weights far away",
        within=SOON,
    ),
    Link(
        cause="all_zero/gradients",
        effects=("vanishing_gradient", "unchanged_tensor", "dead_optimizer_state", *_NO_PROGRESS),
        how="a gradient of zero moves nothing",
    ),
    Link(
        cause="vanishing_gradient/depth",
        effects=("vanishing_gradient/share",),
        how="what the first layers miss, the others miss in time",
    ),
    Link(
        cause="vanishing_gradient/share",
        effects=("vanishing_gradient/depth",),
        how="where most gradients are nothing, those of the first layers are",
    ),
    Link(
        cause="vanishing_gradient",
        effects=("unchanged_tensor", *_NO_PROGRESS),
        how="without a gradient the weights do not move",
    ),
    Link(
        cause="unchanged_tensor",
        effects=_NO_PROGRESS,
        how="a model whose weights do not move does not learn",
    ),
    Link(
        cause="scaler_skips",
        effects=("unchanged_tensor", *_NO_PROGRESS),
        how="a step that is skipped moves nothing",
    ),
    Link(
        cause="loss_diverged",
        effects=("nonfinite", "dead_relu", "loss_not_decreasing", "collapsed_predictions"),
        how="a loss that grows without bound ends as infinity or NaN",
    ),
    Link(
        cause="loss_spike",
        effects=("loss_diverged", "loss_not_decreasing"),
        how="it has not come back",
    ),
    Link(
        cause="nonfinite",
        effects=(
            "nonfinite/evaluation_loss",
            "nonfinite/scalar",
            "loss_spike",
            "loss_diverged",
            "exploding_gradient",
            "vanishing_gradient",
            "weight_update_ratio",
            "dead_relu",
            "saturated_activation",
            "unchanged_tensor",
            "low_precision_range",
            "scaler_skips",
            "attention_logit_growth",
            "logit_drift",
            "embedding_norm_growth",
            "moe_imbalance",
            *_NO_PROGRESS,
        ),
        how="what is computed from a NaN is NaN",
    ),
    Link(
        cause="overfit",
        effects=("overtraining",),
        how="the evaluation cannot improve while the model learns its training data by heart",
    ),
    # -- the machine -----------------------------------------------------------------------
    Link(
        cause="gpu_hardware_error",
        effects=(
            "replica_divergence",
            "stalled_training",
            "telemetry_lost",
            *_LOSS_RISES,
            *_SLOWER,
        ),
        how="a device that fails computes wrongly, slowly or not at all",
    ),
    Link(
        cause="replica_divergence",
        effects=("exploding_gradient", *_LOSS_RISES),
        how="ranks that hold other weights give gradients for another model",
    ),
    Link(
        cause="disk_full",
        effects=("checkpoint_stall", "stalled_training", "telemetry_lost", "io_bottleneck"),
        how="what must be written waits or fails",
    ),
    Link(
        cause="host_memory_increase",
        effects=("telemetry_lost", "stalled_training", *_SLOWER),
        how="at its limit the process swaps, or is killed",
    ),
    Link(
        cause="gpu_memory_increase",
        effects=("telemetry_lost", "stalled_training"),
        how="at its limit the process fails",
    ),
    Link(
        cause="gpu_thermal_throttle",
        effects=(*_SLOWER, "load_balancing"),
        how="a GPU that lowers its clock takes longer for the same step",
    ),
    Link(
        cause="checkpoint_stall",
        effects=("stalled_training", "throughput_regression", "step_outlier"),
        how="the training waits for the write",
    ),
    Link(
        cause="io_bottleneck",
        effects=("dataloader", *_SLOWER, *_IDLE),
        how="the next batch waits for the disk",
    ),
    Link(
        cause="cpu_bottleneck",
        effects=("dataloader", *_SLOWER, *_IDLE),
        how="the next batch waits for a core",
    ),
    Link(
        cause="dataloader",
        effects=(*_SLOWER, *_IDLE),
        how="the step waits for the next batch",
    ),
    Link(
        cause="low_gpu_utilization/unused",
        effects=("load_balancing",),
        how="a GPU that does nothing leaves all to the others",
    ),
    Link(
        cause="load_balancing",
        effects=("low_gpu_utilization", "batch_size"),
        how="GPUs that have less to do are idle for the rest",
    ),
    Link(
        cause="straggler_rank",
        effects=("throughput_regression", "step_outlier", *_IDLE),
        how="the others wait for it at each reduce",
    ),
)


def links_to(rule: str, branch: str) -> Iterator[Link]:
    """The mechanisms that can bring about this condition of this rule, in the table's order."""
    for link in CAUSAL_ORDER:
        if rule in link.effects or f"{rule}/{branch}" in link.effects:
            yield link
