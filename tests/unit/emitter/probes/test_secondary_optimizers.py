"""Series beside the main one: other optimizers', named losses, and the loaders that feed them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tocsin.emitter.probes.inputs.data_loader import DataLoaderProbe, facts_of
from tocsin.emitter.probes.named_losses import NamedLosses
from tocsin.emitter.probes.probe import NEVER
from tocsin.emitter.probes.secondary_optimizers import SecondaryOptimizers
from tocsin.emitter.send.outbox import StepRow
from tocsin.emitter.training.training import Training
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.runs import DataLoaderSeen


class Discriminator(torch.nn.Linear):  # type: ignore[misc]  # torch has no types here
    """A net with a name."""


class Sink:
    """Stands for a training: keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.events: list[Data] = []
        self.last_step = 3
        self.who = {"run_id": "r", "incarnation": "0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11"}

    def step_row(self, row: StepRow, *, urgent: bool = False) -> None:
        self.rows.append(row)

    def emit(self, data: Data) -> None:
        self.events.append(data)


def test_steps_of_another_optimizer_are_told_with_the_primarys() -> None:
    critic = Discriminator(3, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)
    others = SecondaryOptimizers()
    assert others.drain(0) == []
    norms = []
    for losses in ([1.0, 2.0], [5.0]):
        optimizer.zero_grad()
        critic(torch.ones(2, 3)).sum().backward()
        norms.append(float(torch.cat([p.grad.reshape(-1) for p in critic.parameters()]).norm()))
        others.made_step(optimizer, list(losses), lambda: [torch.nn.ModuleList([critic]), critic])
    (row,) = others.drain(4)
    assert row.step == 4
    columns, values = row.row()
    assert columns == (
        "loss.discriminator",
        "gradient_norm.discriminator",
        "lr.discriminator",
    )
    assert values == pytest.approx((4.0, np.mean(norms), 0.5))
    assert others.drain(5) == []


def test_names_of_other_optimizers() -> None:
    others = SecondaryOptimizers()
    nets = [Discriminator(3, 1), Discriminator(3, 1), torch.nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
    for optimizer in optimizers:
        others.made_step(optimizer, [1.0], lambda: list(nets), norm=False)
    (row,) = others.drain(0)
    assert row.row()[0] == (
        "loss.discriminator", "lr.discriminator",
        "loss.optimizer2", "lr.optimizer2",
        "loss.optimizer3", "lr.optimizer3",
    )  # fmt: skip


def test_one_that_takes_the_place_of_one_that_is_gone_has_a_name_of_its_own() -> None:
    others = SecondaryOptimizers()
    made = [torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.5) for _ in range(6)]
    for optimizer in made[:3]:
        others.made_step(optimizer, [1.0], list, norm=False)
    # As where the ids of optimizers that are gone are given to new ones.
    for gone, new in ((0, 3), (1, 4), (0, 5)):
        entry = others._known.pop(id(made[gone if new < 5 else 3]))
        others._known[id(made[new])] = entry
        others.made_step(made[new], [1.0], list, norm=False)
    (row,) = others.drain(0)
    columns = row.row()[0]
    assert len(set(columns)) == len(columns) == 6


def test_one_that_shares_a_loss_says_none() -> None:
    net = Discriminator(3, 1)
    others = SecondaryOptimizers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    others.made_step(optimizer, [], lambda: [net])
    (row,) = others.drain(0)
    assert row.row()[0] == ("lr.discriminator",)


def test_named_losses_are_means_of_a_step() -> None:
    named, sink = NamedLosses(), Sink()
    assert named.wakes == NEVER
    for value in (1.0, torch.tensor(3.0, requires_grad=True)):
        named.add("aux", value)
    named.add("kl", 0.5)
    named.send(cast(Training, sink), 7, "train")
    named.add("kl", 1.5)
    named.send(cast(Training, sink), 8, "eval")
    assert [(r.step, r.columns, r.values, r.mode) for r in sink.rows] == [
        (7, ("loss.aux", "loss.kl"), (2.0, 0.5), "train"),
        (8, ("loss.kl",), (1.5,), "eval"),
    ]
    assert named.wakes == NEVER


class Stream(IterableDataset[int]):  # type: ignore[misc]  # torch has no types here
    """Numbers without end."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))

    def __len__(self) -> int:
        raise AssertionError("asking makes PyTorch warn later")


def test_loaders_are_told_once_and_by_what_they_feed() -> None:
    loaders, sink = DataLoaderProbe(), Sink()
    training = cast(Training, sink)
    train = DataLoader(TensorDataset(torch.zeros(20, 2)), batch_size=4)
    test = DataLoader(Stream(), batch_size=None)
    for _ in range(2):
        iterator = iter(train)
        for _ in iterator:
            loaders.record_batch(iterator, evaluating=False)
            loaders.backward()
            if loaders.wakes == 0:
                loaders.stepped(training, 0)
        iterator = iter(test)
        next(iterator)
        loaders.record_batch(iterator, evaluating=True)
        loaders.close(training)
    first, second = sink.events
    assert isinstance(first, DataLoaderSeen)
    assert isinstance(second, DataLoaderSeen)
    assert (first.mode, first.dataset, first.samples) == ("train", "TensorDataset", 20)
    assert (first.workers, first.batch_size, first.prefetch_factor) == (0, 4, None)
    assert first.cores is not None
    assert first.cores >= 1
    assert (second.mode, second.iterable, second.samples, second.batch_size) == (
        "eval",
        True,
        None,
        None,
    )
    loaders.reset()
    iterator = iter(train)
    loaders.record_batch(iterator, evaluating=False)
    loaders.close(training)
    assert len(sink.events) == 2
    loaders.backward()
    loaders.close(training)
    assert len(sink.events) == 3


class Unknown(TensorDataset):  # type: ignore[misc]  # torch has no types here
    """Does not know how long it is."""

    def __len__(self) -> int:
        raise TypeError("no length")


def test_a_length_that_cannot_be_told_is_none() -> None:
    class Batches:
        _dataset = Unknown(torch.zeros(20, 2))

    assert facts_of(Batches()).samples is None


def test_facts_of_a_loader_with_workers() -> None:
    class Batches:
        _dataset = TensorDataset(torch.zeros(20, 2))
        _num_workers = 3
        _prefetch_factor = 2
        _persistent_workers = True
        _pin_memory = True

    facts = facts_of(Batches())
    assert (facts.workers, facts.prefetch_factor, facts.persistent_workers) == (3, 2, True)
    assert (facts.pin_memory, facts.batch_size, facts.samples) == (True, None, 20)
