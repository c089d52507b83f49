"""What optimizers remember, as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from support.trainings.captured import captured, said
from tocsin.emitter.probes.optimizer_state import OptimizerState
from tocsin.emitter.statistics.quantiles import ROW_COLUMNS
from tocsin.emitter.statistics.tensor_rows import Wanted
from tocsin.schemas.records.runs import RunEnded

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def stepped(make: Make) -> tuple[torch.optim.Optimizer, list[tuple[str, torch.Tensor]]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)) * model.scale).sum().backward()
        optimizer.step()
    return optimizer, list(model.named_parameters())


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda p: torch.optim.AdamW(p), {"exp_avg", "exp_avg_sq"}),
        (
            lambda p: torch.optim.Adam(p, amsgrad=True),
            {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
        ),
        (lambda p: torch.optim.Adam(p, fused=True), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
        (lambda p: torch.optim.RMSprop(p, momentum=0.1), {"square_avg", "momentum_buffer"}),
        (lambda p: torch.optim.Adagrad(p), {"sum"}),
    ],
    ids=["adamw", "amsgrad", "fused", "momentum", "sgd", "rmsprop", "adagrad"],
)
def test_a_row_for_each_of_its_tensors(make: Make, keys: set[str]) -> None:
    optimizer, parameters = stepped(make)
    before = {id(p): set(state) for p, state in optimizer.state.items()}
    probe = OptimizerState()
    found = probe.rows(optimizer, parameters)
    assert {id(p): set(state) for p, state in optimizer.state.items()} == before
    assert probe.skipped == 0
    if not keys:
        assert found is None
        return
    assert found is not None
    assert found.ready
    (table,) = found.tables()
    assert table.collection == "optimizer_state"
    assert set(table.names) == {f"{name}.{key}" for name, _ in parameters for key in keys}
    for name, row in zip(table.names, table.values, strict=True):
        of, key = name.rsplit(".", 1)
        state = optimizer.state[dict(parameters)[of]][key].double().numpy()
        assert row[table.columns.index("l2")] == pytest.approx(np.linalg.norm(state), rel=1e-5)
        assert row[table.columns.index("max")] == pytest.approx(state.max(), rel=1e-5)


def test_a_history_over_all_parameters_is_no_row() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.state
    assert OptimizerState().rows(optimizer, list(model.named_parameters())) is None


def test_only_what_is_wanted() -> None:
    optimizer, parameters = stepped(lambda p: torch.optim.AdamW(p))
    found = OptimizerState().rows(
        optimizer,
        parameters,
        (Wanted("optimizer_state", frozenset({"0.bias"}), ("l2",)), Wanted("mine", frozenset())),
    )
    assert found is not None
    first, second = found.tables()
    assert (first.names, first.columns) == (("0.bias.exp_avg", "0.bias.exp_avg_sq"), ("l2",))
    assert (second.collection, second.names) == ("mine", ())


def test_packed_states_are_counted_and_left_out() -> None:
    optimizer, parameters = stepped(lambda p: torch.optim.SGD(p, lr=0.1))
    of_name = dict(parameters)
    weight = of_name["0.weight"]
    optimizer.state[weight] = {
        "state1": torch.zeros(3, 4, dtype=torch.uint8),  # as bitsandbytes has it
        "absmax1": torch.zeros(1),
        "mine": torch.ones(3, 4),
        "gone": torch.ones(3, 4, device="meta"),
        "note": "text",
    }
    optimizer.state[of_name["0.bias"]] = {"shared": None}
    probe = OptimizerState()
    found = probe.rows(optimizer, parameters)
    assert found is not None
    (table,) = found.tables()
    assert table.names == ("0.weight.mine",)
    assert probe.skipped == 2
    assert not OptimizerState().rows(optimizer, [("x", torch.ones(2))])
    assert len(optimizer.state) == 2


def test_a_training_says_what_its_optimizer_remembers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = {}
    with captured(tmp_path):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            if step == 0:
                kept = {
                    f"{name}.{key}": value.double().norm().item()
                    for name, parameter in model.named_parameters()
                    for key, value in optimizer.state[parameter].items()
                    if key != "step"
                }
    found = said(tmp_path)
    (ended,) = found.of(RunEnded)
    assert ended.capture is not None
    assert ended.capture.degraded == ()
    frame = found.frame("optimizer_state", 0)
    l2 = frame.column("l2")
    assert l2 is not None
    assert dict(zip(frame.rows, l2.tolist(), strict=True)) == pytest.approx(kept, rel=1e-3)
    gradients = [f for f in found.frames if (f.collection, f.step) == ("gradients", 0)]
    assert [f.columns for f in gradients] == [ROW_COLUMNS, ("underflow", "overflow")]
    assert gradients[0].rows == gradients[1].rows
