"""Whether blocks of gradients are read: where some of them are on the CPU."""

from __future__ import annotations

import pytest
import torch

from tocsin.emitter.model.optimizers import Optimizers
from tocsin.emitter.plan.schedule import NORMS, CaptureSchedule
from tocsin.emitter.plan.settings import capture_settings
from tocsin.emitter.probes.gradients import GradientReader

OFF = (
    '{"collections": {"gradients": "off", "weights": "off", "activations": "off", '
    '"optimizer_state": "off"}}'
)


def optimizer_on(device: str) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(64, device=device))
    parameter.grad = torch.ones(64, device=device)
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.mark.parametrize(
    ("devices", "quiet_until"),
    [(("meta",), 300), (("cpu",), 201), (("meta", "cpu"), 201), (("cpu", "meta"), 201)],
)
def test_no_step_is_quiet_while_an_optimizer_has_gradients_on_the_cpu(
    devices: tuple[str, ...], quiet_until: int
) -> None:
    schedule = CaptureSchedule(capture_settings(OFF))
    used = [optimizer_on(device) for device in devices]
    known = Optimizers(used[0])
    reader = GradientReader(schedule, known)
    for step in range(200):
        for optimizer in used:
            reader.read(known.watched(optimizer), step, nonfinite=False, at_once=True)
        schedule.budget.shares[NORMS].interval = 100
    assert schedule.quiet_until(201) == quiet_until
