"""Silent faults at their source: what small trainings with one say, and those without do not."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from support.trainings.captured import Said, captured, said
from tocsin.emitter.hooks import torch_patches
from tocsin.emitter.hooks.torch_patches import hooks
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.program_checks.loss_inputs import made_by
from tocsin.schemas.records.program_facts import LayerInputsSeen, LossInputsSeen, ModeSeen

STEPS = 14
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )


def batch(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(n)
    x = torch.randn(n, 8, generator=chance)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    clear: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.zero_grad(),
    forward: Forward = lambda net, x: net(x),
    after: Callable[[int], None] = lambda step: None,
) -> None:
    x, y = batch()
    for step in range(steps):
        clear(optimizer)
        functional.cross_entropy(forward(net, x), y).backward()
        optimizer.step()
        after(step)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), 1e-3)


def column(found: Said, name: str) -> list[tuple[int, float]]:
    return [(step, cells[name]) for step, _, cells in found.rows if name in cells]


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[], object]], Said]]:
    def watch(training: Callable[[], object]) -> Said:
        torch.manual_seed(0)
        with captured(tmp_path) as hooks:
            training()
            assert hooks.isolation.off == {}
        gc.collect()
        return said(tmp_path)

    # Another test of this process may have imported the compiler before the hooks are there, or
    # compiled a model: from then on calls are left alone.
    torch_patches.install()
    monkeypatch.setattr(activations.patches, "for_good", False)
    monkeypatch.setattr(slots, "compiling", False)
    if "__call__" in nn.Linear.__dict__:
        monkeypatch.delattr(nn.Linear, "__call__")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is only slowed down by a second one
    yield watch
    torch.set_num_threads(threads)


Watch = Callable[[Callable[[], object]], Said]


# -- gradients ------------------------------------------------------------------------------


def test_a_healthy_training_says_that_all_is_well(watched: Watch) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), clear=lambda optimizer: optimizer.zero_grad(set_to_none=False))

    found = watched(training)
    assert column(found, "gradients_uncleared") == [(1, 0.0)]
    assert column(found, "without_gradient") == [(4, 0.0)]
    assert [f for f in found.frames if f.collection in ("no_gradient", "not_optimized")] == []
    assert [(m.doing, m.layers_in, m.kind) for m in found.of(ModeSeen)] == [
        ("training", "train", "Dropout")
    ]
    first = found.of(LayerInputsSeen)[0]
    assert (first.layer, first.kind, first.whole_numbers) == ("0", "Linear", False)
    assert first.std == pytest.approx(1.0, abs=0.2)
    (loss, *_) = found.of(LossInputsSeen)
    assert (loss.function, loss.made_by, loss.step, loss.classes) == (
        "cross_entropy",
        "addmm",
        1,
        3,
    )


def test_gradients_that_are_not_cleared(watched: Watch) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), clear=lambda optimizer: None)

    streaks = column(watched(training), "gradients_uncleared")
    assert streaks[:2] == [(2, 2.0), (4, 4.0)]


def test_accumulation_and_optimizers_that_take_turns_are_cleared(watched: Watch) -> None:
    def accumulate() -> None:
        net, (x, y) = model(), batch()
        optimizer = adam(net)
        for i in range(4 * STEPS):
            (functional.cross_entropy(net(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    assert column(watched(accumulate), "gradients_uncleared") == [(1, 0.0)]


def accumulate_in_vain(
    *,
    micro: Callable[[int], int] = lambda step: 4,
    steps: int = 50,
    a_loader: bool = False,
    between: Callable[[nn.Module], None] = lambda net: None,
    before_step: Callable[[nn.Module], None] = lambda net: None,
) -> Callable[[], None]:
    """A loop that clears the gradients in front of each of its backward calls. `a_loader`: for
    each step.
    """

    def training() -> None:
        net, data = nn.Linear(8, 3), TensorDataset(*batch(1024))
        optimizer = adam(net)
        batches = iter(DataLoader(data, 4))
        for step in range(steps):
            if a_loader:
                batches = iter(DataLoader(data, 4))
            for _ in range(micro(step)):
                x, y = next(batches)
                optimizer.zero_grad()
                functional.cross_entropy(net(x), y).backward()
                between(net)
            before_step(net)
            optimizer.step()

    return training


def write_weights(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1e-3)


def put_gradients(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = parameter.grad.clone()


def test_gradients_of_micro_batches_that_no_step_uses(watched: Watch) -> None:
    found = watched(accumulate_in_vain())
    assert column(found, "gradients_discarded") == [(21, 3.0), (41, 3.0)]
    assert column(found, "steps_discarding") == [(21, 20.0), (41, 40.0)]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(accumulate_in_vain(between=write_weights), id="steps by hand, or tried"),
        pytest.param(accumulate_in_vain(before_step=put_gradients), id="of copies"),
        pytest.param(accumulate_in_vain(micro=lambda step: 3 + step % 3), id="some are skipped"),
        pytest.param(accumulate_in_vain(a_loader=True), id="a loader of the parts of a batch"),
    ],
)
def test_gradients_that_are_cleared_on_purpose(
    watched: Watch, training: Callable[[], object]
) -> None:
    assert column(watched(training), "gradients_discarded") == []


def test_several_backward_calls_for_one_batch_are_no_micro_batches(watched: Watch) -> None:
    def attack() -> None:
        net = nn.Linear(8, 3)
        optimizer = adam(net)
        for x, y in DataLoader(TensorDataset(*batch(200)), 4):
            attacked = x.clone().requires_grad_()
            for _ in range(4):
                optimizer.zero_grad()
                functional.cross_entropy(net(attacked), y).backward()
                attacked = (x + 0.1 * attacked.grad.sign()).detach().requires_grad_()
            optimizer.step()

    found = watched(attack)
    assert len(column(found, "steps_skipped")) > 40
    assert column(found, "gradients_discarded") == []


def test_micro_batches_that_are_used_again(watched: Watch) -> None:
    training = accumulate_in_vain(micro=lambda step: 4 if step < 30 else 1, steps=100)
    found = column(watched(training), "gradients_discarded")
    assert [value for _, value in found] == [3.0, 0.0]


def test_a_gan_is_cleared_and_each_optimizer_has_its_gradients(watched: Watch) -> None:
    def gan() -> None:
        generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1))
        one, other = adam(generator), adam(critic)
        x, _ = batch()
        loss = nn.BCEWithLogitsLoss()
        for _ in range(STEPS):
            fake = generator(torch.randn(32, 4))
            other.zero_grad()
            (loss(critic(x), torch.ones(32, 1)) + loss(critic(fake.detach()), torch.zeros(32, 1))
             ).backward()  # fmt: skip
            other.step()
            one.zero_grad()
            loss(critic(fake), torch.ones(32, 1)).backward()
            one.step()

    found = watched(gan)
    assert {value for _, value in column(found, "gradients_uncleared")} == {0.0}
    assert {value for _, value in column(found, "without_gradient")} == {0.0}
    assert [f for f in found.frames if f.collection == "not_optimized"] == []


def test_a_cut_graph_names_what_is_called_without_a_gradient(watched: Watch) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), forward=lambda net, x: net[4:](net[:4](x).detach()))

    found = watched(training)
    frame = found.frame("no_gradient", 4)
    assert frame.rows == ("0.weight", "0.bias", "1.weight", "1.bias")
    called, seen = frame.count("called"), frame.count("watched")
    assert called is not None
    assert seen is not None
    assert called.tolist() == seen.tolist()
    assert called.min() >= 2


class Masked(nn.Module):  # type: ignore[misc]  # torch has no types here
    """The first parameters of the model and of a layer are of no use to this loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(8))
        self.scale = Scale()
        self.rest = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.rest(self.scale(x))
        return scores


