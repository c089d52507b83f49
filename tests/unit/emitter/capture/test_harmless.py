"""Nothing of capture reaches the training: not its faults, not its time, not its numbers."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.trainings.captured import captured, said
from tocsin.bus.embedded.spool import SpoolWriter, has_spools
from tocsin.bus.port import BusUnavailable
from tocsin.emitter.capture import capture, program_shape
from tocsin.emitter.hooks import loss_functions, torch_patches, training_hooks
from tocsin.emitter.probes import clipped_norms
from tocsin.emitter.probes.checkpoint_files import CheckpointFiles
from tocsin.emitter.probes.evaluation_losses import EvaluationLosses
from tocsin.emitter.process import isolation, run_facts
from tocsin.emitter.stop import exit_points
from tocsin.emitter.training import training
from tocsin.schemas.records.collections import KINDS
from tocsin.schemas.records.runs import CaptureDegraded, RunEnded, RunStarted

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # its older place
    from torch.distributed._composable.fsdp import fully_shard

STEPS = 12


def train(folder: Path, steps: int = STEPS) -> tuple[list[torch.Tensor], torch.Tensor, list[float]]:
    """Weights, the next random numbers, losses."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = torch.nn.MSELoss()
    losses = []
    for step in range(steps):
        loss = criterion(model(torch.randn(16, 6)), torch.zeros(16, 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
        if step == steps // 2:
            torch.save(model.state_dict(), folder / "c.pt")
            model.eval()
            with torch.no_grad():
                criterion(model(torch.randn(16, 6)), torch.zeros(16, 1))
            model.train()
    return [p.detach().clone() for p in model.parameters()], torch.randn(4), losses


def assert_same(
    one: tuple[list[torch.Tensor], torch.Tensor, list[float]],
    other: tuple[list[torch.Tensor], torch.Tensor, list[float]],
) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert torch.equal(one[1], other[1])
    assert one[2] == other[2]


def test_weights_random_numbers_and_losses_are_bit_identical(tmp_path: Path) -> None:
    plain = train(tmp_path)
    with captured(tmp_path, TOCSIN_CAPTURE='{"collections": {"gradients": {"every": 1}}}'):
        watched = train(tmp_path)
    assert_same(plain, watched)
    assert len(said(tmp_path).steps()) == STEPS


class Noisy(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A parametrization that draws random numbers."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.01 * torch.randn_like(weight)


class Parametrized(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Weights that are computed when they are read, wherever capture looks for weights."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.tokens = torch.nn.Embedding(5, 16), torch.nn.Embedding(8, 16)
        self.frozen = torch.nn.Sequential()
        for _ in range(4):
            self.frozen.append(torch.nn.Linear(16, 16))
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(16, 8))
        for module, name in (
            (self.tokens, "weight"),
            (self.frozen[3], "weight"),
            (self.attention, "in_proj_weight"),
        ):
            torch.nn.utils.parametrize.register_parametrization(module, name, Noisy())
        for module in (self.places, self.tokens, self.frozen):
            module.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.places(torch.arange(5)) + self.tokens(tokens))
        out: torch.Tensor = self.head(self.attention(x, x, x)[0])
        return out


@pytest.mark.parametrize("kinds", [(), KINDS])
def test_a_weight_that_is_computed_when_it_is_read_is_not_read(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    def train_parametrized() -> tuple[list[torch.Tensor], torch.Tensor, list[float]]:
        torch.manual_seed(3)
        model = Parametrized()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randint(0, 8, (4, 5))).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return list(model.state_dict().values()), torch.randn(4), losses

    plain = train_parametrized()
    each = {"collections": {kind: {"every": 1} for kind in kinds}}
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps(each)) as hooks:
        watched = train_parametrized()
        assert hooks.isolation.off == {}
    assert_same(plain, watched)


def fully_sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


@pytest.fixture
def swaps() -> Iterator[None]:
    """Torch swaps the contents of any parameter that is converted."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    widths = (6, 8, 8, 8, 8, 8)
    layers = map(torch.nn.Linear, widths, widths[1:])
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train_and_convert(
    model: torch.nn.Module, to: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], torch.Tensor, list[float]]:
    """Of five steps, two backward calls each: convert with gradients, and go on with none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    losses, dtype = [], torch.float32
    for step in range(5):
        for _ in range(2):
            loss = model(torch.randn(16, 6, dtype=dtype)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        del loss
        if step == 2:
            dtype = to
            model.to("cpu", to)
        optimizer.zero_grad()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [p.detach().clone() for p in local], torch.randn(4), losses


@pytest.mark.parametrize("several_ranks", [False, True])
def test_parameters_can_be_swapped(tmp_path: Path, swaps: None, *, several_ranks: bool) -> None:
    plain = train_and_convert(network())
    with captured(tmp_path) as hooks:
        model = network()
        for parameter in model.parameters() if several_ranks else ():
            hooks.watch_local(parameter)
        watched = train_and_convert(model)
        assert hooks.isolation.off == {}
    assert_same(plain, watched)
    assert len(said(tmp_path).steps()) == 5


def test_frozen_weights_that_are_looked_at_can_be_swapped(tmp_path: Path, swaps: None) -> None:
    with captured(tmp_path) as hooks:
        model = network()
        model[:4].requires_grad_(requires_grad=False)
        train_and_convert(model)
        assert hooks.isolation.off == {}


@pytest.mark.parametrize(
    ("parallelize", "to"), [(fully_sharded, torch.float32), (tensor_parallel, torch.float64)]
)
def test_a_model_in_parts_can_be_converted(
    tmp_path: Path,
    mesh: DeviceMesh,
    parallelize: Callable[..., torch.nn.Module],
    to: torch.dtype,
) -> None:
    plain = train_and_convert(parallelize(network(), mesh), to)
    with captured(tmp_path) as hooks:
        watched = train_and_convert(parallelize(network(), mesh), to)
        assert hooks.isolation.off == {}
    assert_same(plain, watched)
    assert len(said(tmp_path).steps()) == 5


def fail(*args: object, **kwargs: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("owner", "name", "probe"),
    [
        (capture.Capture, "gradients", "gradients"),
        (capture.Capture, "stepped", "steps"),
        (CheckpointFiles, "wrote", "checkpoints"),
        (EvaluationLosses, "evaluation_loss", "evaluation losses"),
        (training_hooks.Hooks, "on_backward", "losses"),
        (clipped_norms.ClippedNorms, "add", "clipping"),
        (loss_functions.Evaluation, "on_loss", "evaluation"),
        (training_hooks.Hooks, "start", "steps"),
        (training.Training, "stepped", "steps"),
        (exit_points, "started", "stop"),
        (run_facts, "command_line", "steps"),
    ],
)
def test_an_exception_in_a_hook_switches_off_that_probe_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: object,
    name: str,
    probe: str,
) -> None:
    plain = train(tmp_path)
    monkeypatch.setattr(owner, name, fail)
    with captured(tmp_path) as hooks:
        watched = train(tmp_path)
        assert list(hooks.isolation.off) == [probe]
    assert_same(plain, watched)
    if not has_spools(tmp_path / "bus.db") or not said(tmp_path).events:
        assert f"capture of {probe} was switched off" in capsys.readouterr().err
        return
    (degraded,) = said(tmp_path).of(CaptureDegraded)
    assert (degraded.probe, degraded.reason) == (probe, "RuntimeError: planted")
    ended = said(tmp_path).of(RunEnded)[-1]
    assert ended.capture is not None
    assert ended.capture.degraded == (f"{probe}: RuntimeError: planted",)


def test_a_bus_that_is_away_is_said_once_and_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(tmp_path)

    def away(*args: object) -> Callable[[], None]:
        def refuse() -> None:
            raise BusUnavailable("planted: no broker")

        return refuse

    monkeypatch.setattr(training, "outlet_opener", away)
    with captured(tmp_path):
        watched = train(tmp_path)
    assert_same(plain, watched)
    assert capsys.readouterr().err.count("planted: no broker") == 1


def test_a_deleted_bus_file_does_no_harm(tmp_path: Path) -> None:
    plain = train(tmp_path)
    with captured(tmp_path) as hooks:
        train(tmp_path, 2)
        assert hooks.capture is not None
        assert hooks.capture.training.sender.flush(10.0)
        for part in tmp_path.glob("bus.db*"):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()
        watched = train(tmp_path)
    assert_same(plain, watched)
    assert said(tmp_path).of(RunEnded)


def test_a_full_disk_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(tmp_path)

    async def full(*args: object) -> None:
        raise BusUnavailable("database or disk is full")

    monkeypatch.setattr(SpoolWriter, "publish", full)
    with captured(tmp_path):
        watched = train(tmp_path)
    assert_same(plain, watched)


def test_a_refused_thread_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(tmp_path)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with captured(tmp_path):
            watched = train(tmp_path)
    assert_same(plain, watched)
    assert "can't start new thread" in capsys.readouterr().err


def test_a_forked_child_is_not_captured(tmp_path: Path) -> None:
    with captured(tmp_path):
        train(tmp_path, 3)
        child = os.fork()
        if child == 0:
            try:
                train(tmp_path, 3)
            finally:
                os._exit(0 if torch_patches.hooks.capture is None else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        train(tmp_path, 2)
    found = said(tmp_path)
    assert sorted(found.steps()) == [0, 1, 2, 3, 4]
    assert len(found.of(RunEnded)) == 1


def test_workers_of_a_data_loader_leave_it_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 3))
    loader = torch.utils.data.DataLoader(data, batch_size=3, num_workers=2)
    with captured(tmp_path):
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
    assert sorted(said(tmp_path).steps()) == list(range(8))


