"""What capture says of activations and of the updates of weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.trainings.captured import Said, captured, said
from tocsin.emitter.hooks import torch_patches
from tocsin.emitter.probes.activations import samples
from tocsin.emitter.probes.weight_updates import BLOCK, BLOCKS, UpdateProbe
from tocsin.emitter.send.outbox import StepRow
from tocsin.schemas.records.frames import STATISTIC_COLUMNS
from tocsin.schemas.records.runs import CaptureDegraded

EVERY = '{"collections": {"activations": {"every": 10}, "weights": {"every": 5}}}'


def train(model: nn.Module, shape: tuple[int, ...], *, steps: int = 12, micro: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        for _ in range(micro):
            model(torch.randn(shape)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def capture(folder: Path, model: nn.Module, *shape: int, micro: int = 1) -> Said:
    with captured(folder, TOCSIN_CAPTURE=EVERY):
        train(model, shape, micro=micro)
    return said(folder)


def dead_of(found: Said, step: int) -> dict[str, float]:
    (frame,) = [
        f
        for f in found.frames
        if (f.collection, f.step) == ("activations", step) and "dead" in f.columns
    ]
    assert frame.columns == (*STATISTIC_COLUMNS, "dead")
    dead = frame.column("dead")
    assert dead is not None
    return dict(zip(frame.rows, dead.tolist(), strict=True))


def half_dead(units: int, layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        layer.bias[: units // 2] = -1e6
    return layer


def test_dead_units_of_linear_layers_are_counted(tmp_path: Path) -> None:
    model = nn.Sequential(half_dead(40, nn.Linear(8, 40)), nn.ReLU(), nn.Linear(40, 4), nn.ReLU6())
    found = capture(tmp_path, model, 64, 8)
    steps = [f.step for f in found.frames if f.collection == "activations"]
    assert steps == [1, 10]
    assert dead_of(found, 10)["1"] == pytest.approx(0.5, abs=0.1)
    assert list(dead_of(found, 10)) == ["1", "3"]


def test_units_of_a_convolution_are_its_channels(tmp_path: Path) -> None:
    model = nn.Sequential(
        half_dead(8, nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    )
    found = capture(tmp_path, model, 32, 3, 8, 8)
    assert dead_of(found, 1) == pytest.approx({"1": 0.5})
    assert found.frame("activations", 1).counts[0, 0] <= samples.MAX_SAMPLES


def test_a_sequence_has_its_units_in_the_last_dimension(tmp_path: Path) -> None:
    model = nn.Sequential(half_dead(20, nn.Linear(8, 20)), nn.ReLU(), nn.Linear(20, 2))
    assert dead_of(capture(tmp_path, model, 16, 7, 8), 1) == pytest.approx({"1": 0.5}, abs=0.1)


def test_one_relu_in_many_places_is_told_apart_and_one_micro_batch_counts(tmp_path: Path) -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2))
    assert list(dead_of(capture(tmp_path, model, 64, 8, micro=3), 10)) == ["1", "1#2"]


def activation_rows(found: Said, column: str) -> dict[int, list[str]]:
    frames = [f for f in found.frames if f.collection == "activations" and column in f.columns]
    return {f.step: list(f.rows) for f in frames}


def test_micro_batches_that_are_small_count_together(tmp_path: Path) -> None:
    relu = nn.ReLU()
    model = nn.Sequential(
        half_dead(40, nn.Linear(8, 40)), relu, nn.Linear(40, 8), relu, nn.Linear(8, 2)
    )
    found = capture(tmp_path, model, 16, 8, micro=8)
    assert activation_rows(found, "dead") == {1: ["1", "1#2"], 10: ["1", "1#2"]}
    assert dead_of(found, 10)["1"] == pytest.approx(0.5, abs=0.1)
    numel = found.frame("activations", 10).counts[:, 0]
    assert numel.tolist() == [16 * 40, 16 * 8]  # the statistics are of the first


def test_small_batches_count_together_over_several_summaries(tmp_path: Path) -> None:
    model = nn.Sequential(half_dead(40, nn.Linear(8, 40)), nn.ReLU(), nn.Linear(40, 2))
    found = capture(tmp_path, model, 16, 8)
    assert activation_rows(found, "mean") == {1: ["1"], 10: ["1"]}
    assert activation_rows(found, "dead") == {10: ["1"]}
    assert dead_of(found, 10)["1"] == pytest.approx(0.5, abs=0.1)


def test_a_forward_pass_that_backward_repeats_is_no_micro_batch(tmp_path: Path) -> None:
    class Repeated(nn.Sequential):  # type: ignore[misc]  # torch has no types here
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Repeated(half_dead(40, nn.Linear(8, 40)), nn.ReLU(), nn.Linear(40, 2))
    assert activation_rows(capture(tmp_path, model, 16, 8), "dead") == {10: ["1"]}


def test_an_output_with_nan_is_not_dead_but_unknown(tmp_path: Path) -> None:
    class Beside(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.good, self.bad = nn.Linear(8, 8), nn.ReLU(), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.bad(torch.where(y == y.max(), torch.nan, y))
            return self.good(y)

    found = capture(tmp_path, Beside(), 64, 8)
    assert list(dead_of(found, 1)) == ["good"]
    (odd,) = [
        f
        for f in found.frames
        if f.step == 1 and f.columns == STATISTIC_COLUMNS and f.collection == "activations"
    ]
    assert odd.rows == ("bad",)
    assert odd.counts[0, [0, 2, 3]].tolist() == [512, 1, 0]


def test_nothing_of_ours_is_on_the_user_s_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with captured(tmp_path, TOCSIN_CAPTURE=EVERY):
        train(model, (64, 8))
        assert b"tocsin" not in pickle.dumps(model)
        assert not model[1]._forward_hooks
        copy.deepcopy(model)
        ops = [node.op for node in torch.fx.symbolic_trace(model).graph.nodes]
        assert ops.count("call_module") == 3


def test_a_compiled_model_is_seen_in_its_one_graph(tmp_path: Path) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(half_dead(40, nn.Linear(8, 40)), nn.ReLU(), nn.Linear(40, 2))
    with captured(tmp_path, TOCSIN_CAPTURE=EVERY):
        train(torch.compile(model, backend=keep, fullgraph=True), (64, 8))
    found = said(tmp_path)
    assert len(graphs) == 1
    for step in (1, 10):
        assert dead_of(found, step) == {"1": pytest.approx(0.5, abs=0.1)}
    assert not found.of(CaptureDegraded)


# -- updates


def updates_of(found: Said, step: int) -> dict[str, tuple[float, float]]:
    frame = found.frame("updates", step)
    assert frame.columns == ("l2", "update_l2")
    rows = frame.values.tolist()
    return {name: (row[0], row[1]) for name, row in zip(frame.rows, rows, strict=True)}


def test_updates_are_exact_where_tensors_are_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    norms: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured(tmp_path, TOCSIN_CAPTURE=EVERY):
        for _ in range(6):
            model(torch.randn(16, 8)).square().mean().backward()
            norms.append(0.1 * float(model[0].weight.grad.norm()))
            optimizer.step()
            optimizer.zero_grad()
    found = said(tmp_path)
    assert [f.step for f in found.frames if f.collection == "updates"] == [0, 5]
    size, change = updates_of(found, 5)["0.weight"]
    assert change == pytest.approx(norms[5], rel=1e-4)
    assert size == pytest.approx(float(model[0].weight.detach().norm()), rel=1e-5)


def test_large_tensors_are_estimated_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.emitter.probes.weight_updates.MIN_VALUES", 1 << 16)
    torch.manual_seed(0)
    tensors = [(str(i), torch.randn(100, 1000, requires_grad=True)) for i in range(40)]
    for _, tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    probe = UpdateProbe()
    seen: list[str] = []
    for _ in range(3):
        probe.before(tensors)
        copied = sum(np.size(before) for before in probe._before)
        assert copied <= max(1 << 16, 0.02 * 40 * 100_000)
        with torch.no_grad():
            for _, tensor in tensors:
                tensor += 0.01
        updates = probe.after(tensors)
        assert updates is not None
        names, values, counts = updates.rows()
        seen += names
        assert len(names) == 80_000 // 4096
        assert values[:, 1] == pytest.approx(0.01 * np.sqrt(100_000), rel=1e-3)
        assert set(counts[:, 0].tolist()) == {100_000}
    assert set(seen) == {name for name, _ in tensors}
    assert BLOCK * BLOCKS == 4096


def test_frozen_and_nonfinite_tensors_are_left_out() -> None:
    good, frozen, bad = (torch.ones(4, requires_grad=True) for _ in range(3))
    good.grad, bad.grad = torch.ones(4), torch.ones(4)
    probe = UpdateProbe()
    tensors = [("good", good), ("frozen", frozen), ("bad", bad)]
    probe.before(tensors)
    with torch.no_grad():
        bad[0] = float("nan")
    updates = probe.after(tensors)
    assert updates is not None
    assert updates.rows()[0] == ("good",)
    assert probe.after(tensors) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_measured_too(dtype: torch.dtype) -> None:
    weight = torch.full((1000,), 256.0, dtype=dtype, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    probe = UpdateProbe()
    probe.before([("w", weight)])
    with torch.no_grad():
        weight += 2
    updates = probe.after([("w", weight)])
    assert updates is not None
    assert updates.rows()[1].ravel().tolist() == pytest.approx(
        [258 * 1000**0.5, 2 * 1000**0.5], rel=1e-3
    )


@pytest.mark.parametrize(
    "laid_out",
    [
        pytest.param(
            lambda: torch.ones(4, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d), id="3d"
        ),
        pytest.param(lambda: torch.ones(8, 6, 5).permute(2, 0, 1), id="permuted"),
        pytest.param(lambda: torch.ones(8, 12)[:, :6], id="a slice"),
    ],
)
def test_a_layout_of_its_own_is_measured_as_any_other(
    laid_out: Callable[[], torch.Tensor],
) -> None:
    weight = laid_out()
    weight.grad = torch.ones_like(weight)
    probe = UpdateProbe()
    probe.before([("w", weight)])
    weight += 1
    updates = probe.after([("w", weight)])
    assert updates is not None
    root = weight.numel() ** 0.5
    assert updates.rows()[1].ravel().tolist() == pytest.approx([2 * root, root])


def test_a_step_that_puts_other_memory_there_is_measured() -> None:
    weight, other = torch.ones(6), torch.ones(6)
    weight.grad, other.grad = torch.ones(6), torch.ones(6)
    probe = UpdateProbe()
    tensors = [("weight", weight), ("other", other)]
    probe.before(tensors)
    weight.data, other.data = weight.data + 1, torch.ones(3)
    updates = probe.after(tensors)
    assert updates is not None
    assert updates.rows()[0] == ("weight",)
    assert updates.rows()[1][0, 1] == pytest.approx(6**0.5)


# -- losses of evaluations


def evaluated(folder: Path, measure: Callable[[nn.Module], object], **settings: str) -> list[float]:
    """Train, and measure without a gradient after step 3; the evaluation losses in order."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    with captured(folder, **settings):
        train(model, (16, 8), steps=4)
        with torch.no_grad():
            measure(model)
    rows = [(step, cells["loss"]) for step, mode, cells in said(folder).rows if mode == "eval"]
    assert {step for step, _ in rows} <= {3}
    return [loss for _, loss in rows]


