"""Calls of modules that are observed, where the observer itself breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tocsin.emitter.probes.activations.call_patches import ModuleCallObserver
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.training.context import current


class Breaks(ModuleCallObserver):
    """An observer that neither observes nor stops."""

    def on_call(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        raise MemoryError("in on_call")

    def stop(self) -> None:
        raise MemoryError("in stop")


def test_an_observer_that_cannot_even_stop_reaches_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isolation = Isolation()
    monkeypatch.setattr(current, "isolation", isolation)
    observer = Breaks()
    for _ in range(2):
        observer.called(nn.Linear(2, 1), (torch.ones(1, 2),), torch.ones(1, 1))
    assert set(isolation.off) == {observer.probe, "clean-up"}
