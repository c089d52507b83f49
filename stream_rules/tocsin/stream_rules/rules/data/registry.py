"""The rules on data and outputs that come with tocsin. A new one is a line here."""

from __future__ import annotations

from typing import Final

from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules.data.check_input_images import CheckInputImages
from tocsin.stream_rules.rules.data.class_imbalance import ClassImbalance
from tocsin.stream_rules.rules.data.collapsed_predictions import CollapsedPredictions
from tocsin.stream_rules.rules.data.confusion import Confusion
from tocsin.stream_rules.rules.data.differs_from_run import DiffersFromRun
from tocsin.stream_rules.rules.data.evaluation_in_train_mode import EvaluationInTrainMode
from tocsin.stream_rules.rules.data.loss_input_mismatch import LossInputMismatch
from tocsin.stream_rules.rules.data.nlp_sequence_ratio import NlpSequenceRatio
from tocsin.stream_rules.rules.data.target_leak import TargetLeak
from tocsin.stream_rules.rules.data.unnormalised_inputs import UnnormalisedInputs

RULES: Final[tuple[type[AnyRule], ...]] = (
    ClassImbalance,
    Confusion,
    CheckInputImages,
    NlpSequenceRatio,
    DiffersFromRun,
    LossInputMismatch,
    CollapsedPredictions,
    EvaluationInTrainMode,
    UnnormalisedInputs,
    TargetLeak,
)
