"""Where a loss that is not finite has it from, by what its graph has kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.trainings.captured import captured, said
from support.trainings.watched import records
from tocsin.emitter.plan.schedule import CaptureSchedule
from tocsin.emitter.probes.nonfinite_forward import BadValue, first_bad_value
from tocsin.stream_rules.testing import assert_fires, only

functional = nn.functional
NAN = float("nan")


class Model(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.body(x)))
        return out


def look(model: nn.Module, loss: torch.Tensor) -> BadValue | None:
    return first_bad_value(loss, {id(p): name for name, p in model.named_parameters()})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(16, 4), torch.arange(16) % 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_batch_with_a_nan_is_what_goes_into_the_first_layer() -> None:
    model, (x, y) = Model(), batch()
    x[3, 1] = NAN
    found = look(model, functional.cross_entropy(model(x), y))
    assert found is not None
    assert (found.collection, found.name, found.nans) == ("inputs", "input of body", 1)


def test_so_is_a_target() -> None:
    model, (x, _) = Model(), batch()
    target = torch.rand(16, 3)
    target[0, 0] = NAN
    found = look(model, functional.mse_loss(model(x), target))
    assert found is not None
    assert (found.collection, found.name) == ("inputs", "target of mse_loss after head")


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (lambda x: torch.log(x - 100), "log after body"),
        (lambda x: torch.exp(1000 * x), "exp after body"),
        (lambda x: x / (x - x), "div after body"),
    ],
)
def test_an_operation_is_named_with_the_module_before_it(
    inner: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    model, (x, y) = Model(inner), batch()
    found = look(model, functional.cross_entropy(model(x), y))
    assert found is not None
    assert (found.collection, found.name) == ("activations", name)


def test_a_weight_is_told_from_what_is_computed_with_it() -> None:
    model, (x, y) = Model(), batch()
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    found = look(model, functional.cross_entropy(model(x), y))
    assert found is not None
    assert (found.collection, found.name) == ("weights", "head.weight")
    convolution = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2))
    with torch.no_grad():
        convolution[1].bias[0] = NAN
    found = look(convolution, convolution(x[:, None]).relu().sum())
    assert found is not None
    assert (found.collection, found.name) == ("weights", "1.bias")


def test_what_is_well_or_not_to_be_read_says_nothing() -> None:
    model, (x, y) = Model(), batch()
    loss = functional.cross_entropy(model(x), y)
    assert look(model, loss) is None
    loss.backward()
    assert look(model, loss) is None
    assert look(model, torch.tensor(NAN)) is None


def test_infinities_of_a_mask_are_no_bad_input() -> None:
    model, (x, y) = Model(), batch()
    mask = torch.zeros(16, 3)
    mask[:, 0] = float("-inf")
    loss = functional.cross_entropy(model(x) + mask, y) * NAN
    found = look(model, loss)
    assert found is None or found.collection == "activations"


def test_the_graph_is_as_it_was() -> None:
    model, (x, y) = Model(), batch()
    loss = functional.cross_entropy(model(x), y)
    other = functional.cross_entropy(model(x), y)
    look(model, loss)
    state = torch.get_rng_state()
    loss.backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    other.backward()
    assert all(map(torch.equal, mine, [p.grad for p in model.parameters()]))
    assert torch.equal(state, torch.get_rng_state())


def test_what_a_hook_has_packed_is_not_read() -> None:
    model, (x, y) = Model(lambda x: torch.log(x - 100)), batch()
    unpacked = []

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        unpacked.append(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        scores = model.body(x)
    assert look(model, functional.cross_entropy(model.head(model.inner(scores)), y)) is None
    assert unpacked == []


def test_a_checkpointed_layer_is_not_run_again_for_us(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
    head = nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)
    counts = []
    with captured(tmp_path) as hooks:
        for step in range(8):
            x, y = batch()
            optimizer.zero_grad()
            scores = head(checkpoint(block, x, use_reentrant=False))
            before = int(block[1].num_batches_tracked)
            functional.cross_entropy(scores * (NAN if step > 4 else 1), y).backward()
            optimizer.step()
            counts.append(int(block[1].num_batches_tracked) - before)
        assert hooks.isolation.off == {}
    assert counts == [1] * 8  # PyTorch's own, of the backward pass


def test_the_issue_names_the_batch(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured(tmp_path):
        for step in range(12):
            x, y = batch()
            if step == 7:
                x[0, 0] = NAN
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert said(tmp_path).frame("inputs", 7).rows == ("input of body",)
    issue = assert_fires(records(tmp_path), "nonfinite", first_step=7, specs=only("nonfinite"))
    assert (issue.branch, issue.subject.name) == ("input", "input of body")


@pytest.mark.parametrize(("make", "first_step"), [(torch.optim.Adam, 6), (torch.optim.SGD, 7)])
def test_a_gradient_that_is_bad_while_the_loss_is_finite_is_of_the_step_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., torch.optim.Optimizer],
    first_step: int,
) -> None:
    # As on short steps, where hardly any gradient is read.
    monkeypatch.setattr(CaptureSchedule, "is_due", lambda self, name, step: False)
    with captured(tmp_path, TOCSIN_CAPTURE='{"collections": {"gradients": {"every": 1000}}}'):
        model = Model()
        optimizer = make(model.parameters(), lr=0.01)
        for step in range(9):
            out = model(torch.rand(16, 4))
            apart = out - out.detach() if step == 6 else out
            optimizer.zero_grad()
            (functional.relu(out).mean() + apart.square().sum(1).sqrt().mean()).backward()
            optimizer.step()
    issue = assert_fires(records(tmp_path), "nonfinite", first_step=first_step)
    assert issue.branch == "weight"
