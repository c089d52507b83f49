"""torch.compile without us and with us: graphs, breaks and losses of the same trainings, as JSON.

A process of its own: once our hooks are in torch they stay, so what comes without them comes first.

    python -m support.trainings.compiled FOLDER CASE…
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from support.trainings.captured import captured, said
from tocsin.emitter.hooks import torch_patches
from tocsin.schemas.records.runs import CaptureDegraded

STEPS = 4
EVERY_STEP = '{"collections": {"gradients": {"every": 1}, "weights": {"every": 1}}}'

Case = Callable[[], list[float]]


class Loss(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A network that computes its own loss, in the ways that capture watches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Two losses of the same numbers."""
        scores = self.layers(x)
        one: torch.Tensor = self.criterion(scores, labels)
        return one + nn.functional.cross_entropy(scores, labels)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and classes."""
    return torch.randn(8, 6), torch.arange(8) % 3


def steps(
    forward: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, count: int = STEPS
) -> list[float]:
    """Train."""
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = forward(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def from_the_start() -> list[float]:
    """Compiled before the first step; evaluated in between, which is another graph."""
    model = Loss()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = steps(compiled, optimizer)
    model.eval()
    with torch.no_grad():
        losses.append(float(compiled(*batch())))
    model.train()
    return losses + steps(compiled, optimizer)


def in_the_middle() -> list[float]:
    """Compiled when a training goes on already, and is captured."""
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = steps(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager")
    return losses + steps(compiled, optimizer)


def with_a_break_of_its_own() -> list[float]:
    """A graph break that is the user's, and stays the only one."""
    model = Loss()

    @torch.compile(backend="aot_eager")  # type: ignore[untyped-decorator]
    def forward(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        torch._dynamo.graph_break()
        loss: torch.Tensor = model(hidden, labels)
        return loss

    return steps(forward, torch.optim.SGD(model.parameters(), lr=0.01))


def optimizer_too() -> list[float]:
    """The optimizer's step and the clipping are compiled, too."""
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile(backend="aot_eager")  # type: ignore[untyped-decorator]
    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch())
        loss.backward()
        update()
        losses.append(loss.item())
    return losses


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (from_the_start, in_the_middle, with_a_break_of_its_own, optimizer_too)
}


def counted(case: Case) -> dict[str, object]:
    """What the compiler counts, and the losses."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    losses = case()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "losses": losses,
    }


def main(folder: Path, names: list[str]) -> None:
    """These cases without us, then with us."""
    warnings.simplefilter("error")
    # Some versions of torch deprecate a part of themselves that their compiler imports.
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    torch.set_num_threads(1)
    assert not torch_patches._installed
    found: dict[str, dict[str, object]] = {
        name: {"without": counted(CASES[name])} for name in names
    }
    for name in names:
        place = folder / name
        place.mkdir()
        with captured(place, TOCSIN_CAPTURE=EVERY_STEP):
            found[name]["with"] = counted(CASES[name])
        seen = said(place)
        found[name]["captured"] = [
            [step, cells["loss"], cells["gradient_norm"]]
            for step, cells in sorted(seen.steps().items())
        ]
        found[name]["off"] = sorted(each.probe for each in seen.of(CaptureDegraded))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
