"""The rules on loss and progress that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.progress.checkpoint_stall import CheckpointStall
from tocsin.stream_rules.rules.progress.checkpoint_unhealthy import CheckpointUnhealthy
from tocsin.stream_rules.rules.progress.learning_rate_anomaly import LearningRateAnomaly
from tocsin.stream_rules.rules.progress.loss_diverged import LossDiverged
from tocsin.stream_rules.rules.progress.loss_not_decreasing import LossNotDecreasing
from tocsin.stream_rules.rules.progress.loss_spike import LossSpike
from tocsin.stream_rules.rules.progress.max_initialization_time import MaxInitializationTime
from tocsin.stream_rules.rules.progress.overfit import Overfit
from tocsin.stream_rules.rules.progress.overtraining import Overtraining
from tocsin.stream_rules.rules.progress.restart_loop import RestartLoop
from tocsin.stream_rules.rules.progress.stalled_training import StalledTraining
from tocsin.stream_rules.rules.progress.step_outlier import StepOutlier
from tocsin.stream_rules.rules.progress.telemetry_lost import TelemetryLost
from tocsin.stream_rules.rules.progress.throughput_regression import ThroughputRegression

RULES: Final[tuple[type[AnyRule], ...]] = (
    LossDiverged,
    LossNotDecreasing,
    LossSpike,
    Overfit,
    Overtraining,
    LearningRateAnomaly,
    StalledTraining,
    TelemetryLost,
    MaxInitializationTime,
    CheckpointStall,
    CheckpointUnhealthy,
    RestartLoop,
    ThroughputRegression,
    StepOutlier,
)
