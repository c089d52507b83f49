"""Rows of statistics against NumPy in float64: types, layouts, sizes, and what is odd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from tocsin.emitter.statistics.arrays import CHUNK, Rows, row_of
from tocsin.emitter.statistics.cpu_rows import LARGE_CHUNK, SCRATCH, SINGLE, SMALL, host_rows
from tocsin.emitter.statistics.gpu_rows import PackedRows
from tocsin.emitter.statistics.reductions import Summary, dense, exact_row, norms
from tocsin.schemas.records.frames import STATISTIC_COLUMNS

Doubles = npt.NDArray[np.float64]
COLUMN = {name: i for i, name in enumerate(STATISTIC_COLUMNS)}
STD = COLUMN["std"]


def device_rows(tensors: list[torch.Tensor]) -> Rows:
    """What a GPU would say; its operations exist on the CPU too."""
    packed = PackedRows(tensors)
    copied = np.zeros(0) if packed.packed is None else packed.packed.numpy()
    return packed.rows(copied)


READERS: list[Callable[[list[torch.Tensor]], Rows]] = [host_rows, device_rows]


def truth(values: Doubles) -> tuple[Doubles, list[int]]:
    """The row of flat numbers, by the textbook."""
    good = values[np.isfinite(values)]
    counts = [
        values.size,
        int((values == 0).sum()),
        int(np.isnan(values).sum()),
        int(np.isinf(values).sum()),
    ]
    if not good.size:
        return np.zeros(len(STATISTIC_COLUMNS)), counts
    absolute = np.abs(good)
    row = (good.min(), good.max(), good.mean(), good.std(), absolute.sum())
    return np.array((*row, np.linalg.norm(good), absolute.max())), counts


def assert_is(row: npt.NDArray[np.float32], expected: Doubles, numel: int) -> None:
    """Equal as float32 sums can be: the mean against the mean of absolute values."""
    scale = expected[COLUMN["l1"]] / max(numel, 1)
    for name, found, wanted in zip(STATISTIC_COLUMNS, row.tolist(), expected, strict=True):
        if name == "mean":
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5 * scale), name
        elif name == "std":
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6 * scale), name
        else:
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-38), name


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16]),
        st.integers(0, 400),
        elements=st.one_of(
            st.floats(-1e4, 1e4, width=16), st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
        ),
    )
)
def test_any_small_tensor(values: npt.NDArray[np.float32]) -> None:
    expected, counts = truth(values.astype(np.float64))
    tensor = torch.from_numpy(values)
    row = host_rows([torch.ones(3), tensor, torch.zeros(0)])
    assert row.counts[1].tolist() == counts
    assert_is(row.values[1], expected, values.size)
    packed = device_rows([tensor])
    assert bool(packed.nonfinite[0]) == (counts[2] + counts[3] > 0)
    if counts[2] + counts[3] == 0:
        assert packed.counts[0].tolist() == counts
        assert_is(packed.values[0], expected, values.size)
    alone, exact = row_of(values)
    assert exact.tolist() == counts
    assert_is(alone.astype(np.float32), expected, values.size)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "n", [SMALL, SMALL + 1, 8192, SCRATCH - 1, SCRATCH + 7, LARGE_CHUNK + 1, 2 * LARGE_CHUNK + 9000]
)
def test_sizes_around_the_chunks(reader: Callable[[list[torch.Tensor]], Rows], n: int) -> None:
    tensor = torch.linspace(-3, 5, n) ** 3
    tensor[[0, n // 2, n - 1]] = 0.0
    expected, counts = truth(tensor.double().numpy())
    rows = reader([tensor])
    assert rows.counts[0].tolist() == counts
    assert_is(rows.values[0], expected, n)


FLOATS = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("n", [77, SMALL + 100])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_types(dtype: torch.dtype, n: int) -> None:
    numbers = torch.linspace(-3, 9, n) if dtype.is_floating_point else torch.arange(n) % 11
    tensor = numbers.to(dtype)
    expected, counts = truth(tensor.double().numpy())
    flat = dense(tensor)
    assert flat is not None
    for reader in READERS:
        rows = reader([flat])
        assert rows.counts[0].tolist() == counts
        assert_is(rows.values[0], expected, n)
    assert float(norms([flat])[0]) == pytest.approx(expected[COLUMN["l2"]], rel=1e-3)


@pytest.mark.parametrize("n", [256, 3 * SMALL])
def test_a_narrow_spread_around_one_does_not_cancel(n: int) -> None:
    weight = 1.0 + 1e-4 * torch.linspace(-1, 1, n)
    expected = weight.double().std(correction=0).item()
    for reader in READERS:
        assert reader([weight]).values[0, STD] == pytest.approx(expected, rel=0.01)
    assert exact_row(weight)[0][STD] == pytest.approx(expected, rel=1e-6)


def test_a_narrow_spread_in_parts_does_not_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.emitter.statistics.gpu_rows.CHUNK", 100)
    weight = 1.0 + 1e-4 * torch.linspace(-1, 1, 1050)
    expected, counts = truth(weight.double().numpy())
    rows = device_rows([torch.ones(5), weight, torch.zeros(0), torch.zeros(250)])
    assert rows.counts[:, 0].tolist() == [5, 1050, 0, 250]
    assert rows.counts[:, 1].tolist() == [0, counts[1], 0, 250]
    assert_is(rows.values[1], expected, 1050)
    assert rows.values[1, STD] == pytest.approx(expected[STD], rel=0.01)


def test_layouts() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4) - 5
    images = torch.linspace(-1, 1, 120).reshape(2, 3, 4, 5)
    layouts = [
        base.permute(2, 0, 1),
        base[:, ::2],
        images.to(memory_format=torch.channels_last),
        base.expand(5, 2, 3, 4),
        torch.tensor(-2.5),
        torch._neg_view(base),
    ]
    for tensor in layouts:
        flat = dense(tensor)
        assert flat is not None
        expected, counts = truth(tensor.double().numpy().reshape(-1))
        rows = host_rows([flat])
        assert rows.counts[0].tolist() == counts
        assert_is(rows.values[0], expected, tensor.numel())
    channels_last = dense(layouts[2])
    assert channels_last is not None
    assert channels_last.data_ptr() == layouts[2].data_ptr()


def test_complex_numbers_are_their_parts() -> None:
    numbers = torch.complex(torch.tensor([1.0, 0.0]), torch.tensor([-2.0, 4.0]))
    for tensor, values in (
        (numbers, [1.0, -2.0, 0.0, 4.0]),
        (numbers.conj(), [1.0, 2.0, 0.0, -4.0]),
        (numbers.conj().imag, [2.0, -4.0]),
    ):
        flat = dense(tensor)
        assert flat is not None
        assert flat.tolist() == values


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_the_values_they_store() -> None:
    twice = torch.sparse_coo_tensor([[0, 3, 3]], [1.0, 2.0, 3.0], (10,), check_invariants=True)
    matrix = torch.tensor([[0.0, 1.0, 0.0], [4.0, 0.0, -6.0]])
    for tensor, values in (
        (twice, [1.0, 5.0]),
        (matrix.to_sparse_csr(), [1.0, 4.0, -6.0]),
        (matrix.to_sparse_csc(), [4.0, 1.0, -6.0]),
        (torch.sparse_coo_tensor(torch.zeros(1, 0), [], (10,), check_invariants=True), []),
    ):
        flat = dense(tensor)
        assert flat is not None
        assert flat.tolist() == values
        assert host_rows([flat]).counts[0, 0] == len(values)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_has_no_numbers_to_read() -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    assert dense(torch.empty(3, device="meta")) is None
    assert dense(quantised) is None
    assert dense(torch.nested.nested_tensor([torch.ones(2)])) is None
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is not None:
        assert dense(torch.zeros(4, dtype=torch.uint8).view(packed)) is None


@pytest.mark.parametrize("n", [6, 5 * SMALL])
def test_nonfinite_numbers_are_counted_and_left_out(n: int) -> None:
    tensor = torch.linspace(-1, 4, n)
    tensor[1], tensor[2], tensor[3], tensor[5] = math.nan, math.inf, -math.inf, 0.0
    expected, counts = truth(tensor.double().numpy())
    row = host_rows([tensor])
    assert row.counts[0].tolist() == counts
    assert_is(row.values[0], expected, n)
    bounds = device_rows([tensor])
    assert bounds.nonfinite.tolist() == [True]
    assert np.isfinite(bounds.values).all()


@pytest.mark.parametrize("n", [4, 2 * SMALL])
def test_a_norm_beyond_float32_is_not_an_infinity(n: int) -> None:
    tensor = torch.full((n,), 3e38)
    for reader in READERS:
        row = reader([tensor])
        assert not row.nonfinite.any()
        assert np.isfinite(row.values).all()
        assert row.values[0, COLUMN["max"]] == np.float32(3e38)
    exact = host_rows([tensor])
    assert exact.values[0, COLUMN["mean"]] == pytest.approx(3e38, rel=1e-6)


def test_nothing_and_only_nan() -> None:
    for reader in READERS:
        nothing = reader([torch.zeros(0), torch.zeros(0)])
        assert nothing.counts.tolist() == [[0, 0, 0, 0]] * 2
        assert not nothing.values.any()
    only = host_rows([torch.full((9,), math.nan)])
    assert only.counts[0].tolist() == [9, 0, 9, 0]
    assert not only.values.any()
    assert Summary([torch.zeros(0)]).rows().values.shape == (1, len(STATISTIC_COLUMNS))


def test_a_nan_takes_no_other_tensors_zeros() -> None:
    zeros, bad = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, math.nan])
    assert host_rows([zeros, bad]).counts.tolist() == [[3, 2, 0, 0], [2, 0, 1, 0]]


@pytest.mark.parametrize("last", [1.0, math.nan])
def test_pytorch_converts_no_more_at_once_than_importing_takes(last: float) -> None:
    class Sizes(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        converted = 0

        def __torch_dispatch__(
            self,
            func: Callable[..., object],
            types: object,
            args: tuple[torch.Tensor, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            if "copy" in str(func):
                self.converted = max(self.converted, args[0].numel())
            return func(*args, **(kwargs or {}))

    values = torch.ones(3 * SCRATCH + 9, dtype=torch.bfloat16)
    values[-1] = last
    with Sizes() as sizes:
        rows = host_rows([values])
    assert rows.counts[0, 2] == int(math.isnan(last))
    assert sizes.converted == SINGLE  # of more than that it takes a second thread


def test_many_small_tensors_do_not_mix() -> None:
    tensors = [torch.full((1 + i % 300,), float(i)) for i in range(700)]
    rows = host_rows(tensors)
    np.testing.assert_allclose(rows.values[:, COLUMN["mean"]], np.arange(700), rtol=1e-6)
    assert not rows.values[:, STD].any()
    assert rows.counts[:, 0].tolist() == [tensor.numel() for tensor in tensors]
    assert rows.counts[0, 1] == 1


def test_large_sums_keep_their_digits() -> None:
    tensor = torch.full((10_000_000,), 0.1)
    tensor[::2] += 1e-3
    wide = np.array([0.1 + 1e-3, 0.1], np.float32).astype(np.float64)
    row = host_rows([tensor]).values[0]
    assert row[COLUMN["l1"]] == pytest.approx(5e6 * wide.sum(), rel=1e-4)
    assert row[COLUMN["mean"]] == pytest.approx(wide.mean(), rel=1e-4)
    assert row[COLUMN["l2"]] == pytest.approx(math.sqrt(5e6 * (wide**2).sum()), rel=1e-4)
    assert row[STD] == pytest.approx(wide.std(), rel=1e-2)
    assert float(norms([tensor])[0]) == pytest.approx(math.sqrt(5e6 * (wide**2).sum()), rel=1e-4)
    tensor[7_000_000] = math.nan
    assert math.isnan(float(norms([tensor])[0]))


@pytest.mark.torture
def test_huge_sums_keep_their_digits() -> None:
    generator = torch.Generator().manual_seed(3)
    for shift in (0.0, 3.0):
        tensor = torch.randn(100_000_000, generator=generator) + shift
        expected, counts = exact_row(tensor)
        rows = host_rows([tensor])
        assert rows.counts[0].tolist() == counts.tolist()
        assert_is(rows.values[0], expected, tensor.numel())
        np.testing.assert_allclose(rows.values[0], expected, rtol=1e-3, atol=1e-6)
        assert float(norms([tensor])[0]) == pytest.approx(expected[COLUMN["l2"]], rel=1e-3)


def test_reading_leaves_no_graph_and_no_trace() -> None:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 2 * CHUNK))
    before, state = parameter.detach().clone(), torch.get_rng_state()
    flat = dense(parameter)
    assert flat is not None
    assert not flat.requires_grad
    assert flat.data_ptr() == parameter.data_ptr()
    host_rows([flat])
    device_rows([flat])
    assert torch.equal(parameter.detach(), before)
    assert torch.equal(torch.get_rng_state(), state)
