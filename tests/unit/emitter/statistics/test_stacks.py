"""Tensors of a size as the rows of one, and what a GPU says of them against what the host says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tocsin.emitter.statistics import stacks as module
from tocsin.emitter.statistics.stacks import stacks
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted
from tocsin.schemas.records.frames import COUNT_COLUMNS


def test_tensors_of_a_size_and_type_are_rows_of_one() -> None:
    tensors = [
        torch.tensor([1.0, 2.0]), torch.zeros(0), torch.tensor([3.0, 4.0]), torch.arange(2),
        torch.tensor([5.0]), torch.tensor([6.0, 7.0]),
    ]  # fmt: skip
    found = [(at, rows.tolist()) for at, rows in stacks(tensors)]
    assert found == [
        ([0, 2, 5], [[1.0, 2.0], [3.0, 4.0], [6.0, 7.0]]),
        ([3], [[0, 1]]),
        ([4], [[5.0]]),
    ]


def test_a_large_tensor_is_in_parts_and_a_single_one_is_no_copy() -> None:
    large, small = torch.arange(5.0), torch.arange(2.0)
    found = [(at, rows.tolist()) for at, rows in stacks([large, small], chunk=2)]
    assert found == [([0, 0, 1], [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]]), ([0], [[4.0]])]
    ((_, rows),) = stacks([large])
    assert rows.data_ptr() == large.data_ptr()


def test_a_stack_holds_no_more_than_so_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 6)
    tensors = [torch.full((4,), float(n)) for n in range(3)]
    tensors += [torch.full((2,), float(n)) for n in range(4)]
    assert [at for at, _ in stacks(tensors)] == [[0], [1], [2], [3, 4, 5], [6]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_numbers_of_low_precision_are_stacked_bit_by_bit(dtype: torch.dtype) -> None:
    one, other = torch.tensor([0.5, -2.0]).to(dtype), torch.tensor([1.0, 3.0]).to(dtype)
    ((_, rows),) = stacks([one, other])
    assert rows.dtype is dtype
    assert rows.float().tolist() == [[0.5, -2.0], [1.0, 3.0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_gpu_says_what_the_host_says(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 70_000, 70_000, 0, 3, 2_000_000, 1025, 1]
    tensors = [(0.1 * torch.randn(n, generator=generator) + 0.5).to(dtype) for n in sizes]
    bad = torch.ones(70_000)
    bad[7] = math.nan
    tensors.append(bad.to(dtype))
    names, wanted = [f"t{n}" for n in range(len(tensors))], [Wanted("weights")]
    host = TensorRows(names, tensors, wanted, precision=True)
    gpu = TensorRows(names, [tensor.cuda() for tensor in tensors], wanted, precision=True)
    torch.cuda.synchronize()
    assert gpu.ready
    for expected, found in zip(host.tables(), gpu.tables(), strict=True):
        assert (expected.names, expected.columns) == (found.names, found.columns)
        # Statistics of what is not finite are the host's alone: the GPU's tensor is gone.
        np.testing.assert_allclose(found.values[:-1], expected.values[:-1], rtol=2e-5, atol=1e-6)
        good = slice(None, -1)
        np.testing.assert_array_equal(found.counts[good], expected.counts[good])
    row = gpu.rows.counts[-1]
    assert row[COUNT_COLUMNS.index("nans")] == 1
