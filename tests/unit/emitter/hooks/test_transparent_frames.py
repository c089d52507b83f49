"""Our functions around torch's are in no warning, and in no traceback."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from support.trainings.captured import captured

ACTIVATIONS = '{"collections": {"activations": {"every": 1}}}'


class Broken(list[torch.Tensor]):
    def __getitem__(self, index: object) -> torch.Tensor:
        raise OSError("a file is broken")


def first_steps(model: nn.Module, *, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_squared() -> None:
    functional.mse_loss(torch.zeros(8, 1), torch.zeros(8))


def softmax_without_dim() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax())
    first_steps(model, steps=2)


@pytest.mark.parametrize("call", [mean_squared, softmax_without_dim])
def test_a_warning_names_the_line_of_the_program(tmp_path: Path, call: Callable[[], None]) -> None:
    places = []
    for watched in (False, True):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if watched:
                with captured(tmp_path, TOCSIN_CAPTURE=ACTIVATIONS):
                    first_steps(nn.Linear(4, 2))
                    call()
            else:
                call()
        places.append([(w.filename, w.lineno, str(w.message)) for w in found])
    without, ours = places
    assert without
    assert ours == without


def mismatch() -> None:
    functional.cross_entropy(torch.zeros(8, 2), torch.zeros(7, dtype=torch.long))


def mismatch_in_a_module() -> None:
    nn.CrossEntropyLoss()(torch.zeros(8, 2), torch.zeros(7, dtype=torch.long))


def mismatch_in_an_evaluation() -> None:
    with torch.no_grad():
        mismatch_in_a_module()


def second_backward() -> None:
    loss = (torch.ones(1, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


def broken_data() -> None:
    next(iter(DataLoader(Broken([torch.zeros(1)]), batch_size=None)))


@pytest.mark.parametrize(
    "call",
    [mismatch, mismatch_in_a_module, mismatch_in_an_evaluation, second_backward, broken_data],
)
def test_a_traceback_has_none_of_our_frames(tmp_path: Path, call: Callable[[], None]) -> None:
    with captured(tmp_path):
        first_steps(nn.Linear(4, 2))
        with pytest.raises((RuntimeError, ValueError, OSError)) as raised:
            call()
    names = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert len(names) > 2
    assert [name for name in names if "tocsin/emitter" in name] == []
