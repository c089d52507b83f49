"""What capture says of small trainings, against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)

from support.trainings.captured import Said, captured, said
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.runs import RunEnded, RunStarted


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def train(
    steps: int, before_step: Callable[[int, torch.nn.Module], None] | None = None
) -> tuple[torch.nn.Module, list[float], list[float]]:
    model, optimizer = model_and_optimizer()
    losses, norms = [], []
    for step in range(steps):
        loss = model(batch(step)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if before_step is not None:
            before_step(step, model)
        losses.append(loss.item())
        squares = [float(p.grad.double().pow(2).sum()) for p in model.parameters()]
        norms.append(math.sqrt(sum(squares)))
        optimizer.step()
    return model, losses, norms


def test_step_scalars_are_exact(tmp_path: Path) -> None:
    with captured(tmp_path):
        _, losses, norms = train(25)
    steps = said(tmp_path).steps()
    assert sorted(steps) == list(range(25))
    np.testing.assert_allclose([steps[i]["loss"] for i in range(25)], losses, rtol=1e-6)
    np.testing.assert_allclose([steps[i]["gradient_norm"] for i in range(25)], norms, rtol=1e-5)
    assert {values["gradient_nonfinite"] for values in steps.values()} == {0.0}
    assert steps[7]["lr.0"] == pytest.approx(0.1)
    assert "step_time_s" not in steps[0]
    assert steps[9]["step_time_s"] > 0


def test_full_rows_every_ten_steps_with_names_in_order(tmp_path: Path) -> None:
    kept = {}

    def keep(step: int, model: torch.nn.Module) -> None:
        if step == 10:
            kept.update({n: p.grad.clone() for n, p in model.named_parameters()})

    with captured(tmp_path):
        train(21, keep)
    found = said(tmp_path)
    assert [f.step for f in found.frames if f.collection == "gradients"] == [0, 10, 20]
    assert [f.step for f in found.frames if f.collection == "weights"] == [0, 10, 20]
    gradients = found.frame("gradients", 10)
    assert gradients.rows == ("2.bias", "2.weight", "0.bias", "0.weight")
    assert found.frame("weights", 10).rows == ("0.weight", "0.bias", "2.weight", "2.bias")
    for i, name in enumerate(gradients.rows):
        g = kept[name].double().numpy().reshape(-1)
        expected = (
            g.min(), g.max(), g.mean(), g.std(), np.abs(g).sum(), np.linalg.norm(g),
            np.abs(g).max(), *np.quantile(g, (0.05, 0.25, 0.5, 0.75, 0.95)),
        )  # fmt: skip
        np.testing.assert_allclose(gradients.values[i], expected, rtol=2e-4, atol=1e-7)
        assert gradients.counts[i].tolist() == [g.size, int((g == 0).sum()), 0, 0]


def test_life_of_a_run(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_LABELS="team=vision"):
        train(3)
    found = said(tmp_path)
    (started,), (ended,) = found.of(RunStarted), found.of(RunEnded)
    assert (started.optimizer, started.tensors, started.parameters) == ("SGD", 4, 53)
    assert started.labels == {"team": "vision"}
    assert started.collections == (
        "losses",
        "gradients",
        "weights",
        "activations",
        "optimizer_state",
    )
    assert (ended.last_step, ended.outcome) == (2, "completed")
    assert ended.capture is not None
    assert ended.capture.degraded == ()
    assert [meta.seq for meta in found.metas] == list(range(len(found.metas)))
    assert len({meta.boot for meta in found.metas}) == 1


def test_one_nan_in_one_gradient_is_named_at_its_step(tmp_path: Path) -> None:
    def poison(step: int, model: torch.nn.Module) -> None:
        if step == 4:
            next(model.parameters()).grad[2, 3] = float("nan")

    with captured(tmp_path):
        train(12, poison)
    found = said(tmp_path)
    steps = found.steps()
    assert steps[3]["gradient_nonfinite"] == 0
    assert steps[4]["gradient_nonfinite"] == 1
    assert math.isfinite(steps[4]["loss"])
    assert math.isnan(steps[5]["loss"])
    frame = found.frame("gradients", 4)
    nans, infs = frame.count("nans"), frame.count("infs")
    assert nans is not None
    assert infs is not None
    assert dict(zip(frame.rows, nans.tolist(), strict=True))["0.weight"] == 1
    assert nans.sum() == 1
    assert infs.sum() == 0
    assert np.isfinite(frame.values).all()
    # From the odd step on each is looked at, for a while.
    gradients = [f for f in found.frames if f.collection == "gradients"]
    assert [f.step for f in gradients] == [0, *range(4, 12)]


def test_accumulation_says_sum_and_mean(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with captured(tmp_path):
        losses = []
        for micro in range(3):
            loss = model(batch(micro)).pow(2).mean() / 3
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    (values,) = said(tmp_path).steps().values()
    assert values["loss"] == pytest.approx(sum(losses), rel=1e-5)
    assert values["loss_mean"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert values["micro_batches"] == 3


def test_closures_and_lbfgs(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    firsts = []
    with captured(tmp_path):
        for step in range(3):
            calls: list[float] = []

            def closure(step: int = step, calls: list[float] = calls) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch(step)).pow(2).mean()
                loss.backward()
                calls.append(loss.item())
                return loss

            optimizer.step(closure)
            firsts.append(calls[0])
    steps = said(tmp_path).steps()
    assert [steps[i]["loss"] for i in range(3)] == pytest.approx(firsts, rel=1e-5)
    assert all(steps[i]["gradient_norm"] > 0 for i in range(3))


def test_two_optimizers_share_a_step_and_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(1)
    generator, critic = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
    large = torch.optim.SGD(generator.parameters(), lr=0.1)
    small = torch.optim.Adam(critic.parameters(), lr=0.01)
    losses = []
    with captured(tmp_path):
        for step in range(12):
            small.zero_grad()
            critic(generator(batch(step)).detach()).mean().backward()
            if step == 7:
                critic.weight.grad[0, 0] = float("inf")
            small.step()
            large.zero_grad()
            loss = -critic(generator(batch(step))).mean()
            loss.backward()
            losses.append(loss.item())
            large.step()
    found = said(tmp_path)
    steps = found.steps()
    assert sorted(steps) == list(range(12))
    assert [steps[i]["loss"] for i in range(7)] == pytest.approx(losses[:7], rel=1e-5)
    assert steps[7]["gradient_nonfinite"] >= 1
    assert len(found.frame("gradients", 0).rows) == 4
    assert len(set(found.frame("gradients", 0).rows)) == 4
    assert found.of(RunStarted)[0].optimizers == 2


@contextmanager
def alone() -> Iterator[None]:
    """One rank, without others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_scaler(**settings: float) -> torch.amp.GradScaler:
    """That of FSDP, which has its own of each method."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler("cpu", **settings)


@pytest.mark.parametrize("make", [partial(torch.amp.GradScaler, "cpu"), sharded_scaler],
                         ids=["plain", "FSDP"])  # fmt: skip
def test_a_skipped_scaler_step_is_no_step(
    tmp_path: Path, make: Callable[..., torch.amp.GradScaler]
) -> None:
    model, optimizer = model_and_optimizer()
    losses = []
    with alone(), captured(tmp_path):
        scaler = make(init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            loss = model(batch(step)).pow(2).mean()
            scaler.scale(loss).backward()
            if step == 2:
                next(model.parameters()).grad[0, 0] = float("inf")
            else:
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
    steps = said(tmp_path).steps()
    assert sorted(steps) == [0, 1, 2, 3]
    assert [steps[i]["loss"] for i in range(4)] == pytest.approx(losses, rel=1e-5)
    assert {values["gradient_nonfinite"] for values in steps.values()} == {0.0}
    assert steps[2]["scaler_skipped"] == 1
    assert [steps[i]["scaler_scale"] for i in (1, 2, 3)] == [1024.0, 512.0, 512.0]


@pytest.mark.parametrize(
    ("several", "behind"),
    [(False, False), (True, False), (False, True)],
    ids=["in front of the step", "two", "behind the step"],
)
def test_gradients_that_a_fused_optimizer_unscales_are_told_unscaled(
    tmp_path: Path, *, several: bool, behind: bool
) -> None:
    def told(folder: Path, *, fused: bool) -> Said:
        torch.manual_seed(0)
        models = [torch.nn.Linear(6, 5), torch.nn.Linear(6, 3)][: 1 + several]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if behind:
            optimizers[0].register_step_pre_hook(lambda *_: None)
        with captured(folder):
            for step in range(3):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    scaler.scale(model(batch(step)).pow(2).mean()).backward()
                    scaler.step(optimizer)
                scaler.update()
        return said(folder)

    folders = tmp_path / "fused", tmp_path / "plain"
    for folder in folders:
        folder.mkdir()
    fused, plain = told(folders[0], fused=True), told(folders[1], fused=False)
    one, other = fused.frame("gradients", 0), plain.frame("gradients", 0)
    assert (one.rows, one.columns) == (other.rows, other.columns)
    np.testing.assert_allclose(one.values, other.values, rtol=1e-3, atol=1e-6)
    found: set[str] = set()
    for step, cells in plain.steps().items():
        norms = {name: value for name, value in cells.items() if "norm" in name}
        assert norms == pytest.approx({n: fused.steps()[step][n] for n in norms}, rel=1e-3)
        found |= norms.keys()
    assert len(found) == 1 + several


def test_a_scaler_that_skips_every_step_is_heard(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with captured(tmp_path):
        for step in range(24):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).pow(2).mean()).backward()
            if step:
                next(model.parameters()).grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    rows = [cells for step, mode, cells in said(tmp_path).rows if (step, mode) == (1, "train")]
    assert [cells["scaler_skipped"] for cells in rows] == [10, 20]


Clip = Callable[[torch.nn.Module], object]


@pytest.mark.parametrize(
    ("clip", "seen"),
    [
        (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5), True),
        (lambda m: torch.nn.utils.clip_grad_norm_(iter([*m.parameters()]), 0.5), True),
        (lambda m: [torch.nn.utils.clip_grad_norm_(p, 0.5) for p in m.parameters()], True),
        (lambda m: torch.nn.utils.clip_grad_norm_([m.weight], 0.5), False),
        (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type=1.0), False),
        (lambda m: [torch.nn.utils.clip_grad_norm_(m.parameters(), x) for x in (1.0, 0.5)], False),
    ],
    ids=["whole", "an iterator", "one by one", "a part", "another norm", "twice"],
)  # fmt: skip
def test_the_gradient_norm_is_that_before_clipping(
    tmp_path: Path, clip: Clip, *, seen: bool
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before, after = [], []
    with captured(tmp_path):
        for _ in range(3):
            model(10 * torch.randn(16, 8)).square().sum().backward()
            before.append(norm_of(model))
            clip(model)
            after.append(norm_of(model))
            optimizer.step()
            optimizer.zero_grad()
    for step, cells in said(tmp_path).steps("train").items():
        first = before[step] if seen else after[step]
        assert cells["gradient_norm"] == pytest.approx(first, rel=1e-4)
        last = cells.get("gradient_norm_clipped")
        assert last == (pytest.approx(after[step], rel=1e-4) if seen else None)


def norm_of(model: torch.nn.Module) -> float:
    squares = [float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (np.float32(0.5), {"lr.0": 0.5}),
        (torch.tensor(0.25), {"lr.0": 0.25}),
        (None, {}),
    ],
)
def test_a_rate_that_cannot_be_read_is_left_out(
    tmp_path: Path, rate: object, told: dict[str, float]
) -> None:
    class Relative(torch.optim.SGD):  # type: ignore[misc]  # torch has no types here
        """Finds its step size by itself, as Adafactor does."""

        def step(self, closure: object = None) -> None:
            rate = self.param_groups[0]["lr"]
            self.param_groups[0]["lr"] = 0.1
            super().step()
            self.param_groups[0]["lr"] = rate

    model = torch.nn.Linear(8, 1)
    optimizer = Relative(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    with captured(tmp_path):
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    for cells in said(tmp_path).steps("train").values():
        assert {name: value for name, value in cells.items() if name == "lr.0"} == told


def test_evaluation_losses_have_their_own_mode(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    criterion = torch.nn.MSELoss()
    with captured(tmp_path) as hooks:
        criterion(model(batch(0)), torch.zeros(8, 3)).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            value = criterion(model(batch(1)), torch.zeros(8, 3)).item()
        assert hooks.capture is not None
        beat = hooks.capture.training.heartbeat()
    assert (beat.busy, beat.steps_in_flight, beat.last_step) == ("evaluation", True, 0)
    assert said(tmp_path).steps("eval") == {0: {"loss": pytest.approx(value, rel=1e-5)}}


def test_a_loss_that_is_whole_on_each_rank_is_read(tmp_path: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with captured(tmp_path) as hooks, loss_parallel():
        for step in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch(step)), torch.arange(8))
            losses.append(loss.full_tensor().item())
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(batch(5)), torch.arange(8))
            losses.append(loss.full_tensor().item())
        assert hooks.isolation.off == {}
    found = said(tmp_path)
    told = [cells["loss"] for mode in ("train", "eval") for cells in found.steps(mode).values()]
    assert told == pytest.approx(losses)


def test_a_checkpoint_is_named_by_its_final_path(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with captured(tmp_path):
        for step in range(3):
            model(batch(step)).pow(2).mean().backward()
            optimizer.step()
            if step == 1:
                torch.save(model.state_dict(), tmp_path / "c.pt.partial")
                (tmp_path / "c.pt.partial").rename(tmp_path / "c.pt")
    (written,) = said(tmp_path).of(CheckpointWritten)
    assert written.checkpoint.path == str(tmp_path / "c.pt")
    assert (written.checkpoint.step, written.checkpoint.finite) == (1, True)
    assert written.checkpoint.size_bytes == (tmp_path / "c.pt").stat().st_size


def test_users_error_in_save_is_his_own(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with captured(tmp_path):
        model(batch(0)).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save({}, tmp_path / "no" / "where.pt")
    assert said(tmp_path).of(CheckpointWritten) == []


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    strange = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer.add_param_group({"params": [strange], "lr": 0.0})
    with captured(tmp_path):
        for step in range(2):
            model(batch(step)).sum().backward()
            strange.grad = torch.empty(3, device="meta")
            optimizer.step()
    (ended,) = said(tmp_path).of(RunEnded)
    assert ended.capture is not None
    assert ended.capture.degraded == ()
    assert ended.capture.skipped_tensors >= 2


@pytest.mark.parametrize("cleared_behind", [False, True])
def test_gradients_are_those_that_the_optimizers_own_hooks_leave(
    tmp_path: Path, cleared_behind: bool
) -> None:
    model, optimizer = model_and_optimizer()
    used = []

    def enlarge(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1000)
        used.append(math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters())))

    def clear(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        optimizer.zero_grad()

    optimizer.register_step_pre_hook(enlarge)
    if cleared_behind:
        optimizer.register_step_post_hook(clear)
    with captured(tmp_path):
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).pow(2).mean().backward()
            optimizer.step()
    told = [values["gradient_norm"] for _, values in sorted(said(tmp_path).steps().items())]
    # Where nothing is left behind the step, they are told as they were in front of it.
    factor = 0.001 if cleared_behind else 1.0
    np.testing.assert_allclose(told, np.array(used) * factor, rtol=1e-5)