class Scale(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_parameter_that_its_module_does_not_use_is_not_cut_off(watched: Watch) -> None:
    def training() -> None:
        net = Masked()
        train(net, adam(net))

    frame = watched(training).frame("no_gradient", 4)
    assert frame.rows == ("mask", "scale.shift")
    called, seen = frame.count("called"), frame.count("watched")
    assert called is not None
    assert seen is not None
    assert called.tolist() == [0, 0]
    assert (seen[0], seen[1] > 1) == (0, True)


def test_an_optimizer_of_parameters_that_were_replaced(watched: Watch) -> None:
    def training() -> None:
        net = model()
        optimizer = adam(net)
        net[4] = nn.Linear(16, 3)
        train(net, optimizer)

    found = watched(training)
    for step in (3, 6):
        frame = found.frame("not_optimized", step)
        assert frame.rows == ("4.weight", "4.bias")
        last, orphans = frame.count("last"), frame.count("orphans")
        assert last is not None
        assert orphans is not None
        assert (last.tolist(), orphans.tolist()) == ([1, 1], [2, 2])


def test_gradients_of_a_training_before_are_not_this_ones(watched: Watch) -> None:
    before = model()
    train(before, adam(before), steps=2)

    def training() -> None:
        net = model()
        train(net, adam(net))

    assert [f for f in watched(training).frames if f.collection == "not_optimized"] == []
    assert before[0].weight.grad is not None


def test_an_optimizer_that_is_made_anew_at_each_step(watched: Watch) -> None:
    def training() -> None:
        net, (x, y) = model(), batch()
        for _ in range(STEPS):
            optimizer = adam(net)
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()

    assert column(watched(training), "optimizer_renewed")[0] == (3, 3.0)


class Experts(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Some of them are used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(16)])
        self.head = nn.Linear(8, 3)
        self.chance = random.Random(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.chance.sample(range(16), 10):
            x = x + 0.1 * torch.tanh(self.experts[i](x))
        scores: torch.Tensor = self.head(x)
        return scores


def test_experts_that_take_turns_are_not_looked_at_for_ever(watched: Watch) -> None:
    looked, armed, inputs = [], [], []

    def training() -> None:
        net, checks = Experts(), hooks.hook_probes.checks

        def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
            step = checks._step + 1
            scores: torch.Tensor = net(x)
            looked.extend([step] * (checks._missing.next <= step))
            armed.extend([step] * checks._calls.due)
            inputs.extend([step] * (checks._calls.first is not None))
            return scores

        train(net, torch.optim.SGD(net.parameters(), 1e-3), steps=320, forward=forward)

    watched(training)
    late = [step for step in looked if step >= 200]
    assert 1 <= len(late) <= 4
    assert [step for step in armed if step >= 200] == late
    assert len(inputs) == 3


# -- losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: x.softmax(1), "softmax"),
        (lambda x: torch.sigmoid(x)[:, :2].reshape(-1).unsqueeze(0), "sigmoid"),
        (lambda x: functional.log_softmax(x, 1).transpose(0, 1), "log_softmax"),
        (lambda x: functional.relu(x), "relu"),
        (lambda x: x * 2, "mul"),
        (lambda x: x.detach(), ""),
    ],
)
def test_what_made_the_scores(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    assert made_by(change(nn.Linear(8, 3)(batch()[0]))) == name


def test_a_softmax_in_front_of_a_cross_entropy(watched: Watch) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), forward=lambda net, x: net(x).softmax(1))

    looks = watched(training).of(LossInputsSeen)
    assert [look.step for look in looks] == [1, 2, 3, 4, 5, 8, 12]
    assert all(look.made_by == "softmax" for look in looks)
    assert all(abs((look.row_sum_max or 0.0) - 1) < 1e-5 for look in looks)


