"""A probe is one class and one line: the example of the docs, in a real training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.captured import captured, said
from support.loops import linear, loop
from tocsin.emitter.capture import surroundings
from tocsin.emitter.model.optimizers import Optimizers
from tocsin.emitter.probes.probe import Probe
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
    monkeypatch.setattr(surroundings, "PROBES", (*surroundings.PROBES, example()))
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

    def begin(self, training: Training, optimizers: Optimizers) -> None:
        self.wakes = 3

    def stepped(self, training: Training, step: int) -> None:
        Sick.looks += 1
        raise RuntimeError("planted")


def test_one_that_raises_is_switched_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sick, "looks", 0)
    monkeypatch.setattr(surroundings, "PROBES", (Sick, example()))
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

        def begin(self, training: Training, optimizers: Optimizers) -> None:
            made.append(self)

    monkeypatch.setattr(surroundings, "PROBES", (Counted,))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with captured(tmp_path / name):
            step = loop()
            for number in range(3):
                step(number)
    assert len(made) == len({id(probe) for probe in made}) == 2
