"""Paced by steps, the same training is looked at in the same places on any machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from support.trainings.captured import captured, said
from tocsin.emitter.plan.settings import capture_settings

REAL = time.thread_time


def places(folder: Path) -> set[tuple[str, int, str]]:
    """What a small training has sent: collection, step and mode."""
    folder.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(6, 4), torch.randint(0, 3, (6,))
    with captured(folder, TOCSIN_CAPTURE='{"pacing": "steps"}') as hooks:
        for step in range(60):
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 25 == 24:
                model.eval()
                with torch.no_grad():
                    for _ in range(3):
                        functional.cross_entropy(model(inputs), targets)
                model.train()
        assert hooks.isolation.off == {}
    return {(frame.collection, frame.step, frame.mode) for frame in said(folder).frames}


@pytest.mark.slow
def test_a_clock_that_leaps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = places(tmp_path / "usual")
    leaps = iter(range(10**9))
    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: REAL() + 0.05 * next(leaps))
    assert places(tmp_path / "busy") == usual
    assert {("gradients", 50, "train"), ("labels", 50, "train"), ("labels", 49, "eval")} <= usual


def test_what_it_may_be() -> None:
    assert capture_settings("").pacing == "time"
    assert capture_settings('{"pacing": "steps"}').pacing == "steps"
    with pytest.raises(ValueError, match="unknown pacing 'clock'"):
        capture_settings('{"pacing": "clock"}')
