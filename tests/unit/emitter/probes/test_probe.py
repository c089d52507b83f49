"""A probe is one class and one line: the example of the docs, in a real training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from support.trainings.captured import captured, said
from support.trainings.loops import linear, loop
from tocsin.emitter.capture import probe_list
from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
from tocsin.emitter.plan.schedule import Due
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.process.isolation import REST
from tocsin.emitter.training.training import Training
from tocsin.schemas.records.runs import CaptureDegraded

PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"


def example() -> type[Probe]:
    """The class of the page."""
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(text, names)
    found = names["GradientZeros"]
    assert isinstance(found, type)
    assert issubclass(found, Probe)
    return found


def test_the_row_of_the_example_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_list, "PROBES", (*probe_list.PROBES, example()))
    model = torch.nn.Sequential(linear(), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # no unit is ever active
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured(tmp_path) as hooks:
        for _ in range(205):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert hooks.isolation.off == {}
    found = {
        step: row["gradient_zeros"]
        for step, row in said(tmp_path).steps().items()
        if "gradient_zeros" in row
    }
    # All of the first layer, and the weights of the last one: its bias has a gradient.
    assert found == {step: pytest.approx(100 * 18 / 19) for step in (0, 100, 200)}


class Sick(Probe):
    """Raises at each of its looks."""

    name = "sick"
    looks = 0

    def start(self, training: Training, optimizers: Optimizers) -> None:
        self.wakes = 3

    def stepped(self, training: Training, step: int) -> None:
        Sick.looks += 1
        raise RuntimeError("planted")


def test_one_that_raises_is_switched_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sick, "looks", 0)
    monkeypatch.setattr(probe_list, "PROBES", (Sick, example()))
    step = loop()
    with captured(tmp_path) as hooks:
        for number in range(REST + 50):
            step(number)
        assert list(hooks.isolation.off) == ["sick"]
    found = said(tmp_path)
    assert Sick.looks == 2  # it is tried again
    assert [event.probe for event in found.of(CaptureDegraded)] == ["sick"]
    assert [at for at, row in found.steps().items() if "gradient_zeros" in row] == [0, 100]


def test_each_training_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Probe] = []

    class Counted(Probe):
        name = "counted"

        def start(self, training: Training, optimizers: Optimizers) -> None:
            made.append(self)

    monkeypatch.setattr(probe_list, "PROBES", (Counted,))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with captured(tmp_path / name):
            step = loop()
            for number in range(3):
                step(number)
    assert len(made) == len({id(probe) for probe in made}) == 2


class Witness(Probe):
    """Notes each of its calls; reads step 2 alone, and the steps at which weights are due."""

    name = "witness"
    of = "weights"
    calls: ClassVar[list[str]] = []

    def start(self, training: Training, optimizers: Optimizers) -> None:
        self.reads, self.wakes = 2, 3
        self.calls.append("begin")

    def batch(self, batch: object, step: int) -> None:
        self.calls.append(f"batch {step}")

    def evaluation_batch(self, batch: object) -> None:
        self.calls.append("evaluation batch")

    def last_batch(self) -> None:
        self.calls.append("last batch")

    def evaluation_loss(self, function: str, loss: torch.Tensor, *, here: bool) -> None:
        self.calls.append(f"{function} {float(loss)} {here}")

    def prepare(self, step: int, due: Due) -> None:
        self.calls.append(f"prepare {step}")

    def updating(self, watched: WatchedOptimizer, due: Due) -> None:
        self.calls.append(f"updating {watched.parameters[0][1].item():.1f}")

    def read(self, step: int, watched: WatchedOptimizer, due: Due) -> None:
        self.calls.append(f"read {step} {watched.parameters[0][1].item():.1f}")
        self.reads = NEVER

    def dropped(self) -> None:
        self.calls.append("dropped")

    def stepped(self, training: Training, step: int) -> None:
        self.calls.append(f"stepped {step}")
        self.wakes = NEVER

    def flush(self) -> bool:
        self.calls.append("flush")
        return False

    def close(self, training: Training) -> None:
        self.calls.append("close")


def test_each_call_comes_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Witness, "calls", calls)
    monkeypatch.setattr(probe_list, "PROBES", (Witness,))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train(*, skips: bool = False) -> None:
        optimizer.zero_grad()
        (-0.1 * model(torch.ones(1, 1)).sum()).backward()
        if not skips:
            optimizer.step()

    section = {"collections": {"weights": {"steps": [4]}}}
    with captured(tmp_path, TOCSIN_CAPTURE=json.dumps(section)):
        for _ in range(4):
            train()
        for _ in torch.utils.data.DataLoader([torch.ones(1)]):
            train()
        model.eval()
        with torch.no_grad():
            for batch in torch.utils.data.DataLoader([torch.ones(1)]):
                torch.nn.functional.mse_loss(batch, torch.zeros(1, 1))
        model.train()
        train(skips=True)
        train()
    assert calls == [
        "begin",
        *("prepare 2", "read 2 0.3"),
        *("prepare 4", "stepped 3", "batch 4", "updating 0.4", "read 4 0.5", "last batch"),
        *("evaluation batch", "mse_loss 1.0 True", "last batch"),
        "dropped",
        *("flush", "close"),
    ]


def test_one_that_is_not_on_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(Witness):
        def start(self, training: Training, optimizers: Optimizers) -> None:
            super().start(training, optimizers)
            self.on = False

    calls: list[str] = []
    monkeypatch.setattr(Witness, "calls", calls)
    monkeypatch.setattr(probe_list, "PROBES", (Idle,))
    with captured(tmp_path):
        step = loop()
        for number in range(5):
            step(number)
    assert calls == ["begin", "close"]


def test_by_default_no_batch_and_no_step_is_read_for_nothing(tmp_path: Path) -> None:
    with captured(tmp_path) as hooks:
        step = loop()
        for number in range(40):
            step(number)
        assert hooks.capture is not None
        probes = hooks.capture.probes
        assert probes.on_batch == probes.on_evaluation_batch == probes.on_last_batch == ()
        assert probes.next_read == NEVER
