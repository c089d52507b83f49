"""Steps at which nothing is due: the same loss, rates and counts as the long way tells."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from support.trainings.captured import Said, captured, said
from support.trainings.loops import (
    Loop,
    adversaries,
    checkpointed,
    in_backward,
    linear,
    loop,
    unseen,
)
from tocsin.emitter.capture.capture import Capture
from tocsin.emitter.hooks.fast_path import FastPath
from tocsin.emitter.hooks.training_hooks import Hooks
from tocsin.emitter.probes.gradients import GradientReader

pytestmark = pytest.mark.usefixtures("where")

NOTHING = (
    '{"pacing": "steps", "collections": {"gradients": "off", "weights": "off", '
    '"activations": "off", "optimizer_state": "off"}}'
)
Change = Callable[[int, torch.optim.Optimizer], object]


def hurry(hooks: Hooks) -> None:
    """Let as many steps be quick as may be."""
    assert hooks.capture is not None
    for share in hooks.capture.schedule.budget.shares.values():
        share.interval = 1000
    hooks.hook_probes.data.wakes = 10**9


def train(
    hooks: Hooks,
    steps: int = 40,
    change: Change | None = None,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Train; the losses."""
    model = linear()
    optimizer = make(model) if make else torch.optim.SGD(model.parameters(), lr=0.125)
    losses = []
    for step in range(steps):
        if change is not None:
            change(step, optimizer)
        loss = model(torch.ones(2, 4)).pow(2).mean() / (step + 1)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if step == 2:
            hurry(hooks)
    return losses


def assert_all_told(found: Said, losses: list[float]) -> None:
    steps = found.steps()
    assert sorted(steps) == list(range(len(losses)))
    assert [steps[i]["loss"] for i in steps] == pytest.approx(losses, rel=1e-6)
    assert all("step_time_s" in row for step, row in steps.items() if step)


def test_quick_steps_tell_loss_times_and_rates(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        losses = train(hooks)
        assert hooks.isolation.off == {}
    found = said(tmp_path)
    assert_all_told(found, losses)
    quick = [step for step, row in found.steps().items() if "gradient_norm" not in row]
    assert len(quick) > 30
    row = found.steps()[quick[5]]
    assert row["lr.0"] == 0.125
    assert row["step_time_s"] > row["backward_s"] > 0


def add_group(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 10:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})


