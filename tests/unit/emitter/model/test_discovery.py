"""Modules and optimizers are found whatever else is in the heap."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from tocsin.emitter.model import discovery


class Comparing(type):
    """Its classes have no hash, and are compared by code of their own."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")


class Thing(metaclass=Comparing):
    def __init__(self) -> None:
        self.held = [1]


class Layer(nn.Linear, metaclass=Comparing):  # type: ignore[misc]  # torch has no types here
    pass


class Steps(torch.optim.SGD, metaclass=Comparing):  # type: ignore[misc]  # nor here
    pass


def test_classes_that_cannot_be_hashed_or_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    thing, layer = Thing(), Layer(2, 1)
    optimizer = Steps(layer.parameters(), lr=0.1)
    found = discovery.find()
    assert any(module is layer for module in found.modules)
    assert any(each is optimizer for each in found.optimizers)
    monkeypatch.setattr(sys.modules["__main__"], "thing", thing, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "layer", layer, raising=False)
    assert any(module is layer for module in discovery.in_sight())


class Env:
    """As Gymnasium's."""


class Pole(Env):
    """An environment."""


@pytest.mark.parametrize("made", [False, True])
def test_an_environment_is_found_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    library = ModuleType("gymnasium")
    vars(library)["Env"] = Env
    monkeypatch.setitem(sys.modules, "gymnasium", library)
    held = [Pole()] if made else []
    assert discovery.find().environment is made
    assert len(held) == made


def test_a_library_that_is_something_else_has_no_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setitem(sys.modules, "dm_env", ModuleType("dm_env"))
    monkeypatch.setitem(sys.modules, "gym", object())
    assert not discovery.find().environment
