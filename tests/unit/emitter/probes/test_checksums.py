"""Checksums: equal for equal bits, different for any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.emitter.probes import checksums
from tocsin.emitter.probes.checksums import Checksums
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tables import Table
from tocsin.schemas.records.frames import RecordOrigin, TensorFrame


def table(parameters: list[tuple[str, torch.Tensor]]) -> Table:
    found = Checksums(parameters)
    assert found.ready
    (one,) = found.tables()
    return one


def host(tensor: torch.Tensor) -> int:
    return int(table([("a", tensor)]).counts[0, 0])


def device(tensor: torch.Tensor) -> int:
    flat = dense(tensor)
    assert flat is not None
    return int(checksums._on_device(flat))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2000), st.data())
def test_any_single_bit_counts(n: int, data: st.DataObject) -> None:
    tensor = torch.linspace(-1, 1, n)
    place = data.draw(st.integers(0, n - 1))
    bit = data.draw(st.integers(0, 31))
    other = tensor.clone()
    flipped = other.numpy().view(np.uint32)
    flipped[place] ^= np.uint32(1 << bit)
    for checksum in (host, device):
        assert checksum(tensor) == checksum(tensor.clone())
        assert checksum(tensor) != checksum(other)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
@pytest.mark.parametrize("n", [1, 7, 513, 200_001])
def test_types_and_sizes(dtype: torch.dtype, n: int) -> None:
    tensor = torch.linspace(-1, 1, n).to(dtype)
    tensor[-1] = 0.25
    other = tensor.clone()
    other[-1] = 0.5
    for checksum in (host, device):
        assert checksum(tensor) == checksum(tensor.clone())
        assert checksum(tensor) != checksum(other)


def test_numbers_that_have_changed_places() -> None:
    tensor = torch.linspace(-1, 1, 300_000)
    for first, second in ((0, 1), (3, 299_999), (0, 2 * 65_536 + 2)):
        other = tensor.clone()
        other[[first, second]] = tensor[[second, first]]
        for checksum in (host, device):
            assert checksum(tensor) != checksum(other)


def test_a_view_into_memory_has_the_sum_of_its_numbers() -> None:
    base = torch.linspace(-1, 1, 5000)
    assert host(base[1:1200]) == host(base[1:1200].clone())
    matrix = base[:4000].view(40, 100)
    assert host(matrix[:, 3:50]) == host(matrix[:, 3:50].contiguous())


def test_empty_and_unreadable_parameters() -> None:
    found = table([("a", torch.zeros(0)), ("b", torch.zeros(3, device="meta"))])
    assert (found.names, found.counts.tolist()) == (("a",), [[0]])
    assert table([]).names == ()


def test_a_frame_holds_them() -> None:
    one = table([("a", torch.ones(5)), ("b", -torch.ones(5))])
    frame = TensorFrame(
        origin=RecordOrigin(run_id="r", incarnation="00000000-0000-0000-0000-000000000001"),
        step=100,
        collection=one.collection,
        rows=one.names,
        columns=one.columns,
        values=one.values,
        count_columns=one.count_columns,
        counts=one.counts,
    )
    found = TensorFrame.decode(frame.encode()).count("checksum")
    assert found is not None
    assert found.tolist() == one.counts[:, 0].tolist()
    assert max(found.tolist()) > 2**53


def test_parameters_of_a_large_model_share_rows() -> None:
    parameters = [(f"p{i}", torch.full((3,), float(i))) for i in range(1500)]
    first = table(parameters)
    assert len(first.names) == checksums.GROUPS
    assert first.names[0] == "p0 … p22"
    parameters[700][1][1] += 1e-3
    (odd,) = np.flatnonzero(first.counts[:, 0] != table(parameters).counts[:, 0])
    start, end = (int(name.removeprefix("p")) for name in first.names[odd].split(" … "))
    assert start <= 700 <= end
