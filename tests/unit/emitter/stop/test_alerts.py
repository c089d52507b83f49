"""Whatever is odd has the ranks get ready for a stop, by whichever way its row goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tocsin.emitter.capture.hook_probes import HookProbes
from tocsin.emitter.model.cleared_gradients import Cleared
from tocsin.emitter.model.optimizers import Optimizers
from tocsin.emitter.plan.settings import CaptureSettings
from tocsin.emitter.probes.evaluation_losses import At, EvaluationLosses
from tocsin.emitter.probes.loss_scaler import REPORT_EVERY, LossScaler
from tocsin.emitter.probes.losses import LossBuffer
from tocsin.emitter.probes.named_losses import NamedLosses
from tocsin.emitter.probes.skipped_steps import SkippedSteps
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.stop import exit_points
from tocsin.emitter.training.training import Training


def skipped(training: Training) -> None:
    SkippedSteps(training).skipped([math.nan], by_loop=True)


def scaler(training: Training) -> None:
    found = LossScaler(training, LossBuffer())
    for _ in range(REPORT_EVERY):
        found.updated(object(), made_step=False)


def other_optimizer(training: Training) -> None:
    model = torch.nn.Linear(2, 1)
    hook_probes = HookProbes(Isolation(), Cleared())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook_probes.others.made_step(optimizer, [math.nan], lambda: [model], norm=False)
    training.step_at_us = 0
    hook_probes.probes.stepped(training, 3)


def named_loss(training: Training) -> None:
    named = NamedLosses()
    named.add("aux", math.inf)
    named.send(training, 3, "train")


def evaluation(training: Training) -> None:
    losses = EvaluationLosses()
    losses.start(training, object.__new__(Optimizers))
    losses._send(At(3, "eval", due=False), math.nan)


@pytest.mark.parametrize("send", [skipped, scaler, other_optimizer, named_loss, evaluation])
def test_an_odd_row_alerts(
    send: Callable[[Training], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts: list[bool] = []
    sent: list[bool] = []
    monkeypatch.setattr(exit_points, "alert", lambda: alerts.append(True))
    training = object.__new__(Training)
    row = SimpleNamespace(row=lambda row, *, urgent: sent.append(urgent))
    training.sender = row  # type: ignore[misc,assignment]  # it must not send
    training.settings = CaptureSettings()  # type: ignore[misc]  # as above
    training.next_step = 3
    send(training)
    assert sent == [True]
    assert alerts == [True]
