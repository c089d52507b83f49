"""SageMaker Debugger's rules and their parameters, and what each is here.

The converter reads these tables, and so does the page `docs/how-to/from-sagemaker.md`; a test
converts every rule with every documented default. A rule that has a counterpart is found by its
alias, so that only its parameters are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal[
    "number", "whole", "flag", "seconds", "minutes", "numbers", "mode", "tensors", "regex", "run"
]
"""How a value is written there, and so how it is turned into one of ours: `seconds` and `minutes`
into durations, `tensors` (names of collections) and `regex` into patterns of our names."""


@dataclass(frozen=True, slots=True)
class OldParameter:
    """One parameter.

    Attributes:
        default: as documented; "" for none.
        new: its name here; "" if there is none.
        note: what differs, or why it is not needed.
    """

    name: str
    default: str
    new: str
    kind: Kind = "number"
    note: str = ""


@dataclass(frozen=True, slots=True)
class OldRule:
    """One rule.

    Attributes:
        profiler: whether it reads the profiler's data, not tensors.
        instead: for a rule without a counterpart: what to use in its place.
        note: what differs in the condition.
    """

    name: str
    parameters: Sequence[OldParameter] = ()
    profiler: bool = False
    instead: str = ""
    note: str = ""


def _same(name: str, default: str, kind: Kind = "number", note: str = "") -> OldParameter:
    return OldParameter(name, default, name, kind, note)


def _gone(name: str, default: str, note: str) -> OldParameter:
    return OldParameter(name, default, "", "number", note)


_FIXED: Final = "the rule reads its collection, whatever the names of its tensors"
_BY_TYPE: Final = "modules are known by their type"
_SCAN: Final = "records are read as they come"
_ONE_LOSS: Final = "the loss is the one that backward() is called on"
_ALL_COMPARED: Final = "all that both runs captured is compared"
_LABELS: Final = "the labels are those that the loss is given"
_PREDICTIONS: Final = "the predictions are those that the loss is given"

_SELECTION: Final = (
    OldParameter("collection_names", "", "tensors", "tensors", "as `COLLECTION/*`"),
    OldParameter("tensor_regex", "", "tensors", "regex", "only simple ones: names differ here"),
)
_ALL_TENSORS: Final = (_gone("collection_names", "", _FIXED), _gone("tensor_regex", "", _FIXED))
_SCAN_INTERVAL: Final = _gone("scan_interval_us", "60000000", _SCAN)

RULES: Final[Sequence[OldRule]] = (
    OldRule(
        "DeadRelu",
        (
            _gone("tensor_regex", ".*relu_output", _BY_TYPE),
            _gone("threshold_inactivity", "1.0", "the training process counts with 1 %"),
            _same("threshold_layer", "50.0"),
        ),
    ),
    OldRule("ExplodingTensor", (*_SELECTION, _same("only_nan", "False", "flag"))),
    OldRule(
        "PoorWeightInitialization",
        (
            _gone("activation_inputs_regex", ".*relu_input", _BY_TYPE),
            _same("threshold", "10.0"),
            _same("distribution_range", "0.001"),
            _same("patience", "5", "whole"),
            _same("steps", "10", "whole"),
        ),
    ),
    OldRule(
        "SaturatedActivation",
        (
            *_ALL_TENSORS,
            *(
                _gone(name, default, "the limits follow from a gradient of 1e-7")
                for name, default in (
                    ("threshold_tanh_min", "-9.4999"),
                    ("threshold_tanh_max", "9.4999"),
                    ("threshold_sigmoid_min", "-23"),
                    ("threshold_sigmoid_max", "16.99999"),
                )
            ),
            _gone("threshold_inactivity", "1.0", "values are counted, not units"),
            _same("threshold_layer", "50.0"),
        ),
    ),
    OldRule("VanishingGradient", (*_ALL_TENSORS, _same("threshold", "0.0000001"))),
    OldRule(
        "WeightUpdateRatio",
        (
            _gone("num_steps", "", "the change of one step is measured where it happens"),
            _same("large_threshold", "10.0"),
            _same("small_threshold", "0.00000001"),
            _same("epsilon", "0.000000001"),
        ),
    ),
    OldRule("AllZero", (*_SELECTION, _same("threshold", "100"))),
    OldRule(
        "ClassImbalance",
        (
            _same("threshold_imbalance", "10"),
            _same("threshold_misprediction", "0.7"),
            _same("samples", "500", "whole"),
            _gone("argmax", "False", "predictions are counted where the loss is computed"),
            _gone("labels_regex", ".*labels", _LABELS),
            _gone("predictions_regex", ".*predictions", _PREDICTIONS),
        ),
    ),
    OldRule(
        "LossNotDecreasing",
        (
            _gone("collection_names", "", _ONE_LOSS),
            _gone("tensor_regex", "", _ONE_LOSS),
            _gone("use_losses_collection", "True", _ONE_LOSS),
            _same("num_steps", "10", "whole"),
            _same("diff_percent", "0.1"),
            _same("increase_threshold_percent", "5"),
            _same("mode", "GLOBAL", "mode", "`GLOBAL` is `train`"),
        ),
    ),
    OldRule(
        "Overfit",
        (
            _gone("tensor_regex", "", "losses are those of training and evaluation"),
            _same("start_step", "0", "whole"),
            _same("patience", "1", "whole"),
            _same("ratio_threshold", "0.1"),
        ),
    ),
    OldRule(
        "Overtraining",
        (
            _same("patience_train", "5", "whole", "in evaluations"),
            _same("patience_validation", "10", "whole", "in evaluations"),
            _same("delta", "0.01"),
        ),
    ),
    OldRule(
        "SimilarAcrossRuns",
        (
            OldParameter("other_trials", "", "other_run", "run", "the id of a run on the bus"),
            _gone("collection_names", "", _ALL_COMPARED),
            _gone("tensor_regex", "", _ALL_COMPARED),
        ),
        note="It fires where tensors differ, there as here.",
    ),
    OldRule(
        "StalledTrainingRule",
        (
            _same("threshold", "1800", "seconds"),
            _gone("stop_training_on_fire", "False", "the action `stop`"),
            _gone("training_job_name_prefix", "", "a stop goes to the job that the issue is of"),
        ),
    ),
    OldRule(
        "TensorVariance", (*_SELECTION, _same("max_threshold", ""), _same("min_threshold", ""))
    ),
    OldRule(
        "UnchangedTensor",
        (
            *_SELECTION,
            _same("num_steps", "3", "whole"),
            _same("rtol", "0.00001"),
            _same("atol", "0.00000001"),
            _gone("equal_nan", "False", "summaries with NaN are equal to none"),
        ),
    ),
    OldRule(
        "CheckInputImages",
        (
            _same("threshold_mean", "0.2"),
            _same("threshold_samples", "500", "whole"),
            _gone("regex", ".*hybridsequential0_input_0", "the inputs of the model are known"),
            _gone("channel", "1", "the axis of the channels is found at the source"),
        ),
    ),
    OldRule(
        "NLPSequenceRatio",
        (
            _gone("tensor_regex", ".*embedding0_input_0", "tokens are what an embedding is given"),
            _same("token_values", "0", "numbers"),
            _same("token_thresholds_percent", "50", "numbers"),
        ),
    ),
    OldRule(
        "Confusion",
        (
            _same("category_no", "", "whole"),
            _gone("labels", "labels", _LABELS),
            _gone("predictions", "predictions", _PREDICTIONS),
            _gone("labels_collection", "labels", _LABELS),
            _gone("predictions_collection", "predictions", _PREDICTIONS),
            _same("min_diag", "0.9"),
            _same("max_off_diag", "0.1"),
        ),
        note="Each class is measured against its own row. SageMaker's documented formula divides "
        "by the sum of the diagonal, so it fires on perfect predictions of ten classes.",
    ),
    OldRule(
        "FeatureImportanceOverweight",
        (
            _same("threshold", "0.8"),
            _same("nfeatures", "3", "whole"),
            _gone("tensor_regex", ".*feature_importance/weight", _FIXED),
        ),
    ),
    OldRule("TreeDepth", (_same("depth", "4"),)),
    OldRule("CreateXgboostReport", instead="there are no reports yet; `tocsin issues` has all"),
    OldRule(
        "ProfilerReport",
        profiler=True,
        instead="its rules, each by itself; `RULE_PARAMETER` goes to that rule",
    ),
    OldRule(
        "BatchSize",
        (
            _same("cpu_threshold_p95", "70"),
            _same("gpu_threshold_p95", "70"),
            _same("gpu_memory_threshold_p95", "70"),
            _same("patience", "100", "whole", "1000 in its code"),
            _same("window", "500", "whole"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
    ),
    OldRule(
        "CPUBottleneck",
        (
            _same("threshold", "50"),
            _same("gpu_threshold", "10"),
            _same("cpu_threshold", "90"),
            _same("patience", "100", "whole", "1000 in its code"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
    ),
    OldRule(
        "GPUMemoryIncrease",
        (
            _same("increase", "10", note="5 in its code"),
            _same("patience", "100", "whole", "1000 in its code"),
            _same("window", "500", "whole", "10 in its code"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
    ),
    OldRule(
        "IOBottleneck",
        (
            _same("threshold", "50"),
            _same("gpu_threshold", "70", note="10 in its code"),
            _same("io_threshold", "50"),
            _same("patience", "1000", "whole"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
    ),
    OldRule(
        "LoadBalancing",
        (
            _same("threshold", "0.5", note="0.2 in its code"),
            _same("patience", "10", "whole", "1000 in its code"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
    ),
    OldRule(
        "LowGPUUtilization",
        (
            _same("threshold_p95", "70"),
            _same("threshold_p5", "10"),
            _same("window", "500", "whole"),
            _same("patience", "1000", "whole"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
    ),
    OldRule(
        "OverallSystemUsage",
        (_SCAN_INTERVAL,),
        profiler=True,
        instead="a report that never fires; the samples are on the bus, and in `tocsin watch`",
    ),
    OldRule(
        "MaxInitializationTime",
        (_same("threshold", "20", "minutes"), _SCAN_INTERVAL),
        profiler=True,
    ),
    OldRule(
        "OverallFrameworkMetrics",
        (_SCAN_INTERVAL,),
        profiler=True,
        instead="a report that never fires; times of steps and phases are on the bus",
    ),
    OldRule(
        "StepOutlier",
        (
            _same("stddev", "5", note="3 in its code; printed as minutes there"),
            _gone("mode", "", "only steps of training are checked"),
            _same("n_outliers", "10", "whole"),
            _SCAN_INTERVAL,
        ),
        profiler=True,
        note="The spread is that of the median absolute deviation, which outliers do not widen.",
    ),
    OldRule(
        "Dataloader",
        (_same("min_threshold", "70"), _same("max_threshold", "200"), _SCAN_INTERVAL),
        profiler=True,
    ),
)
"""In the order of its documentation."""

BY_NAME: Final[Mapping[str, OldRule]] = {rule.name: rule for rule in RULES}

OF_THE_SERVICE: Final = frozenset(
    {"rule_to_invoke", "base_trial", "action_json", "Actions", "source_s3_uri"}
)
"""Keys of `RuleParameters` that are no parameters of the rule."""

REPORTED: Final = (
    "CPUBottleneck",
    "IOBottleneck",
    "LowGPUUtilization",
    "StepOutlier",
    "GPUMemoryIncrease",
    "BatchSize",
    "MaxInitializationTime",
    "LoadBalancing",
    "Dataloader",
)
"""The rules that a ProfilerReport runs and that have a counterpart, in its order."""

NEVER_FIRED: Final[Mapping[str, str]] = {
    "GPUMemoryIncrease": "It compares a window with the same one, moved by one sample. With its "
    "documented 500 samples the mean moves by at most 0.4 points of the 10 that it takes.",
    "LoadBalancing": "In its last published source the loop over pairs of GPUs compares one GPU "
    "with itself: 90 % and 5 % are then equal.",
    "MaxInitializationTime": "It only runs inside ProfilerReport, where the clock that it reads "
    "never advances.",
    "StepOutlier": "The spread that it measures outliers by contains them: where each tenth step "
    "takes twenty times as long, none is found, since three deviations are more than any step.",
}
"""Profiler rules that cannot fire as they come, each with the reason."""

ACTIONS: Final[Mapping[str, str]] = {
    "StopTraining": "`stop`, to the job that the issue is of: confirmed by the job, and escalated "
    "to SIGTERM and SIGKILL if it is not. `training_job_prefix` is not needed.",
    "Email": "a receiver of the type `email`, through your own mail server; any address.",
    "SMS": "a receiver of the type `sms`, through AWS SNS with the machine's credentials.",
}
"""The built-in actions, in words."""

TRIALS: Final[Mapping[str, str]] = {
    "create_trial(path)": "`open_run(run_id, store=…, bus=…)`: a folder, a bucket, or a live bus",
    "trial.tensor_names(regex=, collection=)": "`run.tensors(regex, collection)`, together too",
    "trial.tensor(name)": "`run.tensor(name, collection)`; raises `NotCaptured`, which lists names",
    "trial.has_tensor(name)": "`name in run.tensors()`",
    "trial.collections(), collection(name)": "`run.collections()`",
    "trial.steps(mode)": "`run.steps(mode)`, of optimizer steps",
    "trial.modes, mode(step), mode_step(step)": "the argument `mode` of each method",
    "trial.wait_for_steps([n])": "`run.wait_for_step(n, timeout_s=…)`: it does not poll",
    "trial.has_passed_step(n)": "`run.wait_for_step(n, timeout_s=0)`",
    "trial.workers()": "`run.ranks()`",
    "trial.loaded_all_steps": "`run.view.state`",
    "tensor.steps(mode)": "`tensor.statistic(name).steps`; of whole tensors `tensor.saved_steps()`",
    "tensor.value(step, worker=)": "`tensor.value(step, rank)`, for collections with `save: full`",
    "tensor.reduction_value(step, name)": "`tensor.statistic(name)`: all steps at once",
    "tensor.shape(step)": "`tensor.value(step).shape`",
    "loss values of trial.tensor(name)": '`run.series("loss")`, one number for each step',
    "ProfilerTrial, system metrics": "`run.system(node)`",
    "TensorUnavailable, StepUnavailable": "`NotCaptured`",
}
"""What the trial API of its Python library is here."""
