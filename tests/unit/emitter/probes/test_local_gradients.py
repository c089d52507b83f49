"""How deep a rank looks at its own gradients: all of them while that is cheap, else in turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tocsin.emitter.model.mesh_names import MARK, WHOLE, Cut, base_name, place_of
from tocsin.emitter.plan.schedule import BLOCKS, LOCAL, NORMS, CaptureSchedule
from tocsin.emitter.plan.settings import CaptureSettings
from tocsin.emitter.probes.local_gradients import EXACT_ROWS, LocalGradients, LocalReading
from tocsin.emitter.statistics.arrays import BLOCK

NAN = float("nan")


class Stretched(CaptureSchedule):
    """A schedule whose budget has come to these intervals."""

    def __init__(self, *, local: int, norms: int) -> None:
        super().__init__(CaptureSettings())
        self.budget.shares[LOCAL].interval = local
        self.budget.shares[NORMS].interval = norms


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    found.grad = torch.ones(shape, dtype=dtype)
    return found


def looked_at(local: LocalGradients, *parameters: torch.nn.Parameter) -> LocalReading | None:
    for place, each in enumerate(parameters):
        if local.wants(place):
            local.read(each)
    return local.drain({id(each): f"p{i}" for i, each in enumerate(parameters)})


def bad_rows(reading: LocalReading | None) -> dict[str, list[int]]:
    assert reading is not None
    return {
        name: counts.tolist()
        for table in reading.tables()
        for name, counts in zip(table.names, table.counts, strict=True)
    }


def test_what_is_bad_is_named_with_exact_counts_and_its_backward_call() -> None:
    local = LocalGradients()
    good, bad = parameter(3), parameter(3)
    bad.grad = torch.tensor([1.0, NAN, 2.0])
    local.backward = 4
    reading = looked_at(local, good, bad)
    assert reading is not None
    assert reading.ready
    assert reading.bad
    assert reading.norm is None
    (table,) = reading.tables()
    assert (table.names, table.counts.tolist()) == (("p1",), [[3, 0, 1, 0]])
    assert table.values[0, table.columns.index("backward")] == 4
    assert local.drain({}) is None


def test_the_norm_is_that_of_all_together_whatever_their_layout() -> None:
    parts = [
        parameter(2 * BLOCK + 5),
        parameter(3, 4),
        parameter(6, dtype=torch.bfloat16),
        parameter(7, dtype=torch.float64),
        parameter(0),
    ]
    parts[1].grad = torch.full((4, 3), 2.0).T
    reading = looked_at(LocalGradients(), *parts)
    assert reading is not None
    square = 2 * BLOCK + 5 + 12 * 4 + 6 + 7
    assert reading.norm == pytest.approx(math.sqrt(square), rel=1e-6)
    assert not reading.bad


def test_gradients_that_are_sparse_or_keep_a_graph_are_read() -> None:
    sparse, graph = parameter(4, 2), parameter(2)
    sparse.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]),
        torch.tensor([[1.0, NAN], [1.0, 1.0]]),
        (4, 2),
        check_invariants=True,
    )
    graph.grad = torch.ones(2, requires_grad=True) * NAN
    assert set(bad_rows(looked_at(LocalGradients(), sparse, graph))) == {"p0", "p1"}


def test_a_square_beyond_float32_is_no_nan() -> None:
    huge = parameter(2)
    huge.grad = torch.full((2,), 1e30)
    local, other = LocalGradients(), parameter(2)
    with np.errstate(all="raise"):
        reading = looked_at(local, huge, other)
    assert reading is not None
    assert not reading.bad
    assert reading.norm is None


def test_with_a_loss_scaler_nobody_says_a_norm() -> None:
    local = LocalGradients()
    local.scaled = True
    reading = looked_at(local, parameter(2))
    assert reading is not None
    assert reading.norm is None
    reading = looked_at(local, parameter(2))
    assert reading is not None
    assert reading.norm is not None


def test_over_the_budget_each_nth_has_its_turn_and_large_ones_a_block() -> None:
    local, schedule = LocalGradients(), Stretched(local=3, norms=1000)
    parts = [parameter(4) for _ in range(8)] + [parameter(3 * BLOCK)]
    parts[-1].grad[-1] = NAN
    for step in range(1, 10):
        local.plan(schedule, step, 0.0)
        wanted = {place for place in range(9) if local.wants(place)}
        assert len(wanted) == 3
        reading = looked_at(local, *parts)
        assert reading is not None
        assert reading.norm is None
        if reading.bad:
            break
    # Its turn is each third step, and its last block is the third of them.
    assert (step, set(bad_rows(reading))) == (7, {"p8"})
    local.plan(schedule, 8, 0.0)
    assert all(local.wants(place) for place in range(9))


def test_where_the_exact_norm_is_due_all_are_read_whole() -> None:
    local, schedule = LocalGradients(), Stretched(local=5, norms=10)
    parts = [parameter(4), parameter(2 * BLOCK), parameter(4)]
    for step in (9, 10):
        local.plan(schedule, step, 0.0)
        reading = looked_at(local, *parts)
        norm = None if reading is None else reading.norm
        assert norm == (None if step == 9 else pytest.approx(math.sqrt(8 + 2 * BLOCK)))


def test_what_stays_bad_is_counted_exactly_for_three_steps() -> None:
    local = LocalGradients()
    bad = parameter(4)
    bad.grad = torch.full((4,), NAN)
    counts = [bad_rows(looked_at(local, bad))["p0"] for _ in range(EXACT_ROWS + 1)]
    assert [nans for _, _, nans, _ in counts] == [4] * EXACT_ROWS + [1]


def test_the_first_backward_call_that_was_bad_is_kept() -> None:
    local = LocalGradients()
    bad = parameter(2)
    bad.grad = torch.tensor([NAN, 1.0])
    for backward in (1, 2):
        local.backward = backward
        local.read(bad)
    reading = local.drain({id(bad): "p0"})
    assert reading is not None
    (table,) = reading.tables()
    assert table.values[0, -1] == 1


def spend(
    local: LocalGradients, schedule: CaptureSchedule, steps: int, *, whole_s: float
) -> list[float]:
    """What these steps of 100 ms cost, where all of it costs so much and blocks a third of it."""
    large = parameter(3 * BLOCK)
    spent = []
    for step in range(1, steps + 1):
        read = looked_at(local, large)
        share = 1.0 if local.all_due else 1 / local._stride
        spent.append(whole_s * share * (1.0 if read and read.norm is not None else 1 / 3))
        local.plan(schedule, step, spent[-1])
        schedule.stepped(0.1, spent_s=0.0)
    return spent


def test_what_it_costs_stays_within_the_budget() -> None:
    local, schedule = LocalGradients(), Stretched(local=1, norms=100_000)
    schedule.budget.shares[BLOCKS].costs.append(1e-4)
    spent = spend(local, schedule, 1000, whole_s=6e-3)
    assert sum(spent[100:]) / len(spent[100:]) <= 0.005 * 0.1
    assert schedule.interval(LOCAL) > 1


def test_blocks_are_read_only_while_all_would_be_too_dear() -> None:
    local, schedule = LocalGradients(), Stretched(local=1, norms=10)
    spend(local, schedule, 200, whole_s=6e-3)
    local.plan(schedule, 201, 0.0)
    reading = looked_at(local, parameter(2 * BLOCK))
    assert reading is None or reading.norm is None
    spend(local, schedule, 200, whole_s=1e-5)
    local.plan(schedule, 201, 0.0)
    reading = looked_at(local, parameter(2 * BLOCK))
    assert reading is not None
    assert reading.norm == pytest.approx(math.sqrt(2 * BLOCK))


def test_another_training_begins_afresh() -> None:
    local, schedule = LocalGradients(), Stretched(local=5, norms=10)
    old, dead = parameter(2), parameter(2)
    assert [local.is_new(p) for p in (old, dead)] == [0, 1]
    old.grad = torch.full((2,), NAN)
    assert bad_rows(looked_at(local, old))
    local.plan(schedule, 9, 1e-3)
    del dead
    local.reset()
    assert not local.active
    assert local.all_due
    # It has its hook still, and is looked at as soon as it is trained again.
    assert local.is_new(old) is None
    reading = looked_at(local, parameter(2 * BLOCK))
    assert local.active
    assert reading is not None
    assert reading.norm == pytest.approx(math.sqrt(2 * BLOCK))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_numbers_come_later() -> None:
    local = LocalGradients()
    good, bad = (torch.nn.Parameter(torch.zeros(n, device="cuda")) for n in (2 * BLOCK, 3))
    good.grad, bad.grad = torch.ones_like(good), torch.tensor([1.0, NAN, 2.0]).cuda()
    reading = looked_at(local, good, bad)
    torch.cuda.synchronize()
    assert bad_rows(reading) == {"p1": [0, 0, 1, 0]}


def test_a_parameter_is_watched_once() -> None:
    local, one, other = LocalGradients(), parameter(1), parameter(1)
    assert not local.active
    assert [local.is_new(p) for p in (one, one, other)] == [0, None, 1]
    assert local.active


def test_a_stage_is_in_the_name_and_a_whole_tensor_is_not() -> None:
    plain = parameter(2)
    assert place_of(plain) == WHOLE
    place = place_of(plain, [Cut("pp3", ranks=4)])
    assert (place.suffix, place.parts) == ("@pp3", 4)
    assert base_name(f"layers.0.weight{place.suffix}") == "layers.0.weight"
    assert not set(MARK) & set("[]*?!.$^()|+\\")
    assert place_of(plain, [Cut("pp3", 4), Cut("shard0", 2, empty=True)]) == (
        "@pp3-shard0",
        8,
        True,
    )


def test_rows_that_are_not_exact_say_at_least_one() -> None:
    class Copied:
        def ready(self) -> bool:
            return True

        def values(self) -> np.ndarray:
            return np.array([3.0, NAN, math.inf])

    copied: object = Copied()
    reading = LocalReading({}, 16.0, (["a", "b", "c"], copied), 2)  # type: ignore[arg-type]  # a copy
    assert bad_rows(reading) == {"b": [0, 0, 1, 0], "c": [0, 0, 0, 1]}
    assert reading.norm is None
