"""Decimation, scales, numbers and colours: the parts of charts."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.console.charts import decimate, style_source, stylesheet, value_text
from tocsin.console.charts.decimation import kept_points
from tocsin.console.charts.marks import Mark, mark_texts
from tocsin.console.charts.markup import shortened, text_width
from tocsin.console.charts.numbers import tick_texts
from tocsin.console.charts.scale import Scale, along, fitted, ticks

some = st.one_of(st.floats(-1e6, 1e6), st.just(float("nan")), st.just(float("inf")))


@given(st.lists(some, min_size=1, max_size=400), st.integers(1, 20))
def test_decimation_keeps_ends_extremes_and_gaps(values: list[float], n: int) -> None:
    y = np.array(values)
    xs, ys = decimate(np.arange(len(y)), y, n)
    assert len(xs) <= 3 * n + 2
    assert (xs[0], xs[-1]) == (0, len(y) - 1)
    assert bool((np.diff(xs) > 0).all())
    finite = y[np.isfinite(y)]
    if finite.size:
        assert np.nanmin(ys[np.isfinite(ys)]) == finite.min()
        assert np.nanmax(ys[np.isfinite(ys)]) == finite.max()
    assert np.isfinite(y).all() == np.isfinite(ys).all()


def test_few_points_are_all_kept() -> None:
    assert kept_points(np.arange(10.0), 5).tolist() == list(range(10))


def test_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="0 groups"):
        decimate([1], [1], 0)


@given(
    st.floats(-1e9, 1e9, allow_subnormal=False),
    st.floats(1e-6, 1e9),
    st.sampled_from([None, "s", "bytes", "percent"]),
)
def test_ticks_are_inside_of_the_axis_and_told_apart(
    low: float, spread: float, unit: str | None
) -> None:
    scale = fitted(np.array([low, low + spread]), start=200, end=0, unit=unit)
    found = ticks(scale, 5, unit=unit)
    room = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - room <= tick <= scale.high + room for tick in found)
    assert 1 <= len(found) <= 12
    if spread > 1e-5 * abs(low):
        assert len(set(tick_texts(found, unit))) == len(found)


def test_steps_have_whole_ticks() -> None:
    found = ticks(along(0, 3, start=0, end=100), 10, whole=True)
    assert found == [0, 1, 2, 3]


def test_times_have_the_ticks_of_clocks() -> None:
    found = ticks(along(0, 7200, start=0, end=600), 6, unit="s")
    assert tick_texts(found, "s") == [f"{15 * n} min" for n in range(9)]
    assert tick_texts(ticks(along(0, 60, start=0, end=600), 6, unit="s"), "s")[1] == "10 s"
    found = ticks(along(0, 100 * 86_400, start=0, end=600), 6, unit="s")
    assert tick_texts(found, "s") == ["0 d", "20 d", "40 d", "60 d", "80 d", "100 d"]


def test_steps_have_all_their_digits() -> None:
    found = ticks(along(12_000_000, 12_000_030, start=0, end=600), 3, whole=True)
    texts = ["12,000,000", "12,000,010", "12,000,020", "12,000,030"]
    assert tick_texts(found, whole=True) == texts
    assert value_text(12_345_678, digits=12) == "12,345,678"
    mark = Mark(1_234_567, "critical", "NaN")
    assert mark_texts([mark], "step") == "Marked: critical at step 1,234,567: NaN"


def test_a_logarithmic_scale_has_decades() -> None:
    scale = Scale(low=0.01, high=1000, start=0, end=5, logarithmic=True)
    assert scale.at(np.array([0.1, 1])).tolist() == pytest.approx([1, 2])
    assert np.isnan(scale.at(np.array([0.0, -1]))).all()
    assert ticks(scale, 10) == pytest.approx([0.01, 0.1, 1, 10, 100, 1000])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0234, "s", "23.4 ms"),
        (90, "s", "90 s"),
        (7200, "s", "2 h"),
        (3e-5, "s", "30 µs"),
        (1.5 * 1024**3, "bytes", "1.5 GiB"),
        (1.5 * 1024**3, "B", "1.5 GiB"),
        (512, "bytes/s", "512 B/s"),
        (45.678, "percent", "45.7 %"),
        (45.678, "%", "45.7 %"),
        (1_769_472, None, "1,769,472"),
        (0.00012345, None, "1.23e-4"),
        (float("nan"), "s", "NaN"),
        (0, "bytes", "0 B"),
        (12, "tensors", "12 tensors"),
    ],
)
def test_values_have_a_unit_that_suits_them(value: float, unit: str | None, text: str) -> None:
    assert value_text(value, unit) == text


@given(st.text(max_size=80), st.floats(20, 300))
def test_a_shortened_name_fits(name: str, width: float) -> None:
    assert text_width(shortened(name, width)) <= max(width, 24 + 12 * 3)


# Colours


def colours(mode: int) -> dict[str, tuple[float, float, float]]:
    """The variables of the stylesheet in light (0) or dark (1), as red, green, blue."""
    found = {}
    for name, *pair in re.findall(
        r"--chart-(\w+): light-dark\(#(\w{6})\w*, #(\w{6})\w*\)", stylesheet()
    ):
        text = pair[mode]
        found[name] = tuple(int(text[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return found  # type: ignore[return-value]


def luminance(colour: tuple[float, float, float]) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_are_seen_on_their_surface(mode: int) -> None:
    found = colours(mode)
    assert len(found) >= 30
    for name in ("ink", "muted"):
        assert contrast(found[name], found["surface"]) >= 4.5, name
    for name in [*(f"s{i}" for i in range(8)), "critical", "warning", "info"]:
        assert contrast(found[name], found["surface"]) >= 3, name


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_heat_is_a_scale_of_light_alone(mode: int) -> None:
    """So it is read without any sight of hue, and on paper."""
    found = colours(mode)
    levels = [luminance(found[f"h{i}"]) for i in range(16)]
    ascending = sorted(levels, reverse=mode == 0)
    assert levels == ascending
    assert len(set(levels)) == 16


def test_each_class_of_the_palette_has_a_rule() -> None:
    css = stylesheet()
    for i in range(8):
        assert f".line.s{i}" in css
        assert f".s{i}:is(.area" in css
    for i in range(16):
        assert f".h{i} {{" in css


def test_the_source_of_a_style_is_its_hash() -> None:
    assert style_source("") == "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
