"""Where one training ends and the next begins, on ranks that must see it at the same step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tocsin.emitter.model.optimizers import ALONE_PATIENCE, Optimizers


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make(
    optimizers: Optimizers, optimizer: torch.optim.Optimizer, steps: int, *, left: bool = False
) -> list[bool | None]:
    """Of each step whether it counts; None last, where it is the first of another training."""
    found: list[bool | None] = []
    for _ in range(steps):
        if optimizers.is_over(optimizer, left=left):
            return [*found, None]
        found.append(optimizers.counts(optimizer, optimizers.watched(optimizer)))
    return found


def one_after_another(*, freed: bool, same_place: bool = False) -> list[bool | None]:
    """What a rank makes of the steps of a second optimizer."""
    model = nn.Linear(3, 1)
    first = optimizer_of(model)
    optimizers = Optimizers(first, preferred=first)
    optimizers.is_one_of_ranks = True
    assert make(optimizers, first, 30) == [True] * 30
    kept = [] if freed else [first]
    second_model = nn.Linear(3, 1)
    if same_place:
        place = id(first)
        del first
        others = []  # until one is where the first has been
        for _ in range(10_000):
            second = optimizer_of(second_model)
            if id(second) == place:
                break
            others.append(second)
        else:
            pytest.skip("no optimizer came to be in the place of the first")
        others.clear()
    else:
        second = optimizer_of(second_model)
        del first
    found = make(optimizers, second, 10)
    del kept
    return found


@pytest.mark.parametrize("freed", [False, True])
def test_the_next_training_begins_after_as_many_steps_whatever_the_collector_did(
    *, freed: bool
) -> None:
    assert one_after_another(freed=freed) == [False] * ALONE_PATIENCE + [None]


def test_an_optimizer_in_the_place_of_the_first_is_another() -> None:
    assert one_after_another(freed=True, same_place=True) == [False] * ALONE_PATIENCE + [None]


@pytest.mark.parametrize("freed", [False, True])
def test_an_optimizer_over_the_same_parameters_follows_after_as_many_steps(*, freed: bool) -> None:
    model = nn.Linear(3, 1)
    first = optimizer_of(model)
    optimizers = Optimizers(first, preferred=first)
    optimizers.is_one_of_ranks = True
    make(optimizers, first, 30)
    kept = [] if freed else [first]
    del first
    found = make(optimizers, optimizer_of(model), 5)
    assert found == [False] * ALONE_PATIENCE + [True] * (5 - ALONE_PATIENCE)
    del kept


@pytest.mark.parametrize("steps", [1, 30])
def test_after_a_stop_the_next_training_begins_with_its_first_step(steps: int) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    first, second = optimizer_of(model), optimizer_of(model)
    optimizers = Optimizers(first, preferred=first)
    optimizers.is_one_of_ranks = True
    make(optimizers, first, steps)
    assert make(optimizers, first, 2, left=True) == [True, True], "the loop goes on all the same"
    assert None not in make(optimizers, second, 1, left=True), "it has parameters of this one"
    assert make(optimizers, optimizer_of(other), 1, left=True) == [None]