def tensor_rate(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 10:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    elif step > 10:
        optimizer.param_groups[0]["lr"].mul_(0.5)


def load(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 10:
        next(iter(DataLoader(TensorDataset(torch.ones(4, 2)))))


def clip(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step >= 10:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


@pytest.mark.parametrize("change", [add_group, tensor_rate, load, clip])
def test_what_changes_in_the_middle_loses_no_step(tmp_path: Path, change: Change) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        losses = train(hooks, change=change)
        assert hooks.isolation.off == {}
    found = said(tmp_path)
    assert_all_told(found, losses)
    steps = found.steps()
    if change is tensor_rate:
        assert [steps[i]["lr.0"] for i in (9, 10, 11, 12)] == [0.125, 0.25, 0.125, 0.0625]
    elif change is add_group:
        assert steps[20]["lr.1"] == 0.5


def test_an_optimizer_without_a_rate_is_counted(tmp_path: Path) -> None:
    class Signs(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no types here
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, {})

        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= 0.01 * parameter.grad.sign()

    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        losses = train(hooks, make=lambda model: Signs(model.parameters()))
    assert_all_told(said(tmp_path), losses)


def test_a_loss_that_is_not_finite_goes_the_long_way(tmp_path: Path, where: str) -> None:
    def poison(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 20:
            optimizer.param_groups[0]["params"][0].data.fill_(float("nan"))

    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        train(hooks, steps=23, change=poison)
    found = said(tmp_path)
    seen = 20 if where == "on the host" else 22  # it came at step 21, which was quick
    assert [i for i, row in found.steps().items() if row["loss"] != row["loss"]] == [20, 21, 22]
    assert found.steps()[seen]["gradient_nonfinite"] == 2
    assert found.frame("gradients", seen).rows == ("bias", "weight")


def test_three_optimizers_after_one_backward_call_share_its_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(n, m) for n, m in ((4, 30), (30, 3), (3, 2))))
    several = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    with captured(tmp_path):
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in reversed(several):
                optimizer.step()
    steps = said(tmp_path).steps()
    assert [step for step in range(5) if "loss" in steps[step]] == list(range(5))


def test_an_error_in_reading_gradients_does_not_end_the_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = GradientReader.read

    def fail(*args: object, **kwargs: object) -> object:
        if args[2] == 2:
            raise RuntimeError("planted")
        return read(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(GradientReader, "read", fail)
    with captured(tmp_path) as hooks:
        losses = train(hooks, steps=12)
        assert list(hooks.isolation.off) == ["gradients"]
    assert_all_told(said(tmp_path), losses)


def test_a_model_that_is_gone_is_not_kept(tmp_path: Path) -> None:
    with captured(tmp_path) as hooks:
        gone = []
        for _ in range(3):
            model = linear()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(15):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            gone.append(weakref.ref(model.weight))
            del model, optimizer
            gc.collect()
        assert [ref() for ref in gone] == [None, None, None]
        assert hooks.capture is not None
        assert hooks.isolation.off == {}
    # The successor has the same names.
    names = {row for f in said(tmp_path).frames if f.collection == "weights" for row in f.rows}
    assert names == {"weight", "bias"}


def test_a_larger_optimizer_of_a_training_before_has_no_part_in_this_one(tmp_path: Path) -> None:
    for name, model in (("a", torch.nn.Linear(40, 30)), ("b", linear())):
        folder = tmp_path / name
        folder.mkdir()
        with captured(folder) as hooks:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                model(torch.ones(2, model.in_features)).sum().backward()
                optimizer.step()
            assert hooks.isolation.off == {}
        if name == "a":
            kept = optimizer  # alive, and the larger
    assert kept is not optimizer
    assert sorted(said(tmp_path / "b").steps()) == list(range(5))


def told(folder: Path, step: Loop, steps: int) -> dict[int, dict[str, float]]:
    """What is said of each step, without what depends on the clock.

    By step: what is sent of it may be one row or two, as the sender gets its turn.
    """
    folder.mkdir()
    with captured(folder, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(steps):
            step(number)
            if number == 4:
                hurry(hooks)
        assert hooks.isolation.off == {}
    return {
        number: {name: value for name, value in cells.items() if not name.endswith("_s")}
        for number, cells in said(folder).steps().items()
    }


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (loop, 20),
        (lambda: loop(clips=True), 20),
        (lambda: loop(batches=3), 20),
        (lambda: loop(clips=True, batches=2), 20),
        (lambda: loop(scales=True), 20),
        (lambda: loop(scales=True, clips=True), 20),
        (adversaries, 40),
        (in_backward, 160),
        (lambda: checkpointed([]), 20),
        (unseen, 20),
    ],
    ids=["plain", "clip", "accumulate", "both", "scaler", "scaler and clip", "two", "in backward",
         "checkpoints", "no loss"],
)  # fmt: skip
def test_quick_steps_say_bit_for_bit_what_the_long_way_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Loop], least: int
) -> None:
    quick = [0]
    after = FastPath.after

    def count(self: FastPath, optimizer: torch.optim.Optimizer) -> bool | None:
        made = after(self, optimizer)
        quick[0] += made is not None
        return made

    monkeypatch.setattr(FastPath, "after", count)
    torch.manual_seed(0)
    short = told(tmp_path / "quick", make(), 45)
    assert quick[0] >= least
    monkeypatch.setattr(FastPath, "before", lambda self, optimizer, given: False)
    torch.manual_seed(0)
    assert told(tmp_path / "long", make(), 45) == short


def test_of_many_optimizers_each_step_is_counted_and_few_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    stepped = Capture.stepped

    def count(self: Capture, optimizer: torch.optim.Optimizer, **how: bool) -> int | None:
        looked.append(self.training.next_step)
        return stepped(self, optimizer, **how)

    monkeypatch.setattr(Capture, "stepped", count)
    torch.manual_seed(0)
    quick = told(tmp_path / "quick", in_backward(layers=10), 45)  # of 20 tensors
    assert {looked.count(step) for step in (9, 20, 30)} == {0}
    assert looked.count(16) == looked.count(32) == 19
    monkeypatch.setattr(FastPath, "before", lambda self, optimizer, given: False)
    torch.manual_seed(0)
    each = told(tmp_path / "each", in_backward(layers=10), 45)
    own = ("loss", "lr.0")
    assert [[quick[step][name] for name in own] for step in range(45)] == [
        [each[step][name] for name in own] for step in range(45)
    ]
    assert quick[32] == each[32]


def test_a_pass_over_the_gradients_costs_what_all_optimizers_cost(tmp_path: Path) -> None:
    with captured(tmp_path) as hooks:
        step = in_backward()
        for number in range(3):
            step(number)
        assert hooks.capture is not None
        shares = hooks.capture.schedule.budget.shares
        assert len(shares["gradients"].costs) == 1