def test_shapes_that_do_not_fit_and_targets_out_of_reach(watched: Watch) -> None:
    def training() -> None:
        net, (x, _) = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid()), batch()
        optimizer = adam(net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                optimizer.zero_grad()
                functional.mse_loss(net(x), 2 * x[:, 0]).backward()
                optimizer.step()

    (look, *_) = watched(training).of(LossInputsSeen)
    assert (look.function, look.made_by, look.broadcast) == ("mse_loss", "sigmoid", True)
    assert (look.unreachable or 0.0) > 0.3


# -- modes ----------------------------------------------------------------------------------


def evaluation(net: nn.Module, *, modes: bool) -> Callable[[int], None]:
    x, y = batch(64)

    def after(step: int) -> None:
        if step % 4 == 3:
            if modes:
                net.eval()
            with torch.no_grad():
                functional.cross_entropy(net(x), y)
            if modes:
                net.train()

    return after


@pytest.mark.parametrize("modes", [True, False])
def test_the_mode_of_an_evaluation(watched: Watch, modes: bool) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), after=evaluation(net, modes=modes))

    seen = [(m.doing, m.layers_in) for m in watched(training).of(ModeSeen)]
    assert seen == [("training", "train"), ("evaluation", "eval" if modes else "train")]


def test_a_metric_of_each_step_is_no_evaluation(watched: Watch) -> None:
    def training() -> None:
        net, (x, y) = model(), batch()
        optimizer = adam(net)
        for _ in range(2 * STEPS):
            optimizer.zero_grad()
            scores = net(x)
            functional.cross_entropy(scores, y).backward()
            optimizer.step()
            with torch.no_grad():
                functional.cross_entropy(scores.detach(), y)

    assert [m.doing for m in watched(training).of(ModeSeen)] == ["training"]


