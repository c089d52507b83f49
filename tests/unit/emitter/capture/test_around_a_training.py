"""What capture says of phases, loaders, data and other optimizers, in real small trainings."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import SupportsFloat

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from support.trainings.captured import Said, captured, said
from tocsin.emitter.hooks.training_hooks import Hooks
from tocsin.emitter.run import Run
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.program_facts import OptimizersSeen
from tocsin.schemas.records.runs import (
    CaptureDegraded,
    DataLoaderSeen,
    PhaseMark,
    RunEnded,
    RunStarted,
)

MS = 0.001


class Slow(TensorDataset):  # type: ignore[misc]  # torch has no types here
    """Each sample takes a millisecond to load."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(MS)
        item: tuple[torch.Tensor, ...] = super().__getitem__(index)
        return item


class Net(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Takes 3 ms forward, 5 ms backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(3 * MS)
        result: torch.Tensor = self.layer(x)
        if result.requires_grad:
            result.register_hook(lambda _: time.sleep(5 * MS))
        return result


def run_of(hooks: Hooks) -> Run:
    from tocsin.emitter.training.context import current

    assert current.session is not None
    return Run(current.session)


@pytest.mark.slow
def test_a_classifier_with_evaluations_and_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 6)
    y = torch.arange(24).remainder(4).flip(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(Slow(x, y), batch_size=4)
    test = DataLoader(TensorDataset(x, y), batch_size=8)
    expected: Counter[int] = Counter()
    step = 0
    with captured(tmp_path) as hooks:
        for epoch in range(2):
            for inputs, labels in train:
                loss = functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            model.eval()
            with torch.no_grad():
                for inputs, labels in test:
                    time.sleep(0.05)
                    functional.cross_entropy(model(inputs), labels)
                    expected.update(labels.tolist())
            assert hooks.capture is not None
            assert hooks.capture.training.heartbeat().busy == "evaluation"
            model.train()
            # From here on a loop that hangs is one, though nothing has shown that it goes on.
            assert hooks.capture.training.heartbeat().busy is None
            torch.save(model.state_dict(), tmp_path / f"{epoch}.pt")
        with run_of(hooks).phase("export"):
            time.sleep(0.01)
    found = said(tmp_path)
    figures = found.of(RunEnded)[0].capture
    assert figures is not None
    assert figures.degraded == ()
    steps = found.steps()
    assert sorted(steps) == list(range(12))
    assert "forward_s" not in steps[0]
    for at in (1, 2, 3, 4, 7, 8, 9, 10, 11):
        cells = steps[at]
        assert cells["data_wait_s"] >= 4 * MS
        assert cells["forward_s"] >= 3 * MS
        assert cells["backward_s"] >= 5 * MS
        phases = ("data_wait_s", "forward_s", "backward_s", "optimizer_s")
        assert sum(cells[name] for name in phases) <= cells["step_time_s"]
        assert not {"evaluation_s", "checkpoint_s"} & set(cells)
    odd = steps[6]
    assert 3 * 0.05 <= odd["evaluation_s"] <= odd["step_time_s"]
    assert 0 < odd["checkpoint_s"] < odd["step_time_s"]
    assert odd["forward_s"] < 0.05

    marks = [(m.name, m.edge) for m in found.of(PhaseMark)]
    both = [("begin", name) for name in ("evaluation", "checkpoint")]
    assert Counter(marks) == {
        **{(name, edge): 2 for _, name in both for edge in ("begin", "end")},
        ("export", "begin"): 1,
        ("export", "end"): 1,
    }
    assert [w.checkpoint.step for w in found.of(CheckpointWritten)] == [5, 11]
    assert [(e.mode, e.dataset, e.batch_size, e.step) for e in found.of(DataLoaderSeen)] == [
        ("train", "Slow", 4, 0),
        ("eval", "TensorDataset", 8, 6),
    ]

    labels_frames = [f for f in found.frames if f.collection == "labels"]
    assert {f.mode for f in labels_frames} == {"train", "eval"}
    assert all(f.count_columns == ("labels", "predictions", "hits") for f in labels_frames)
    seen = sum(int(f.counts[:, 0].sum()) for f in labels_frames if f.mode == "eval")
    assert 8 <= seen <= sum(expected.values())
    assert any(f.collection == "confusion" and f.counts.shape == (4, 4) for f in found.frames)


def test_a_gan_keeps_its_series_apart(tmp_path: Path) -> None:
    torch.manual_seed(1)

    class Generator(torch.nn.Linear):  # type: ignore[misc]  # torch has no types here
        pass

    class Critic(torch.nn.Linear):  # type: ignore[misc]  # torch has no types here
        pass

    generator, critic = Generator(6, 6), Critic(6, 1)
    large = torch.optim.SGD(generator.parameters(), lr=0.1)
    small = torch.optim.Adam(critic.parameters(), lr=0.01)
    d_losses, g_losses, d_norms, g_norms = [], [], [], []
    with captured(tmp_path):
        for _ in range(6):
            real, noise = torch.randn(8, 6), torch.randn(8, 6)
            small.zero_grad()
            first = -critic(real).mean()
            first.backward()
            second = critic(generator(noise).detach()).mean()
            second.backward()
            squares = [p.grad.square().sum() for p in critic.parameters()]
            d_norms.append(float(sum(squares)) ** 0.5)
            d_losses.append(first.item() + second.item())
            small.step()
            large.zero_grad()
            loss = -critic(generator(noise)).mean()
            loss.backward()
            g_losses.append(loss.item())
            squares = [p.grad.square().sum() for p in generator.parameters()]
            g_norms.append(float(sum(squares)) ** 0.5)
            large.step()
    found = said(tmp_path)
    assert sharing(found) == [(2, 2)]
    steps = found.steps()
    assert sorted(steps) == list(range(6))
    for i in range(6):
        assert steps[i]["loss"] == pytest.approx(g_losses[i], rel=1e-5)
        assert steps[i]["loss.critic"] == pytest.approx(d_losses[i], rel=1e-5, abs=1e-7)
        assert steps[i]["lr.critic"] == pytest.approx(0.01)
        assert "micro_batches" not in steps[i]
    assert steps[0]["gradient_norm.critic"] == pytest.approx(d_norms[0], rel=1e-4)
    assert steps[0]["gradient_norm"] == pytest.approx(g_norms[0], rel=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_step_after_one_backward_share_its_loss(tmp_path: Path, first: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    losses = []
    with captured(tmp_path):
        for _ in range(3):
            loss = model(torch.randn(8, 6)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizers[first].step()
            optimizers[1 - first].step()
            model.zero_grad()
    found = said(tmp_path)
    steps = found.steps()
    assert [steps[i]["loss"] for i in range(3)] == pytest.approx(losses, rel=1e-5)
    assert sharing(found) == [(2, 1)]


def sharing(found: Said) -> list[tuple[int, int]]:
    """How many optimizers and losses there are, as often as it was told."""
    return [(one.optimizers, one.losses) for one in found.of(OptimizersSeen)]


def test_one_that_steps_half_as_often_shares_the_loss_of_the_other(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1))
    often, rarely = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    with captured(tmp_path):
        for step in range(4):
            model(torch.randn(8, 6)).square().mean().backward()
            if step % 2:
                rarely.step()
            often.step()
            model.zero_grad()
    assert sharing(said(tmp_path))[-1] == (2, 1)


def test_what_the_user_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(4, 6), torch.tensor([0, 1, 2, 1])
    with captured(tmp_path) as hooks:
        run = run_of(hooks)
        for step in range(3):
            scores = model(images)
            run.data(inputs={"x": images}, labels=labels, predictions=scores)
            run.loss("aux", scores.square().mean() * 0 + step)
            run.loss("aux", step)
            functional.cross_entropy(scores, labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            run.loss("aux", 7.0)
    found = said(tmp_path)
    steps = found.steps()
    assert [steps[i]["loss.aux"] for i in range(3)] == [0, 1, 2]
    assert found.steps("eval") == {2: {"loss.aux": 7.0}}
    (counts,) = [f for f in found.frames if f.collection == "labels"]
    assert counts.counts[:, 0].tolist() == [2, 4, 2]
    (channels,) = [f for f in found.frames if f.collection == "input_channels"]
    assert channels.rows == tuple(f"x.{i}" for i in range(6))
    assert channels.values[:, 0] == pytest.approx(images.mean(0).numpy(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("", 1.0, "a name of 1 to 200 characters"),
        ("aux", torch.zeros(2), r"one number, found a tensor of \(2,\)"),
        ("aux", "much", "is not a number"),
    ],
)
def test_what_is_no_loss_is_told(
    tmp_path: Path, name: str, value: SupportsFloat, says: str
) -> None:
    with captured(tmp_path) as hooks, pytest.raises(ConfigurationError, match=says):
        run_of(hooks).loss(name, value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nothing_is_waited_for_and_all_arrives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 4).cuda()
    other = torch.nn.Linear(64, 1).cuda()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    x, y = torch.randn(32, 64).cuda(), torch.randint(0, 4, (32,)).cuda()
    losses = []
    with captured(tmp_path) as hooks:
        run = run_of(hooks)
        for _ in range(30):
            second = other(x).square().mean()
            second.backward()
            optimizers[1].step()
            loss = functional.cross_entropy(model(x), y)
            run.loss("aux", 2 * loss)
            loss.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(loss.item())
    found = said(tmp_path)
    steps = found.steps()
    assert [steps[i]["loss.aux"] for i in range(29)] == pytest.approx([2 * v for v in losses[:29]])
    assert "loss.optimizer1" in steps[0]
    timed = [at for at, cells in steps.items() if "backward_device_s" in cells]
    assert timed == [10, 20]
    assert 0 < steps[10]["backward_device_s"] < 1
    labels = [f for f in found.frames if f.collection == "labels"]
    assert labels
    assert all(int(f.counts[:, 0].sum()) % 32 == 0 for f in labels)
    assert found.of(CaptureDegraded) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workers_that_are_forked_while_a_gpu_is_timed_live(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 64))
    with captured(tmp_path):
        for _ in range(4):
            # 10 steps each: step 10, which is timed, has just been made at the next fork.
            for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
                model(x.cuda()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(said(tmp_path).steps()) == 40


class Pole:
    """An environment, as far as capture looks at it."""


@pytest.mark.parametrize("loader", [False, True])
def test_whoever_acts_in_an_environment_and_reads_no_loader_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: bool
) -> None:
    library = ModuleType("gymnasium")
    vars(library)["Env"] = Pole
    monkeypatch.setitem(sys.modules, "gymnasium", library)
    pole = Pole()
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 6))
    with captured(tmp_path):
        for (batch,) in DataLoader(data, batch_size=4) if loader else [data[:4], data[4:]]:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(pole, Pole)
    started = [one for one in said(tmp_path).of(RunStarted) if one.role == "trainer"]
    assert [one.environment for one in started] == [not loader]