def mse(model: nn.Module) -> float:
    return float(nn.functional.mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 1)))


def test_functions_count_while_the_model_is_in_eval(tmp_path: Path) -> None:
    values: list[float] = []

    def measure(model: nn.Module) -> None:
        mse(model)
        model.eval()
        values.append(mse(model))
        nn.functional.l1_loss(model(torch.ones(4, 8)), torch.zeros(4, 1))
        values.append(mse(model))
        nn.functional.mse_loss(torch.ones(3), torch.ones(3), reduction="none")

    assert evaluated(tmp_path, measure) == pytest.approx(values)


SCORES = torch.linspace(-1, 1, 60).reshape(12, 5)
CLASSES = torch.arange(12) % 5
UNLABELLED = CLASSES.masked_fill(CLASSES == 1, 255)


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("mse_loss", SCORES + 0.5, {}),
        ("cross_entropy", CLASSES, {}),
        ("cross_entropy", CLASSES, {"ignore_index": 3}),
        ("cross_entropy", CLASSES, {"ignore_index": 3, "weight": torch.arange(1.0, 6.0)}),
        ("cross_entropy", UNLABELLED, {"ignore_index": 255, "weight": torch.arange(1.0, 6.0)}),
        ("cross_entropy", SCORES.softmax(dim=1), {}),
        ("nll_loss", CLASSES, {}),
        ("binary_cross_entropy_with_logits", SCORES.sigmoid(), {}),
    ],
)
def test_of_a_sum_the_mean_is_taken(
    tmp_path: Path, name: str, target: torch.Tensor, options: dict[str, object]
) -> None:
    function = getattr(nn.functional, name)

    def measure(model: nn.Module) -> None:
        model.eval()
        function(SCORES, target, reduction="sum", **options)

    mean = float(function(SCORES, target, **options))
    assert evaluated(tmp_path, measure) == [pytest.approx(mean, rel=1e-5)]