class Outer(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no types here
    """Has another optimizer make its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: None = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("fresh", [True, False], ids=["new", "known"])
def test_the_step_of_an_optimizer_inside_of_another_is_part_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    def nested() -> Loop:
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = None if fresh else Outer(inner)

        def step(number: int) -> None:
            model(torch.ones(2, 4)).pow(2).mean().backward()
            outer = number in (12, 20, 21)
            (inner if not outer else kept or Outer(inner)).step()
            inner.zero_grad()

        return step

    def of(way: str) -> list[tuple[int, dict[str, float]]]:
        # Which number a new one has depends on whether those before it are gone yet.
        return [
            (number, {re.sub(r"optimizer\d+", "optimizer", name): cells[name] for name in cells})
            for number, cells in told(tmp_path / way, nested(), 30).items()
        ]

    short = of("quick")
    # The three of the outer one are no steps of the main one.
    assert [number for number, cells in short if "lr.0" in cells] == list(range(27))
    monkeypatch.setattr(FastPath, "before", lambda self, optimizer, given: False)
    assert of("long") == short


def test_a_batch_that_is_thrown_away_between_quick_steps_is_no_part_of_the_next(
    tmp_path: Path,
) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(40):
            for scale in (100.0, 1.0) if number % 10 == 5 else (1.0,):
                optimizer.zero_grad(set_to_none=number % 20 == 5)
                loss = model(torch.full((2, 4), scale)).pow(2).mean()
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            if number == 2:
                hurry(hooks)
        assert hooks.isolation.off == {}
    found = said(tmp_path)
    assert_all_told(found, losses)
    assert "micro_batches" not in {name for cells in found.steps().values() for name in cells}


@pytest.mark.slow
def test_what_goes_on_around_the_steps_costs_no_step_its_quick_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks of the source, labels, a user's losses, and the choice of the intervals."""
    long: list[int] = []
    stepped = Capture.stepped

    def count(
        self: Capture, optimizer: torch.optim.Optimizer, *, backward: bool = True
    ) -> int | None:
        long.append(self.training.next_step)
        return stepped(self, optimizer, backward=backward)

    monkeypatch.setattr(Capture, "stepped", count)
    model, targets = linear(), torch.tensor([0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(320):
            loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), targets)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            hooks.hook_probes.named.add("own", float(number))
            optimizer.step()
            if number == 9:
                for share in _capture(hooks).schedule.budget.shares.values():
                    share.interval = 1000
        assert hooks.isolation.off == {}
    assert [step for step in long if step > 10] == []
    found = said(tmp_path)
    assert_all_told(found, losses)
    assert [cells["loss.own"] for cells in found.steps().values()] == list(range(320))
    assert {f.step for f in found.frames if f.collection == "labels"} >= {10, 20, 50, 100, 200, 300}


def _capture(hooks: Hooks) -> Capture:
    assert hooks.capture is not None
    return hooks.capture


def test_a_backward_call_inside_of_another_is_no_loss(tmp_path: Path) -> None:
    losses: list[float] = []
    step = checkpointed(losses)
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(40):
            step(number)
            if number == 2:
                hurry(hooks)
        assert hooks.most_backwards == 1
    found = said(tmp_path)
    assert_all_told(found, losses)
    assert not any("micro_batches" in cells for cells in found.steps().values())


@pytest.mark.parametrize("clear", ["none", "zero", "data"])
def test_micro_batches_that_are_thrown_away_are_no_part_of_the_step(
    tmp_path: Path, clear: str
) -> None:
    """Also where each step has several backward calls, so that gradients are looked at quickly."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(40):
            optimizer.zero_grad()
            if number % 10 == 5:
                for _ in range(3):
                    model(torch.full((2, 4), 100.0)).pow(2).mean().backward()
                if clear == "data":
                    for parameter in model.parameters():
                        parameter.grad.data.zero_()
                else:
                    optimizer.zero_grad(set_to_none=clear == "none")
            parts = [model(torch.full((2, 4), float(i))).pow(2).mean() for i in range(1, 4)]
            for part in parts:
                part.backward()
            losses.append(sum(part.item() for part in parts))
            optimizer.step()
            if number == 2:
                hurry(hooks)
        assert hooks.isolation.off == {}
    found = said(tmp_path)
    assert_all_told(found, losses)
    assert {cells["micro_batches"] for cells in found.steps().values()} == {3.0}
    assert [step for step, cells in found.steps().items() if "steps_skipped" in cells] == [
        5, 15, 25, 35,
    ]  # fmt: skip
