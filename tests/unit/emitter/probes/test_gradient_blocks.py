"""Blocks of gradients: all of a small tensor, another part of a large one at each step."""

from __future__ import annotations

import math

import pytest
import torch

from tocsin.emitter.probes.gradient_blocks import BlockReader
from tocsin.emitter.statistics.arrays import BLOCK, block


def test_small_gradients_are_read_whole() -> None:
    gradients = [torch.full((10, 10), 2.0), torch.tensor(3.0), torch.empty(0)]
    found = BlockReader().read(gradients)
    assert found.norm == pytest.approx(math.sqrt(400 + 9))
    assert found.bad == 0


def test_each_part_of_a_large_gradient_has_its_turn() -> None:
    gradient = torch.ones(5 * BLOCK + 100)
    reader = BlockReader()
    for place in (0, BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 99):
        gradient[place] = math.nan
        turns = math.ceil(gradient.numel() / BLOCK) + 1
        seen = [reader.read([gradient]) for _ in range(turns)]
        assert any(blocks.bad for blocks in seen), place
        gradient[place] = 1.0
    assert reader.read([gradient]).norm == pytest.approx(math.sqrt(gradient.numel()), rel=1e-6)


@pytest.mark.parametrize("n", [1, BLOCK, BLOCK + 1, 12_000, 2 * BLOCK + 1, 20_000, 78_400])
def test_the_blocks_are_alike_and_come_round_as_soon_as_they_can(n: int) -> None:
    turns = math.ceil(n / BLOCK)
    for first in (0, 5):
        parts = [range(n)[block(first + turn, n)] for turn in range(turns)]
        assert sorted(i for part in parts for i in part) == list(range(n))
        assert max(map(len, parts)) <= min(BLOCK, min(map(len, parts)) + 1)


def test_gradients_on_another_device_are_left_to_the_exact_norms() -> None:
    class Elsewhere(torch.Tensor):  # type: ignore[misc]  # torch has no types here
        """A tensor of a device that would be waited for."""

        @property
        def is_cpu(self) -> bool:
            return False

    there = torch.full((4,), math.nan).as_subclass(Elsewhere)
    found = BlockReader().read([torch.ones(4), there])
    assert (found.norm, found.bad, found.complete) == (2.0, 0, False)
    assert found.estimate is None
    assert BlockReader().read([torch.ones(4)]).estimate == 2.0


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(20, 30, dtype=torch.bfloat16),
        torch.ones(20, 30, dtype=torch.float16) * 300,
        torch.ones(20, 30, dtype=torch.float64),
        torch.ones(20, 30).to(torch.float8_e4m3fn),
        torch.ones(20, 30).t(),
        torch.ones(2, 3, 10, 10).contiguous(memory_format=torch.channels_last),
        torch.ones(600).to_sparse(),
        torch.ones(300, dtype=torch.complex64) * (1 + 1j),
    ],
    ids=str,
)
def test_any_type_and_layout_is_read(gradient: torch.Tensor) -> None:
    norm = BlockReader().read([gradient]).norm
    scale = 300.0 if gradient.dtype is torch.float16 else 1.0
    assert norm == pytest.approx(scale * math.sqrt(600), rel=1e-2)


def test_what_has_no_numbers_counts_as_nothing() -> None:
    assert BlockReader().read([torch.ones(5, device="meta"), torch.ones(4)]).norm == 2.0


def test_a_jump_is_seen_once_the_usual_is_known() -> None:
    reader = BlockReader()
    assert not reader.jumped(1e9)
    reader = BlockReader()
    assert not any(reader.jumped(norm) for norm in [1.0, 1.2, 0.9, 1.1] * 5)
    assert reader.jumped(8.0)
    assert reader.jumped(8.0)
    # Where it lasts it becomes the usual.
    assert not [reader.jumped(8.0) for _ in range(40)][-1]
