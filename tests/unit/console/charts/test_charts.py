"""Charts: read back as XML, by their geometry, and by what they tell a screen reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypedDict
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tocsin.console.charts import (
    Bar,
    Box,
    Line,
    Mark,
    bar_chart,
    box_chart,
    heat_map,
    histogram,
    line_chart,
    ribbon_chart,
    share_bar,
    sparkline,
    stacked_chart,
)
from tocsin.console.charts.heat_map import distinct

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    '"><script>alert(1)</script><a href="javascript:x" onload=\'y\'>&amp;'
    "\x00\x1b[31m\u202e\ufffe\ud800"
)
STEPS = np.arange(100)


def parsed(svg: str) -> ElementTree.Element:
    svg.encode()
    return ElementTree.fromstring(svg)


def of_class(svg: str, *names: str) -> list[ElementTree.Element]:
    """The elements that have all of these classes, in order."""
    found = []
    for one in parsed(svg).iter():
        if set(names) <= set(one.get("class", "").split()):
            found.append(one)
    return found


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in parsed(svg).iter(f"{SVG}text")]


def description(svg: str) -> str:
    found = parsed(svg).find(f"{SVG}desc")
    assert found is not None
    assert found.text is not None
    return found.text


def line(
    values: Sequence[float],
    *,
    unit: str | None = None,
    limit: float | None = None,
    marks: Sequence[Mark] = (),
) -> str:
    xs = np.arange(len(values))
    series = Line.from_values("loss", xs, values)
    return line_chart([series], title="Loss", unit=unit, limit=limit, marks=marks)


class Told(TypedDict):
    title: str
    description: str


def every_kind(name: str) -> dict[str, str]:
    """Each kind of chart, with a name of somebody's in each place where there is one."""
    marks = [Mark(20, "critical", name), Mark(60, "warning", name), Mark(80, "info", name)]
    values = np.sin(STEPS / 9) + 2
    lines = [Line.from_values(name, STEPS, values), Line.from_values(name + "2", STEPS, values + 1)]
    cells = np.vstack([values, values * 3])
    quantiles = {"min": values - 2, "p05": values - 1, "p50": values, "p95": values + 1,
                 "max": values + 2}  # fmt: skip
    box = Box(name=name, p05=1, p25=2, p50=3, p75=4, p95=5)
    told = Told(title=name, description=name)
    return {
        "line": line_chart(lines, marks=marks, limit=2.5, limit_name=name, x_name=name, **told),
        "stacked": stacked_chart(lines, marks=marks, **told),
        "ribbon": ribbon_chart(STEPS, quantiles, marks=marks, limit=1, **told),
        "heat": heat_map([name, name], STEPS, cells, marks=marks, **told),
        "bars": bar_chart([Bar(name, 3, "critical", name)], limit=2, limit_name=name, **told),
        "share": share_bar([Bar(name, 3), Bar("b", 1)], **told),
        "boxes": box_chart([box], limit=3, limit_name=name, **told),
        "histogram": histogram(values, name=name, **told),
        "sparkline": sparkline(values, title=name),
    }


