"""Where healthy trainings are, beside the limits of the rules: what thresholds are chosen from.

    python benchmarks/thresholds.py [--seeds 5] [--programs mlp gpt] [--json]

The trainings are those of tests/fixtures/runs, healthy and odd ones; what is not recorded yet is
trained first. Each quantity is what a rule decides by, with its distribution over all that was
captured of all runs, the largest (or smallest) run by run, and the rule's limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fixtures.runs.judgement import healthy
from fixtures.runs.recorded import Request, record_all, recorded
from tocsin.schemas.records.frames import StepFrame, TensorFrame
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.stream_rules.catalogue import UnknownRule, built_in

Array = npt.NDArray[np.float64]
Found = Iterator[tuple[str, Array]]

TINY: Final = 1e-12
WARM: Final = 20
"""Steps that are left out where a rule does so, too."""

QUANTILES: Final = (0.5, 0.95, 0.99, 0.999)

LIMITS: Final[dict[str, tuple[str, str]]] = {
    "largest update / weight of a tensor": ("weight_update_ratio", "large_threshold"),
    "median update / weight of a summary": ("weight_update_ratio", "large_threshold"),
    "smallest update / weight of a tensor": ("weight_update_ratio", "small_threshold"),
    "gradient norm / its moving average": ("exploding_gradient", "factor"),
    "mean abs gradient of a tensor": ("vanishing_gradient", "threshold"),
    "share of tensors with gradient < 1e-7": ("vanishing_gradient", "share"),
    "first / last gradient of a model": ("vanishing_gradient", "depth_ratio"),
    "loss above its median, in spreads": ("loss_spike", "k"),
    "median of 50 losses / lowest such": ("loss_diverged", "factor"),
    "dead share of a layer": ("dead_relu", "threshold_layer"),
    "saturated share of a layer": ("saturated_activation", "threshold_layer"),
    "largest / smallest layer variance": ("poor_weight_initialization", "threshold"),
    "gradient p95 - p05 of a tensor": ("poor_weight_initialization", "distribution_range"),
    "underflow share of a gradient": ("low_precision_range", "underflow"),
    "norm after clipping / before": ("excessive_clipping", "share"),
    "evaluation loss above training loss": ("overfit", "ratio_threshold"),
    "learning rate / the step's before": ("learning_rate_anomaly", "factor"),
    "largest attention logit": ("attention_logit_growth", "limit"),
    "mean log-sum-exp of logits": ("logit_drift", "limit"),
    "most / mean load of experts": ("moe_imbalance", "ratio"),
    "longest / mean row of an embedding": ("embedding_norm_growth", "ratio"),
    "most / least frequent label": ("class_imbalance", "threshold_imbalance"),
    "step time / its median": ("step_outlier", "stddev"),
}
"""By which rule and parameter each quantity is judged, where it is by one alone."""


@dataclass
class Training:
    """The numbers of one run: scalars by name and step, and summaries by collection."""

    scalars: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    evaluations: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    frames: dict[str, list[TensorFrame]] = field(default_factory=lambda: defaultdict(list))

    def series(self, name: str) -> Array:
        """One column, in the order of its steps."""
        found = self.scalars.get(name, {})
        return np.array([found[step] for step in sorted(found)], np.float64)

    def column(self, collection: str, name: str) -> list[Array]:
        """One column of each frame of a collection that has it."""
        found = [frame.column(name) for frame in self.frames.get(collection, [])]
        return [column.astype(np.float64) for column in found if column is not None]


def training_of(request: Request) -> Training:
    """What capture has said of it."""
    found = Training()
    for record in recorded(*request):
        if record.value is None:
            continue
        value = decode(read_meta(record.headers), record.value)
        if isinstance(value, TensorFrame) and value.mode == "train":
            found.frames[value.collection].append(value)
        elif isinstance(value, StepFrame):
            for step, row in zip(value.steps.tolist(), value.values, strict=True):
                cells = dict(zip(value.columns, row.tolist(), strict=True))
                if value.mode == "eval":
                    found.evaluations[step] += [cells["loss"]] if "loss" in cells else []
                elif value.mode == "train":
                    for name, number in cells.items():
                        found.scalars[name][step] = number
    return found


def quantities(run: Training) -> Found:
    """All that a run shows of what the rules decide by."""
    yield from _of_tensors(run)
    yield from _of_layers(run)
    yield from _of_steps(run)
    yield from _of_outputs(run)


def _of_tensors(run: Training) -> Found:
    for frame in run.frames["updates"]:
        lengths, updates = frame.column("l2"), frame.column("update_l2")
        if lengths is None or updates is None or frame.step < WARM:
            continue
        ratio = updates.astype(np.float64) / (lengths + 1e-9)
        yield "largest update / weight of a tensor", ratio
        yield "smallest update / weight of a tensor", ratio[ratio > 0]
        yield "median update / weight of a summary", np.median(ratio, keepdims=True)
    for frame in run.frames["gradients"]:
        sums, numel = frame.column("l1"), frame.count("numel")
        if sums is None or numel is None:
            continue
        sizes = sums.astype(np.float64) / np.maximum(numel, 1)
        yield "mean abs gradient of a tensor", sizes
        yield "share of tensors with gradient < 1e-7", np.mean(sizes < 1e-7, keepdims=True)
        if len(sizes) >= 8:
            ends = sizes[-4:].mean() / max(TINY, sizes[:4].mean())
            yield "first / last gradient of a model", np.array([ends])
        low, high = frame.column("p05"), frame.column("p95")
        if low is not None and high is not None and frame.step <= 10:
            yield "gradient p95 - p05 of a tensor", (high - low).astype(np.float64)
        under = frame.column("underflow")
        if under is not None:
            yield "underflow share of a gradient", under.astype(np.float64)


def _of_layers(run: Training) -> Found:
    for name in ("dead", "saturated"):
        for column in run.column("activations", name):
            yield f"{name} share of a layer", column
    for frame in run.frames["activations"][:1]:
        spread = frame.column("std")
        if spread is not None and len(spread) > 1:
            variances = spread.astype(np.float64) ** 2
            ratio = variances.max() / max(TINY, variances.min())
            yield "largest / smallest layer variance", np.array([ratio])


def _of_steps(run: Training) -> Found:
    norm = run.series("gradient_norm")
    clipped = run.series("gradient_norm_clipped")
    if len(norm) > WARM:
        yield "gradient norm / its moving average", norm[WARM:] / _averages(norm)[WARM - 1 : -1]
        before, after = norm[:-1] + TINY, norm[1:]
        yield "gradient norm / the step's before", after / before
    if len(clipped) == len(norm) > 0:
        yield "norm after clipping / before", clipped / (norm + TINY)
    loss = run.series("loss")
    yield from _of_losses(loss)
    for name in [name for name in run.scalars if name.startswith("lr.")]:
        rates = run.series(name)
        yield "learning rate / the step's before", rates[1:] / (rates[:-1] + TINY)
    for step, values in run.evaluations.items():
        near = [v for s, v in run.scalars["loss"].items() if step - WARM < s <= step]
        if near and values:
            reference = float(np.mean(near))
            gap = (float(np.mean(values)) - reference) / max(abs(reference), TINY)
            yield "evaluation loss above training loss", np.array([gap])
    times = run.series("step_time_s")
    if len(times) > WARM:
        yield "step time / its median", times[WARM:] / np.median(times)


def _of_losses(loss: Array) -> Found:
    above, medians = [], []
    for end in range(WARM, len(loss)):
        window = loss[max(0, end - 100) : end]
        median = float(np.median(window))
        spread = 1.4826 * float(np.median(np.abs(window - median)))
        above.append((loss[end] - median) / max(spread, TINY))
    for end in range(50, len(loss) + 1):
        medians.append(float(np.median(loss[end - 50 : end])))
    yield "loss above its median, in spreads", np.array(above)
    if medians and min(loss) > 0:
        lowest = np.minimum.accumulate(medians)
        yield "median of 50 losses / lowest such", np.array(medians) / lowest


def _of_outputs(run: Training) -> Found:
    for name, collection, column in (
        ("largest attention logit", "attention", "logit_max"),
        ("mean log-sum-exp of logits", "logits", "log_z"),
        ("most / mean load of experts", "routers", "max_over_mean"),
    ):
        for values in run.column(collection, column):
            yield name, np.abs(values)
    for mean, most in zip(
        run.column("embeddings", "row_norm_mean"),
        run.column("embeddings", "row_norm_max"),
        strict=True,
    ):
        yield "longest / mean row of an embedding", most / (mean + TINY)
    for frame in run.frames["labels"]:
        counts = frame.count("labels")
        # With gaps between the classes it is text, of which most characters are rare.
        if counts is not None and len(counts) <= 20:
            ratio = counts.max() / max(1, counts.min())
            yield "most / least frequent label", np.array([float(ratio)])


def _averages(values: Array) -> Array:
    """A moving average over 100 steps that begins with the first of them."""
    found, average = np.empty_like(values), values[0]
    for i, value in enumerate(values):
        average += (value - average) / min(i + 1, 100)
        found[i] = average
    return found


def limit_of(quantity: str) -> str:
    """The rule and its default, if one judges that quantity by a limit of its own."""
    if quantity not in LIMITS:
        return ""
    name, parameter = LIMITS[quantity]
    try:
        default = built_in().get(name).meta.params.model_fields.get(parameter)
    except UnknownRule:
        return ""
    return "" if default is None else f"{name}.{parameter} = {default.default:g}"


def table(requests: Iterable[Request]) -> list[dict[str, object]]:
    """One row for each quantity."""
    values: dict[str, list[tuple[str, Array]]] = defaultdict(list)
    for request in requests:
        run = "/".join(map(str, request))
        for name, found in quantities(training_of(request)):
            values[name].append((run, found[np.isfinite(found)]))
    rows: list[dict[str, object]] = []
    for name, parts in values.items():
        parts = [(run, part) for run, part in parts if len(part)]
        if not parts:
            continue
        low = name.startswith(("smallest", "mean abs", "first /", "gradient p95", "norm after"))
        every = np.concatenate([part for _, part in parts])
        extreme = min(parts, key=lambda p: p[1].min()) if low else max(parts, key=_largest)
        marks = [1 - q for q in QUANTILES] if low else list(QUANTILES)
        rows.append(
            {
                "quantity": name,
                "count": len(every),
                "quantiles": [float(q) for q in np.quantile(every, marks)],
                "extreme": float(every.min() if low else every.max()),
                "run": extreme[0],
                "limit": limit_of(name),
            }
        )
    return rows


def _largest(part: tuple[str, Array]) -> float:
    return float(part[1].max())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="of each program")
    parser.add_argument("--programs", nargs="*", help="these alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    requests = healthy(arguments.seeds)
    if arguments.programs:
        requests = [request for request in requests if request.program in arguments.programs]
    record_all(requests, processes=2)
    rows = table(requests)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{len(requests)} healthy trainings; quantiles of the side that the limit is on")
    head = ["p50", "p95", "p99", "p99.9", "extreme"]
    print(f"{'':40}{'values':>8}" + "".join(f"{name:>11}" for name in head) + "  in, limit")
    for row in rows:
        quantiles = row["quantiles"]
        assert isinstance(quantiles, list)
        numbers = "".join(f"{number:>11.3g}" for number in [*quantiles, row["extreme"]])
        print(f"{row['quantity']:40}{row['count']:>8}{numbers}  {row['run']}  {row['limit']}")


if __name__ == "__main__":
    main()
