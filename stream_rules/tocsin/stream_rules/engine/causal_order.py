"""What brings what: which rule's condition is known to bring another's about.

Read from the front of training to its end: the data, then activations, then the loss, then
gradients, then weights; a learning rate or an initialisation before all of them; a machine that is
short of something before the times that get longer. A row means that the one on its left is a
cause of those on its right, not that these have no others. `tocsin.stream_rules.engine.causes`
decides from it, and from where and when the issues began, which issue is the consequence of which.

The rows are mechanisms, not correlations: each is a sentence that can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SOON: Final = 100
"""Steps within which something that is not a lasting obstacle shows its effects."""

LATER: Final = 1_000
"""The same for something that grows until it breaks."""

ROOTS: Final = frozenset({"nonfinite/input", "nonfinite/weight"})
"""Conditions that nothing in the training brings about: a NaN that a batch brings, or that is in a
weight before anything was computed with it."""

DEVICES: Final = frozenset({"gpu_hardware_error", "replica_divergence"})
"""The only rules whose conditions bring `ROOTS` about."""

ENDS: Final = frozenset({"nonfinite/evaluation_loss", "nonfinite/scalar", "nonfinite/skipped"})
"""Conditions that the training does not go on from: a row that names their rule alone does not mean
them as a cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One mechanism.

    Attributes:
        cause: a rule, or RULE/BRANCH for one of its conditions.
        effects: rules or conditions, likewise.
        how: how it does so, as the end of "…, and".
        within: steps from the cause's beginning to the effect's at most; None: as long as it lasts.
        lasting: further effects, for which there is no such limit: what stands in the way of
            progress does so for as long as it is there.
    """

    cause: str
    effects: tuple[str, ...]
    how: str
    within: int | None = None
    lasting: tuple[str, ...] = ()

    def brings(self, rule: str, branch: str) -> bool:
        """Whether this condition is one of its effects."""
        named = {rule, f"{rule}/{branch}"}
        return not named.isdisjoint(self.effects) or not named.isdisjoint(self.lasting)

    def limit(self, rule: str, branch: str) -> int | None:
        """`within` for this condition."""
        return None if not {rule, f"{rule}/{branch}"}.isdisjoint(self.lasting) else self.within


_LOSS_RISES: Final = ("loss_spike", "loss_diverged", "nonfinite")
_NO_PROGRESS: Final = ("loss_not_decreasing", "overtraining", "collapsed_predictions")
_STANDSTILL: Final = (
    "loss_not_decreasing/flat",
    "loss_not_decreasing/stuck",
    "overtraining",
    "collapsed_predictions",
)
_SLOWER: Final = ("throughput_regression", "step_outlier", "straggler_rank")
_IDLE: Final = ("low_gpu_utilization", "batch_size", "load_balancing")

CAUSAL_ORDER: Final[tuple[Link, ...]] = (
    # -- data ------------------------------------------------------------------------------
    Link(
        cause="nonfinite/input",
        effects=("loss_spike", "loss_diverged", "exploding_gradient", "scaler_skips", "dead_relu"),
        how="what is computed from a NaN is NaN",
        within=SOON,
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
        how="a model that sees only one class learns to predict that class",
    ),
    Link(
        cause="class_imbalance",
        effects=("collapsed_predictions", "confusion"),
        how="the common class is the easiest answer",
    ),
    # -- the program -----------------------------------------------------------------------
    Link(
        cause="loss_input_mismatch",
        effects=("exploding_gradient", "weight_update_ratio", *_LOSS_RISES),
        lasting=(*_NO_PROGRESS, "vanishing_gradient", "overfit"),
        within=LATER,
        how="the loss then does not measure the error",
    ),
    Link(
        cause="gradients_not_cleared",
        effects=(
            *_LOSS_RISES,
            "exploding_gradient",
            "weight_update_ratio",
            "excessive_clipping",
            "saturated_activation",
            "dead_relu",
            "vanishing_gradient",
        ),
        lasting=_NO_PROGRESS,
        within=LATER,
        how="the sum of all earlier gradients grows and points in an outdated direction",
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
        cause="learning_rate_anomaly/not_finite",
        effects=("nonfinite", "loss_spike", "loss_diverged", "weight_update_ratio/large"),
        how="the size of every update is the learning rate's",
        within=SOON,
    ),
    Link(
        cause="learning_rate_anomaly/jump",
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
        within=SOON,
    ),
    *(
        Link(
            cause=f"learning_rate_anomaly/{branch}",
            effects=(
                *_STANDSTILL,
                "poor_weight_initialization/flat_loss",
                "weight_update_ratio/small",
                "unchanged_tensor",
            ),
            how="an update of zero changes nothing",
        )
        for branch in ("zero", "vanished")
    ),
    Link(
        cause="learning_rate_anomaly/unstepped",
        effects=_NO_PROGRESS,
        how="the rate stays at the start of its schedule",
    ),
    Link(
        cause="learning_rate_anomaly/constant",
        effects=_NO_PROGRESS,
        how="the rate does not follow its schedule",
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
        within=LATER,
    ),
    Link(
        cause="attention_logit_growth",
        effects=("exploding_gradient", *_LOSS_RISES),
        how="attention that sees only one position passes on a gradient that jumps",
        within=LATER,
    ),
    Link(
        cause="logit_drift",
        effects=("exploding_gradient", "low_precision_range", *_LOSS_RISES),
        how="large logits overflow, and make the loss steep",
        within=LATER,
    ),
    Link(
        cause="moe_imbalance",
        effects=("loss_spike",),
        lasting=("no_gradient", "unchanged_tensor", *_NO_PROGRESS),
        within=SOON,
        how="an expert that gets no tokens gets no gradient",
    ),
    # -- gradients and updates -------------------------------------------------------------
    Link(
        cause="low_precision_range/overflow",
        effects=("scaler_skips", "nonfinite", "loss_spike", "loss_diverged"),
        how="values beyond the number format's range become infinite",
        within=LATER,
    ),
    Link(
        cause="low_precision_range/underflow",
        effects=("all_zero", "vanishing_gradient", "unchanged_tensor"),
        how="values below the number format's range become zero",
    ),
    Link(
        cause="weight_update_ratio/large",
        effects=(
            "attention_logit_growth",
            "logit_drift",
            "embedding_norm_growth",
            "moe_imbalance",
            "exploding_gradient",
            *_LOSS_RISES,
            "saturated_activation",
            "dead_relu",
            "vanishing_gradient",
            "unchanged_tensor",
        ),
        lasting=("poor_weight_initialization/flat_loss", *_NO_PROGRESS),
        how="a step that changes weights too much raises the loss",
        within=LATER,
    ),
    Link(
        cause="weight_update_ratio/small",
        effects=("poor_weight_initialization/flat_loss", "unchanged_tensor", *_STANDSTILL),
        how="weights that hardly move do not learn",
    ),
    Link(
        cause="excessive_clipping",
        effects=("vanishing_gradient", "unchanged_tensor", *_NO_PROGRESS),
        how="almost nothing of the gradient is left for the update",
    ),
    Link(
        cause="dead_optimizer_state",
        effects=("unchanged_tensor", *_NO_PROGRESS),
        how="the optimizer does not use the gradients that it gets",
    ),
    Link(
        cause="evaluation_in_train_mode/training_in_eval_mode",
        effects=("loss_not_decreasing",),
        how="frozen statistics do not match the weights that are learned",
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
        how="maximising the loss has no end",
        within=LATER,
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
        within=LATER,
    ),
    Link(
        cause="exploding_gradient",
        effects=(*_LOSS_RISES, "dead_relu", "saturated_activation", "scaler_skips"),
        how="one step along a gradient of that size moves the weights far away",
        within=SOON,
    ),
    Link(
        cause="all_zero/gradients",
        effects=("vanishing_gradient", "unchanged_tensor", "dead_optimizer_state", *_NO_PROGRESS),
        how="a gradient of zero changes nothing",
    ),
    Link(
        cause="vanishing_gradient/depth",
        effects=("vanishing_gradient/share",),
        how="what the first layers lack, the others eventually lack, too",
    ),
    Link(
        cause="vanishing_gradient/share",
        effects=("vanishing_gradient/depth",),
        how="where most gradients are almost zero, so are those of the first layers",
    ),
    Link(
        cause="vanishing_gradient",
        effects=("unchanged_tensor", *_NO_PROGRESS),
        how="without a gradient the weights do not change",
    ),
    Link(
        cause="unchanged_tensor",
        effects=_NO_PROGRESS,
        how="a model whose weights do not change does not learn",
    ),
    Link(
        cause="scaler_skips",
        effects=("unchanged_tensor", *_NO_PROGRESS),
        how="a skipped step changes nothing",
    ),
    Link(
        cause="loss_diverged",
        effects=("nonfinite", "dead_relu"),
        lasting=("loss_not_decreasing", "collapsed_predictions"),
        within=LATER,
        how="a loss that grows without bound ends as infinity or NaN",
    ),
    Link(
        cause="loss_spike",
        effects=("loss_diverged",),
        lasting=("loss_not_decreasing",),
        within=LATER,
        how="the loss has not recovered",
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
        ),
        lasting=(
            *_NO_PROGRESS,
            "checkpoint_unhealthy/after_onset",
            "checkpoint_unhealthy/nonfinite",
        ),
        within=SOON,
        how="what is computed from a NaN is NaN",
    ),
    Link(
        cause="nonfinite/skipped",
        effects=("scaler_skips",),
        how="each batch whose loss is NaN is skipped",
    ),
    Link(
        cause="overfit",
        effects=("overtraining",),
        how="the evaluation cannot improve while the model memorises its training data",
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
        how="a failing device computes wrongly, slowly or not at all",
        within=LATER,
    ),
    Link(
        cause="replica_divergence",
        effects=("exploding_gradient", *_LOSS_RISES),
        how="ranks with different weights compute gradients for another model",
        within=LATER,
    ),
    Link(
        cause="disk_full",
        effects=("checkpoint_stall", "stalled_training", "telemetry_lost", "io_bottleneck"),
        how="writes wait or fail",
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
        how="an idle GPU leaves all work to the others",
    ),
    Link(
        cause="load_balancing",
        effects=("low_gpu_utilization", "batch_size"),
        how="GPUs with less work are idle for the rest",
    ),
    Link(
        cause="straggler_rank",
        effects=("throughput_regression", "step_outlier", *_IDLE),
        how="the others wait for it at each reduction",
    ),
)


def links(cause: str, cause_branch: str, effect: str, branch: str) -> Iterator[Link]:
    """The mechanisms by which one condition can bring about another, in the table's order.

    Args:
        cause, effect: the rules; beside each the condition of it.
    """
    condition = f"{cause}/{cause_branch}"
    if f"{effect}/{branch}" in ROOTS and cause not in DEVICES:
        return
    for link in CAUSAL_ORDER:
        named = link.cause == condition or (link.cause == cause and condition not in ENDS)
        if named and link.brings(effect, branch):
            yield link