KINDS = sorted(every_kind("x"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_chart_is_xml_with_a_role_and_a_title(kind: str) -> None:
    root = parsed(every_kind("loss")[kind])
    assert root.get("role") == "img"
    assert root[0].tag == f"{SVG}title"
    assert root[0].text == "loss"
    assert root[1].tag == f"{SVG}desc"
    assert root[1].text


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_anybody_are_text(kind: str) -> None:
    """No name makes an element, an attribute, or a character that XML forbids."""
    svg = every_kind(HOSTILE)[kind]
    tags = {one.tag.removeprefix(SVG) for one in parsed(svg).iter()}
    assert tags <= {
        "svg",
        "title",
        "desc",
        "g",
        "line",
        "path",
        "rect",
        "circle",
        "polygon",
        "text",
    }
    attributes = {name for one in parsed(svg).iter() for name in one.attrib}
    assert not {name for name in attributes if name.startswith("on") or name in ("href", "style")}
    assert not re.search(r"[\x00-\x1f\u202e\ufffe]", svg)


@pytest.mark.parametrize("kind", KINDS)
def test_no_chart_has_a_style_of_its_own(kind: str) -> None:
    """A strict content security policy would refuse it."""
    assert "style=" not in every_kind("loss")[kind]
    assert "<style" not in every_kind("loss")[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_numbers_give_equal_charts(kind: str) -> None:
    assert every_kind("loss")[kind] == every_kind("loss")[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_coordinates_are_inside_of_the_picture(kind: str) -> None:
    root = parsed(every_kind("loss")[kind])
    width, height = (float(root.get(name, "")) for name in ("width", "height"))
    for one in root.iter():
        for names, most in ((("x", "x1", "x2", "cx"), width), (("y", "y1", "y2", "cy"), height)):
            places = [float(value) for name in names if (value := one.get(name)) is not None]
            assert all(-1 <= place <= most + 1 for place in places), (one.tag, one.attrib)


EMPTY: dict[str, Callable[[], str]] = {
    "no line": lambda: line_chart([], title="t"),
    "a line without points": lambda: line_chart([Line.from_values("a", [], [])], title="t"),
    "only NaN": lambda: line([np.nan] * 9),
    "no parts": lambda: stacked_chart([], title="t"),
    "parts without points": lambda: stacked_chart([Line.from_values("a", [], [])], title="t"),
    "no ribbon": lambda: ribbon_chart([], {}, title="t"),
    "ribbon of NaN": lambda: ribbon_chart([1, 2], {"p50": [np.nan] * 2}, title="t"),
    "no rows": lambda: heat_map([], [], np.empty((0, 0)), title="t"),
    "cells of NaN": lambda: heat_map(["a"], [1, 2], np.full((1, 2), np.nan), title="t"),
    "no bars": lambda: bar_chart([], title="t"),
    "no shares": lambda: share_bar([Bar("a", 0)], title="t"),
    "no boxes": lambda: box_chart([], title="t"),
    "no values": lambda: histogram([np.nan], title="t"),
    "no sparks": lambda: sparkline([], title="t"),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_chart_without_values_says_so(kind: str) -> None:
    assert "o values" in description(EMPTY[kind]()) or "no finite value" in description(
        EMPTY[kind]()
    )


def test_a_line_goes_where_its_values_are() -> None:
    """Higher values are drawn higher, and the ends of the data are those of the field."""
    path = of_class(line([0, 10, 5]), "line", "s0")[0]
    (x0, y0), (x1, y1), (x2, y2) = points(path)
    assert x0 < x1 < x2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y2 > y1
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.2)


def test_a_spike_is_drawn_however_many_points_there_are() -> None:
    values = np.ones(200_000)
    values[123_457] = 9.0
    svg = line(values.tolist())
    tops = [y for _, y in points(of_class(svg, "line", "s0")[0])]
    assert len(tops) < 2_000
    assert min(tops) < max(tops) - 50
    assert "highest 9" in description(svg)


def test_nan_interrupts_the_line_and_is_shaded() -> None:
    values = [1.0, 2, np.nan, np.nan, 3, 4]
    svg = line(values)
    assert of_class(svg, "line", "s0")[0].get("d", "").count("M") == 2
    shade = of_class(svg, "gap")
    assert len(shade) == 1
    assert "not finite first at step 2" in description(svg)


def test_infinity_is_told_apart_from_nan() -> None:
    values = np.ones(40)
    values[5:25] = np.inf
    assert "infinite" in texts(line(values.tolist()))


def test_a_missing_value_interrupts_the_line_without_shade() -> None:
    svg = line_chart(
        [Line.from_values("cpu", [0, 1, 2], [1, np.nan, 2], missing=True)], title="CPU"
    )
    assert of_class(svg, "gap") == []
    assert of_class(svg, "line", "s0")[0].get("d", "").count("M") == 2


def test_each_severity_has_a_shape_of_its_own() -> None:
    marks = [Mark(0, "info", "a"), Mark(50, "warning", "b"), Mark(99, "critical", "c")]
    svg = line(list(range(100)), marks=marks)
    shapes = {
        severity: (one.tag.removeprefix(SVG), len(one.get("points", "").split()))
        for severity in ("info", "warning", "critical")
        for one in of_class(svg, "mark", severity)
    }
    assert shapes == {"info": ("circle", 0), "warning": ("polygon", 3), "critical": ("polygon", 4)}
    assert "critical at step 99: c" in description(svg)


def test_a_mark_is_at_its_step() -> None:
    svg = line(list(range(101)), marks=[Mark(50, "critical", "half")])
    places = points(of_class(svg, "line", "s0")[0])
    at = float(of_class(svg, "at", "critical")[0].get("x1", ""))
    assert at == pytest.approx((places[0][0] + places[-1][0]) / 2, abs=0.2)


def test_marks_at_almost_one_place_are_one_with_their_number() -> None:
    marks = [Mark(50, "info", "a"), Mark(50, "critical", "b"), Mark(51, "warning", "c")]
    svg = line(list(range(1000)), marks=marks)
    assert [one.get("class") for one in of_class(svg, "mark")] == ["mark critical"]
    assert "3" in texts(svg)


def test_marks_outside_of_the_axis_are_left_out() -> None:
    assert of_class(line([1, 2, 3], marks=[Mark(77, "info", "later")]), "mark") == []


def test_values_far_apart_get_a_logarithmic_axis() -> None:
    ticks = texts(line([0.001, 1, 1000]))
    assert {"0.01", "1", "100"} <= set(ticks)
    path = of_class(line([0.001, 1, 1000]), "line", "s0")[0]
    (_, y0), (_, y1), (_, y2) = points(path)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_a_limit_near_the_data_is_drawn_and_one_far_away_is_told() -> None:
    assert len(of_class(line([1, 2, 3], limit=4), "limit")) == 1
    far = line([1, 2, 3], limit=1e6)
    assert of_class(far, "limit") == []
    assert any("1,000,000" in text and "↑" in text for text in texts(far))


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([0.001, 0.009], "s", "ms"),
        ([600, 5000], "s", "min"),
        ([0, 5 * 1024**3], "bytes", "GiB"),
        ([0, 90], "percent", "100 %"),
        ([0, 3e-7], None, "e-7"),
    ],
)
def test_ticks_have_a_unit_that_suits_them(
    values: list[float], unit: str | None, expected: str
) -> None:
    assert any(expected in text for text in texts(line(values, unit=unit)))


def test_areas_lie_on_one_another() -> None:
    low = Line.from_values("a", STEPS, np.full(100, 1.0))
    high = Line.from_values("b", STEPS, np.full(100, 3.0))
    svg = stacked_chart([low, high], title="t")
    first, second = (points(one) for one in of_class(svg, "area") if one.tag == f"{SVG}path")
    floor, middle, top = (
        max(y for _, y in first),
        min(y for _, y in first),
        min(y for _, y in second),
    )
    assert max(y for _, y in second) == pytest.approx(middle, abs=0.2)
    assert middle - top == pytest.approx(3 * (floor - middle), rel=0.01)


def test_a_spike_in_an_area_has_a_line_of_its_own() -> None:
    values = np.ones(50_000)
    values[31_000] = 9.0
    svg = stacked_chart([Line.from_values("a", np.arange(50_000), values)], title="t")
    (peak,) = of_class(svg, "line", "peak")
    ys = [y for _, y in points(peak)]
    assert max(ys) - min(ys) > 100
    area = next(one for one in of_class(svg, "area") if one.tag == f"{SVG}path")
    assert min(y for _, y in points(area)) > min(ys) + 100
    assert "highest sum 9" in description(svg)


def test_short_steps_are_no_comb() -> None:
    """Each tenth takes thirty times as long: they are seen together with those around them."""
    count = 300
    values = np.where(np.arange(count) % 10 == 0, 0.03, 0.001)
    values *= np.exp(0.3 * np.random.default_rng(1).standard_normal(count))
    svg = stacked_chart([Line.from_values("a", np.arange(count), values)], title="t", unit="s")
    (area,) = (one for one in of_class(svg, "area") if one.tag == f"{SVG}path")
    floor = max(y for _, y in points(area))
    tops = [floor - y for _, y in points(area) if y < floor]
    assert max(tops) < 3 * min(tops)
    (peak,) = of_class(svg, "line", "peak")
    assert max(tops) > (floor - min(y for _, y in points(peak))) / 5


def test_far_outliers_are_in_the_last_bar() -> None:
    values = np.concatenate([np.linspace(1, 2, 500), [90.0]])
    svg = histogram(values, title="t", name="steps")
    bars = of_class(svg, "bar")
    assert "and more" in (bars[-1][0].text or "")
    assert "1 above" in description(svg)


def test_shares_are_not_drawn_in_logarithms() -> None:
    ticks = texts(line([0.001, 1, 100], unit="percent"))
    assert {"0 %", "100 %"} <= set(ticks)


def test_parts_with_other_places_are_refused() -> None:
    with pytest.raises(ValueError, match="same places"):
        stacked_chart([Line.from_values("a", [1], [1]), Line.from_values("b", [2], [1])], title="t")


def test_ribbons_keep_their_widest_place() -> None:
    count = 50_000
    low, high = np.zeros(count), np.ones(count)
    low[31_000], high[31_000] = -9, 9
    svg = ribbon_chart(np.arange(count), {"p05": low, "p50": low * 0, "p95": high}, title="t")
    ys = [y for _, y in points(of_class(svg, "ribbon", "wide")[-1])]
    assert len(ys) < 2_000
    assert max(ys) - min(ys) > 100


def test_cells_get_darker_with_their_value() -> None:
    svg = heat_map(["a", "b"], [0, 1], np.array([[0, 5], [10, np.nan]]), title="t")
    classes = [one.get("class") for one in parsed(svg).iter(f"{SVG}path") if one.get("d")]
    assert classes == ["h0", "h8", "h15"]


def test_an_infinite_cell_has_a_colour_of_its_own() -> None:
    svg = heat_map(["a"], [0, 1], np.array([[1, np.inf]]), title="t")
    assert len(of_class(svg, "nonfinite")) == 1


def test_places_of_nan_that_touch_are_shaded_as_one() -> None:
    steps = np.arange(40_000.0)
    values = np.where(steps % 2 == 0, 1.0, np.nan)
    svg = line_chart([Line("eval", steps, values)], title="t", width=460)
    assert len(of_class(svg, "gap")) == 1
    assert "step 1 to 39,999, in 20,000 places" in svg
    assert len(svg) < 60_000
    apart = np.where(np.isin(steps, [100, 30_000]), np.nan, 1.0)
    assert len(of_class(line_chart([Line("eval", steps, apart)], title="t"), "gap")) == 2


def test_a_hot_cell_stays_in_a_map_of_many_steps() -> None:
    cells = np.zeros((500, 5_000))
    cells[321, 4_321] = 1.0
    svg = heat_map([f"layer.{i}.weight" for i in range(500)], np.arange(5_000), cells, title="t")
    assert len(of_class(svg, "h15")) >= 2  # its cell, and the scale
    assert len(svg) < 60_000


def test_each_row_has_its_name_where_it_is_though_only_some_have_room_for_it() -> None:
    svg = heat_map([f"row {i}" for i in range(20)], np.arange(4), np.ones((20, 4)), title="t")
    rows = of_class(svg, "row")
    assert len(rows) == 20
    shown = [row for row in rows if row.get("visibility") is None]
    assert len(shown) == 10
    heights = [float(row.get("y", "")) for row in rows]
    assert np.diff(heights) == pytest.approx(np.diff(heights)[0], abs=0.11)


def test_rows_show_what_tells_them_apart() -> None:
    names = [f"model.encoder.layers.{i}.attention.output.dense.weight" for i in range(3)]
    assert len(set(distinct(names, 120))) == 3
    assert all(str(i) in name for i, name in enumerate(distinct(names, 120)))
    assert distinct(["a", "b"], 100) == ["a", "b"]


def test_a_bar_is_as_long_as_its_value() -> None:
    svg = bar_chart([Bar("a", 10), Bar("b", 5, "warning")], title="t")
    first, second = of_class(svg, "bar")
    assert float(first.get("width", "")) == pytest.approx(
        2 * float(second.get("width", "")), abs=0.2
    )
    assert second.get("class") == "bar warning"


def test_shares_fill_the_bar() -> None:
    svg = share_bar([Bar("a", 75), Bar("b", 25), Bar("none", 0)], title="t")
    wide, narrow = (one for one in of_class(svg, "area") if float(one.get("height", "")) > 20)
    assert float(wide.get("width", "")) == pytest.approx(
        3 * float(narrow.get("width", "")), abs=0.3
    )
    assert "75 %" in description(svg)
    assert "none" not in description(svg)


def test_the_bars_of_a_histogram_count_all_values() -> None:
    svg = histogram(np.concatenate([np.zeros(30), np.ones(10), [np.nan]]), title="t", name="steps")
    counts = [
        int(match[1])
        for one in of_class(svg, "bar")
        if (match := re.search(r": (\d+) steps", one[0].text or ""))
    ]
    assert counts == [30, 10]
    assert "1 more are not finite" in description(svg)


finite = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=40)
@given(st.lists(finite, max_size=40))
@example([1.7976931348623157e308, -9.9792015476736e291])
def test_no_numbers_break_a_chart(values: list[float]) -> None:
    count = len(values)
    lines = [Line.from_values("a", np.arange(count), values)]
    for svg in (
        line_chart(lines, title="t", unit="s", limit=3.0, marks=[Mark(1, "info", "m")]),
        stacked_chart(lines, title="t", unit="bytes"),
        ribbon_chart(np.arange(count), {"p05": values, "p95": values, "p50": values}, title="t"),
        heat_map(["a"], np.arange(count), np.array([values]).reshape(1, count), title="t"),
        histogram(values, title="t"),
        sparkline(values, title="t"),
        bar_chart([Bar("a", value) for value in values], title="t"),
    ):
        parsed(svg)
        assert not re.search(r'="[^"]*(nan|inf)\b', svg)