@pytest.mark.parametrize(
    ("kind", "target"),
    [(nn.MSELoss, SCORES + 0.5), (nn.CrossEntropyLoss, CLASSES), (nn.NLLLoss, CLASSES)],
)
def test_of_a_module_s_sum_the_mean_is_taken(
    tmp_path: Path, kind: Callable[..., nn.Module], target: torch.Tensor
) -> None:
    def measure(model: nn.Module) -> None:
        model.eval()
        kind(reduction="sum")(SCORES, target)

    assert evaluated(tmp_path, measure) == [pytest.approx(float(kind()(SCORES, target)), rel=1e-5)]


def test_a_loss_module_counts_once(tmp_path: Path) -> None:
    def measure(model: nn.Module) -> None:
        model.eval()
        nn.MSELoss()(model(torch.ones(4, 8)), torch.zeros(4, 1))

    assert len(evaluated(tmp_path, measure)) == 1


def test_a_metric_of_each_training_step_is_no_evaluation(tmp_path: Path) -> None:
    def measure(model: nn.Module) -> None:
        nn.L1Loss()(model(torch.ones(4, 8)), torch.zeros(4, 1))

    assert evaluated(tmp_path, measure) == []


def test_the_first_loss_module_of_an_evaluation_is_its_loss(tmp_path: Path) -> None:
    def measure(model: nn.Module) -> None:
        model.eval()
        for _ in range(2):
            nn.MSELoss()(torch.ones(4), torch.zeros(4))
            nn.L1Loss()(3 * torch.ones(4), torch.zeros(4))

    assert evaluated(tmp_path, measure) == [1.0, 1.0]


