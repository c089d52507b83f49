"""Which data loaders are told of, where a process makes many."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader, TensorDataset

from tocsin.emitter.probes.inputs.data_loader import MAX_LOADERS, DataLoaderProbe
from tocsin.schemas.records.runs import DataLoaderSeen


@dataclass
class Heard:
    """Takes the place of a training."""

    last_step: int = 0
    who: dict[str, object] = field(default_factory=lambda: {"run_id": "r1", "incarnation": "i1"})
    told: list[DataLoaderSeen] = field(default_factory=list)

    def emit(self, event: DataLoaderSeen) -> None:
        self.told.append(event)


def train(loaders: DataLoaderProbe, heard: Heard, samples: int) -> list[object]:
    """A batch of training, and a hundred evaluations, each with a loader of its own."""
    loader = DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=4)
    kept: list[object] = []
    for n in range(100):
        iterator = iter(loader)
        loaders.record_batch(iterator, evaluating=False)
        loaders.backward()
        data = TensorDataset(torch.zeros(1000 + n, 1))
        evaluation = iter(DataLoader(data, batch_size=8))
        kept += [iterator, data, evaluation]
        loaders.record_batch(evaluation, evaluating=True)
        loaders.close(heard)  # type: ignore[arg-type]
    return kept


def test_the_loader_of_each_training_is_told_once_however_many_evaluations_make() -> None:
    loaders = DataLoaderProbe()
    kept: list[object] = []
    for samples in (100, 200, 300):
        heard = Heard()
        kept += train(loaders, heard, samples)
        assert [one.samples for one in heard.told if one.mode == "train"] == [samples]
        assert sum(one.mode == "eval" for one in heard.told) == MAX_LOADERS
        loaders.reset()
