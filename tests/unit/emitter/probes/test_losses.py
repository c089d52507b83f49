"""The loss of a backward call, from one tensor or several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.trainings.captured import captured, said
from tocsin.emitter.probes import losses
from tocsin.emitter.probes.losses import MAX_TOGETHER, first_bad, loss_of

ONE, TWO = torch.tensor(1.5), torch.tensor([2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("tensors", "loss"),
    [
        (ONE, 1.5),
        ([ONE], 1.5),
        ([ONE, TWO], 3.5),
        ((ONE, TWO, ONE), 5.0),
        ([ONE, torch.ones(2)], None),
        ([], None),
        ([ONE, None], None),
        ([ONE] * (MAX_TOGETHER + 1), None),
    ],
)
def test_several_losses_count_by_their_sum(tensors: object, loss: float | None) -> None:
    assert loss_of(tensors, None) == loss


def test_those_on_a_device_are_added_up_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if float64 were on the host, and all else on a GPU: nothing there may be read.
    monkeypatch.setattr(losses, "is_here", lambda tensor: tensor.dtype == torch.float64)
    for tensors in ([ONE, ONE], [ONE, TWO], [TWO, ONE]):
        total = loss_of([one.clone().requires_grad_() for one in tensors], None)
        assert isinstance(total, torch.Tensor)
        assert (total.shape, total.dtype, total.requires_grad) == ((1,), torch.float32, False)
        assert float(total) == sum(float(one) for one in tensors)


def test_a_part_of_a_scaled_loss_counts_by_the_loss_before_it_was_scaled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses_before = []
    with captured(tmp_path):
        for _ in range(200):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).pow(2).mean()
            losses_before.append(loss.item())
            (scaler.scale(loss) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
    steps = said(tmp_path).steps()
    found = [steps[i]["loss"] for i in sorted(steps)]
    assert found == pytest.approx([losses_before[i] for i in sorted(steps)], rel=1e-5)


def test_the_first_bad_one_of_several_is_found() -> None:
    bad = torch.tensor(float("nan"))
    assert first_bad([ONE, bad, TWO]) is bad
    assert first_bad(bad) is bad


@pytest.mark.parametrize("scaled", ["not", "together", "each", "weighted"])
def test_one_backward_call_of_several_losses_is_one_loss(tmp_path: Path, scaled: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled != "not")
    sums = []
    with captured(tmp_path):
        for _ in range(30):
            optimizer.zero_grad()
            out = model(torch.ones(4, 3)).pow(2)
            parts = [out[:, 0].mean(), out[:, 1].mean()]
            sums.append(sum(part.item() for part in parts))
            together = scaler.scale(parts) if scaled != "each" else [*map(scaler.scale, parts)]
            weights = [torch.tensor(0.5)] * 2 if scaled == "weighted" else None
            torch.autograd.backward(together, weights)
            scaler.step(optimizer)
            scaler.update()
    steps = said(tmp_path).steps()
    assert steps.keys() == set(range(30))
    if scaled in ("each", "weighted"):
        # Which of them was scaled from what is not known; never is a scaled number a loss. With
        # weights, the sum is not what is differentiated.
        assert not any("loss" in values for values in steps.values())
        return
    assert [steps[i]["loss"] for i in range(30)] == pytest.approx(sums, rel=1e-5)
    assert not any("micro_batches" in values for values in steps.values())
