"""Shares of numbers at the ends of a type's range, against its numbers in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tocsin.emitter.statistics import low_precision
from tocsin.emitter.statistics.low_precision import LowPrecision
from tocsin.emitter.statistics.quantiles import ROW_COLUMNS
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted

DTYPES = [
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


def shares(tensor: torch.Tensor) -> tuple[float, float]:
    values, _ = LowPrecision(["a"], [tensor]).rows
    underflow, overflow = values[0].tolist()
    return underflow, overflow


def expected(tensor: torch.Tensor) -> tuple[float, float]:
    values, limits = tensor.double().abs().numpy().reshape(-1), torch.finfo(tensor.dtype)
    filled = int((values != 0).sum())
    if "fnuz" in str(tensor.dtype):
        filled -= int(np.isnan(values).sum())  # its one NaN has the bits of a negative zero
    small = (values != 0) & (values < limits.smallest_normal)
    return small.sum() / max(filled, 1), (values > 0.9 * limits.max).sum() / values.size


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_a_type(dtype: torch.dtype) -> None:
    whole = torch.uint8 if dtype.itemsize == 1 else torch.int16
    tensor = torch.arange(256**dtype.itemsize, dtype=torch.int32).to(whole).view(dtype)
    assert shares(tensor) == pytest.approx(expected(tensor), rel=1e-6)
    zeros, small, large = (int(cell) for cell in low_precision._on_device(tensor[None])[0])
    assert (zeros, small, large) == low_precision._on_host(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_odd_tensors(dtype: torch.dtype) -> None:
    tensor = (torch.linspace(-1, 1, 200_000) ** 9).to(dtype)
    assert shares(tensor) == pytest.approx(expected(tensor), rel=1e-6)
    odd = torch.tensor([math.nan, torch.finfo(dtype).max, 0.0, -0.0, 1.0]).to(dtype)
    assert shares(odd) == pytest.approx((0.0, 0.2))
    assert shares(torch.zeros(4).to(dtype)) == (0.0, 0.0)
    assert shares(torch.zeros(0).to(dtype)) == (0.0, 0.0)


def test_only_tensors_of_low_precision_have_a_row() -> None:
    tensors = [torch.ones(3), torch.full((4,), 6e4).half(), torch.ones(2, dtype=torch.int16)]
    wanted = [
        Wanted("gradients"),
        Wanted("mine", columns=("l2", "overflow")),
        Wanted("l2", None, ("l2",)),
    ]
    found = TensorRows(["a", "b", "c"], tensors, wanted, precision=True)
    assert found.ready
    *rows, first, second = found.tables()
    assert [(t.collection, t.names) for t in rows] == [
        (name, ("a", "b", "c")) for name in ("gradients", "mine", "l2")
    ]
    assert [t.columns for t in rows] == [ROW_COLUMNS, ("l2",), ("l2",)]
    assert (first.collection, first.names, first.columns) == (
        "gradients", ("b",), ("underflow", "overflow")
    )  # fmt: skip
    assert (second.collection, second.columns, second.counts.tolist()) == (
        "mine", ("overflow",), [[4]]
    )  # fmt: skip
    np.testing.assert_array_equal(first.values, [[0, 1]])
    alone = TensorRows(["a"], tensors[:1], [Wanted("gradients")], precision=True)
    assert len(list(alone.tables())) == 1


def test_transposed_and_scalar() -> None:
    for tensor in (torch.ones(3, 4).half().t(), torch.tensor(1e-7).half()):
        flat = dense(tensor)
        assert flat is not None
        assert shares(flat) == pytest.approx(expected(tensor))
