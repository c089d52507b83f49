"""One training, without capture and with it: the same bit for bit, and what was captured."""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from support.trainings.captured import Said, captured, said
from support.trainings.watched import records
from tocsin.emitter.hooks import torch_patches
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import CaptureDegraded
from tocsin.stream_rules.testing import issues_of

EVERY_STEP = json.dumps({"collections": {"gradients": {"every": 1}, "weights": {"every": 5}}})


@dataclass
class Trained:
    """What a training leaves behind: the losses that it saw itself, and its weights."""

    losses: list[float]
    weights: list[torch.Tensor]

    @classmethod
    def of(cls, losses: list[float], *models: nn.Module) -> Trained:
        """Of these models; weights are copied."""
        kept = [p.detach().clone() for model in models for p in model.parameters()]
        return cls(losses, kept)


@dataclass
class Row:
    """What was captured of a training."""

    trained: Trained
    said: Said
    issues: list[IssueFiring]

    @property
    def train(self) -> dict[int, dict[str, float]]:
        """The scalars of its steps."""
        return self.said.steps()

    def series(self, column: str) -> list[float]:
        """One column over all steps that have it, in order."""
        return [cells[column] for _, cells in sorted(self.train.items()) if column in cells]

    def found(self, *rules: str) -> list[str]:
        """What the rules say, but those on speed and on what the rules themselves lack."""
        return [f"{i.rule}: {i.reason}" for i in self.issues if not rules or i.rule in rules]


def same(one: Trained, other: Trained) -> None:
    """Assert that two trainings went the same way, bit for bit."""
    assert one.losses == other.losses
    assert len(one.weights) == len(other.weights)
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        assert torch.equal(mine, theirs)


def watch(
    folder: Path,
    train: Callable[[], Trained],
    *,
    degraded: Iterable[str] = (),
    capture: str = EVERY_STEP,
) -> Row:
    """Train without capture and with it. `degraded` are the probes that may switch themselves off.

    The random stream is the same before both, and must be so behind them.
    """
    torch.manual_seed(0)
    torch_patches.hooks.asleep = True
    plain = train()
    gc.freeze()  # an optimizer of before that is alive still may be taken for the main one
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with captured(folder, TOCSIN_CAPTURE=capture):
        watched = train()
    assert torch.equal(after, torch.get_rng_state())
    same(plain, watched)
    found = said(folder)
    assert {each.probe for each in found.of(CaptureDegraded)} <= set(degraded)
    return Row(watched, found, issues_of(records(folder)))


def needed(name: str) -> ModuleType:
    """A package that a test needs: the test is skipped without it, but not in CI."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"{name} must be there in CI: {error}")
        pytest.skip(f"{name} is not installed: {error}")