def test_an_evaluation_without_a_loss_is_known_by_its_data_loader(watched: Watch) -> None:
    def training() -> None:
        net, (x, y) = model(), batch(64)
        optimizer = adam(net)
        schedule = lr_scheduler.StepLR(optimizer, 1)
        learnt = DataLoader(TensorDataset(x, y), 16)
        held_out = DataLoader(TensorDataset(*batch(48)), 16)
        for _ in range(7):
            for one, other in learnt:
                optimizer.zero_grad()
                functional.cross_entropy(net(one), other).backward()
                optimizer.step()
            with torch.no_grad():
                for one, _ in held_out:
                    net(one).argmax(1)
        assert schedule.last_epoch == 0

    found = watched(training)
    assert ("evaluation", "train") in [(m.doing, m.layers_in) for m in found.of(ModeSeen)]
    assert column(found, "schedule_steps")[-1][1] == 0.0
    assert max(value for _, value in column(found, "epochs")) >= 5


def test_a_momentum_encoder_is_no_evaluation(watched: Watch) -> None:
    def training() -> None:
        both, (x, y) = nn.ModuleList([model(), model()]), batch()
        (net, slow), optimizer = both, adam(both)
        for _ in range(2 * STEPS):
            optimizer.zero_grad()
            with torch.no_grad():
                goal = slow(x)
            scores = net(x)
            functional.mse_loss(scores, goal).backward()
            optimizer.step()
            with torch.no_grad():
                functional.cross_entropy(scores, y)  # a metric

    assert [m.doing for m in watched(training).of(ModeSeen)] == ["training"]


def test_a_training_that_stays_in_eval(watched: Watch) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), after=lambda step: net.eval() if step == 6 else None)

    seen = [(m.doing, m.layers_in, m.step) for m in watched(training).of(ModeSeen)]
    assert seen == [("training", "train", 1), ("training", "eval", 7)]


def test_nothing_of_ours_is_left_in_torch(watched: Watch) -> None:
    def training() -> None:
        net = model()
        train(net, adam(net), after=evaluation(net, modes=False))

    watched(training)
    for kind in (nn.Linear, nn.BatchNorm1d, nn.Dropout):
        assert "__call__" not in kind.__dict__


def test_a_schedule_that_is_stepped_is_counted(watched: Watch) -> None:
    def training() -> None:
        net = model()
        optimizer = adam(net)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(net, optimizer, steps=25, after=lambda step: schedule.step())

    assert column(watched(training), "schedule_steps")[0] == (20, 20.0)


# -- graphs that are kept -----------------------------------------------------------------------


def keeping(how: str, steps: int = 160) -> None:
    net = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    x, y = batch(8)
    kept: list[torch.Tensor] = []
    total = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        out = net(x)
        loss = functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        if how == "losses":
            kept.append(loss)
        elif how == "outputs":
            kept.append(out)
        elif how == "sum":
            total = total + loss
        elif how == "numbers":
            kept.append(loss.detach())


@pytest.mark.parametrize("how", ["losses", "outputs", "sum"])
def test_graphs_that_are_kept_are_counted(
    watched: Callable[[Callable[[], object]], Said], how: str
) -> None:
    found = column(watched(lambda: keeping(how)), "graphs_kept")
    assert found[0] == (50, 4.0)
    assert found[-1] == (150, 14.0)


def test_graphs_that_go_with_their_step_are_no_news(
    watched: Callable[[Callable[[], object]], Said],
) -> None:
    assert column(watched(lambda: keeping("numbers")), "graphs_kept") == []
