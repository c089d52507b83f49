"""The rules on numerical health that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.numerical.all_zero import AllZero
from tocsin.stream_rules.rules.numerical.dead_optimizer_state import DeadOptimizerState
from tocsin.stream_rules.rules.numerical.dead_relu import DeadRelu
from tocsin.stream_rules.rules.numerical.excessive_clipping import ExcessiveClipping
from tocsin.stream_rules.rules.numerical.exploding_gradient import ExplodingGradient
from tocsin.stream_rules.rules.numerical.gradients_not_cleared import GradientsNotCleared
from tocsin.stream_rules.rules.numerical.low_precision_range import LowPrecisionRange
from tocsin.stream_rules.rules.numerical.no_gradient import NoGradient
from tocsin.stream_rules.rules.numerical.nonfinite import Nonfinite
from tocsin.stream_rules.rules.numerical.poor_weight_initialization import PoorWeightInitialization
from tocsin.stream_rules.rules.numerical.replica_divergence import ReplicaDivergence
from tocsin.stream_rules.rules.numerical.saturated_activation import SaturatedActivation
from tocsin.stream_rules.rules.numerical.scaler_skips import ScalerSkips
from tocsin.stream_rules.rules.numerical.tensor_variance import TensorVariance
from tocsin.stream_rules.rules.numerical.unchanged_tensor import UnchangedTensor
from tocsin.stream_rules.rules.numerical.vanishing_gradient import VanishingGradient
from tocsin.stream_rules.rules.numerical.weight_update_ratio import WeightUpdateRatio

RULES: Final[tuple[type[AnyRule], ...]] = (
    Nonfinite,
    ExplodingGradient,
    VanishingGradient,
    WeightUpdateRatio,
    UnchangedTensor,
    DeadRelu,
    SaturatedActivation,
    PoorWeightInitialization,
    AllZero,
    TensorVariance,
    LowPrecisionRange,
    ScalerSkips,
    ReplicaDivergence,
    NoGradient,
    GradientsNotCleared,
    ExcessiveClipping,
    DeadOptimizerState,
)