class Both(nn.modules.loss._Loss):  # type: ignore[misc]  # torch has no types here
    """A loss of two losses."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nn.MSELoss()(x, y) + nn.functional.l1_loss(x, y)
        return out


def test_a_loss_made_of_losses_is_one(tmp_path: Path) -> None:
    def measure(model: nn.Module) -> None:
        model.eval()
        for _ in range(2):
            Both()(3 * torch.ones(4), torch.zeros(4))

    assert evaluated(tmp_path, measure) == [12.0, 12.0]


@pytest.mark.parametrize("schedule", ['{"every": 100}', '"off"'])
def test_a_loss_that_is_not_finite_is_said_whatever_is_due(tmp_path: Path, schedule: str) -> None:
    hurried: list[bool] = []

    def measure(model: nn.Module) -> None:
        model.eval()
        capture = torch_patches.hooks.capture
        assert capture is not None
        sender = capture.training.sender
        original = sender.row

        def row(row: StepRow, *, urgent: bool = False) -> None:
            hurried.append(urgent)
            original(row, urgent=urgent)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sender, "row", row)
            for value in (1.0, float("nan"), 2.0, float("inf")):
                nn.MSELoss()(torch.full((4,), value), torch.zeros(4))

    section = f'{{"collections": {{"losses": {{"modes": {{"eval": {schedule}}}}}}}}}'
    found = evaluated(tmp_path, measure, TOCSIN_CAPTURE=section)
    assert [str(value) for value in found] == ["nan", "inf"]
    assert hurried == [True, True]


def test_compilers_see_the_functions_themselves() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(x, torch.zeros(3))

    torch_patches.install()
    assert float(torch.compile(loss, backend=keep, fullgraph=True)(torch.ones(3))) == 1.0
    assert len(graphs) == 1
    assert not any("tocsin" in str(node.target) for node in graphs[0].graph.nodes)
