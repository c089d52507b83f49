"""Sampled quantiles against NumPy's."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tocsin.emitter.statistics.quantiles import QUANTILES, SAMPLE, quantile_rows
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tensor_quantiles import Quantiles

SHARES = [*QUANTILES.values()]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        hnp.arrays(
            np.float32,
            st.integers(0, 70),
            elements=st.one_of(
                st.floats(-1e4, 1e4, width=32), st.sampled_from([math.nan, math.inf, -math.inf])
            ),
        ),
        max_size=6,
    )
)
def test_quantiles_of_whole_samples_are_numpys(samples: list[npt.NDArray[np.float32]]) -> None:
    found = quantile_rows(samples)
    assert found.shape == (len(samples), 5)
    for row, sample in zip(found, samples, strict=True):
        good = sample[np.isfinite(sample)].astype(np.float64)
        expected = np.quantile(good, SHARES) if good.size else np.zeros(5)
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


def test_a_sample_of_a_large_tensor_is_near_its_quantiles() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(300_000, generator=generator),
        torch.rand(7, generator=generator),
        torch.randn(50_000, generator=generator).to(torch.bfloat16),
        torch.arange(100_000),
        torch.zeros(0),
    ]
    state = torch.get_rng_state()
    quantiles = Quantiles(tensors)
    assert quantiles.ready
    rows = quantiles.rows
    assert torch.equal(torch.get_rng_state(), state)
    for row, tensor in zip(rows[:4], tensors[:4], strict=True):
        values = np.sort(tensor.double().numpy())
        share = np.searchsorted(values, row) / values.size
        np.testing.assert_allclose(share, SHARES, atol=0.06 if values.size > SAMPLE else 0.15)
    assert not rows[4].any()


def test_what_has_not_changed_has_the_same_quantiles() -> None:
    flat = dense(torch.linspace(-1, 1, 100 * SAMPLE))
    assert flat is not None
    assert Quantiles([flat]).rows.tolist() == Quantiles([flat]).rows.tolist()


def test_on_another_device_they_come_later() -> None:
    tensors = [torch.linspace(-1, 1, 5 * SAMPLE), torch.arange(7), torch.zeros(0)]
    expected = Quantiles(tensors).rows
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    quantiles = Quantiles([tensor.cuda() for tensor in tensors])
    torch.cuda.synchronize()
    assert quantiles.ready
    np.testing.assert_allclose(quantiles.rows, expected, rtol=1e-6)
