"""From which checkpoint a training goes on, and how many steps it plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from support.trainings.captured import captured, said
from tocsin.emitter.hooks.checkpoint_reads import MAX_OF_FOLDER
from tocsin.emitter.model.devices import devices_of
from tocsin.emitter.run import Run
from tocsin.emitter.training.context import current
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.runs import RunStarted


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_what_was_loaded_before_the_first_step_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    model = nn.Linear(3, 1)
    torch.save(model.state_dict(), kept / "step-10.pt")
    (tmp_path / "newest.pt").symlink_to(kept / "step-10.pt")
    data = tmp_path / "data"
    data.mkdir()
    for i in range(20):
        torch.save(torch.ones(1), data / f"{i}.pt")

    with captured(tmp_path):
        with open(tmp_path / "newest.pt", "rb") as file:
            model.load_state_dict(torch.load(file))
        for i in range(20):  # a data set does not push it out
            torch.load(data / f"{i}.pt")
        train(model)
        torch.load(data / "0.pt")

    (started,) = said(tmp_path).of(RunStarted)
    assert started.loaded[:2] == (str(kept / "step-10.pt"), str(tmp_path / "newest.pt"))
    assert started.loaded[2:] == tuple(str(data / f"{i}.pt") for i in range(20 - MAX_OF_FOLDER, 20))
    assert started.devices == {}


def test_a_rank_on_an_accelerator_names_it() -> None:
    model = nn.Linear(3, 1, device="meta")

    class Elsewhere:
        device = torch.device("xpu", 0)

    assert devices_of(model.parameters(), model) == {}
    assert devices_of([Elsewhere(), Elsewhere()], None) == {"xpu": 1}
    assert not torch.cuda.is_initialized()


def test_a_plan_may_be_told_before_and_during_the_training(tmp_path: Path) -> None:
    with captured(tmp_path):
        assert current.session is not None
        run = Run(current.session)
        run.plan(100, done_steps=40)
        train(nn.Linear(3, 1))
        run.plan(done_steps=41)

    planned = said(tmp_path).of(TrainingPlanned)
    assert [(one.total_steps, one.done_steps, one.source) for one in planned] == [
        (100, 40, "run.plan"),
        (None, 41, "run.plan"),
    ]


@pytest.mark.parametrize("total", [0, -1, 2.5, True, "10"])
def test_a_plan_is_a_whole_number(tmp_path: Path, total: object) -> None:
    with captured(tmp_path):
        assert current.session is not None
        with pytest.raises(ConfigurationError, match="total_steps: expected a whole number"):
            Run(current.session).plan(total)  # type: ignore[arg-type]