@pytest.mark.slow
def test_torch_compile_sees_no_other_graph(tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    with captured(tmp_path):
        watched = count()
    assert watched == (1, 0)
    found = said(tmp_path)
    assert sorted(found.steps()) == [0, 1, 2, 3]
    assert found.frame("weights", 0).rows[0] == "0.weight"


@pytest.mark.torture
def test_memory_is_flat_over_two_thousand_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 256)

    def steps(n: int) -> int:
        for _ in range(n):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    # By the clock it passes steps as short as these over on a busy machine.
    with captured(tmp_path, TOCSIN_CAPTURE='{"pacing": "steps"}'):
        before = steps(500)
        after = steps(2000)
    assert after - before < 8_000_000
    assert len(said(tmp_path).steps()) == 2500


def test_nothing_is_left_on_the_users_objects(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {**vars(model)}, {**vars(model.weight)}, set(vars(optimizer))
    with captured(tmp_path) as hooks:
        hooks.watch_local(model.weight)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert ({**vars(model)}, {**vars(model.weight)}) == before[:2]
    assert set(vars(optimizer)) == before[2]
    assert not model._forward_pre_hooks
    assert model.state_dict().keys() == {"weight", "bias"}


def test_a_part_that_failed_once_is_watched_again_after_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = capture.Capture.gradients
    calls: list[int] = []

    def fail_once(self: capture.Capture, optimizer: torch.optim.Optimizer) -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise MemoryError
        original(self, optimizer)

    monkeypatch.setattr(capture.Capture, "gradients", fail_once)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with captured(tmp_path) as hooks:
        for step in range(isolation.REST + 30):
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            if step == 5:
                assert list(hooks.isolation.off) == ["gradients"]
        assert (hooks.isolation.off, list(hooks.isolation.came_back)) == ({}, ["gradients"])
    assert "capture of gradients was switched off (MemoryError: )" in capsys.readouterr().err
    found = said(tmp_path).of(RunEnded)[-1].capture
    assert found is not None
    assert (found.degraded, found.not_watched) == (("gradients: MemoryError: ",), ())


@pytest.mark.parametrize(("owner", "name"), [(capture, "Optimizers"), (program_shape, "shape_of")])
def test_a_beginning_that_failed_is_tried_again_after_a_rest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    owner: object,
    name: str,
) -> None:
    original, calls = getattr(owner, name), []

    def fail_once(*args: object) -> object:
        calls.append(name)
        if len(calls) == 1:
            fail()
        return original(*args)

    monkeypatch.setattr(owner, name, fail_once)
    model, losses = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with captured(tmp_path) as hooks:
        for _ in range(isolation.REST + 5):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert (hooks.isolation.off, list(hooks.isolation.came_back)) == ({}, ["steps"])
        assert hooks.most_backwards == 1
    assert "no torch.optim.Optimizer has made a step" not in capsys.readouterr().err
    found = said(tmp_path)
    (started,) = found.of(RunStarted)
    assert (started.optimizer, started.parameters) == ("SGD", 3)
    steps = found.steps()
    assert [steps[i]["loss"] for i in range(5)] == pytest.approx(losses[-5:])
    assert {cells.get("scaler_skipped", 0) for cells in steps.values()} == {0}
