"""A series as a picture in SVG: the line, its limit, where it began. Pure, and the same each time.

Plain shapes and text, no library: what is drawn depends on the numbers alone, so that a test can
tell whether a picture is current. It follows the reader's dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from tocsin.actions.receivers.drawing import Drawing, drawable
from tocsin.schemas.records.issues import Series
from tocsin.schemas.text import number_text

WIDTH: Final = 720
HEIGHT: Final = 254
_LEFT: Final = 74
_RIGHT: Final = 14
_TOP: Final = 38
_BOTTOM: Final = 36
_TICKS: Final = 6

_STYLE: Final = """\
text { font: 12px system-ui, sans-serif; fill: #444 }
.grid { stroke: #ddd } .line { stroke: #1f5fa8; stroke-width: 1.8; fill: none }
.dot { fill: #1f5fa8 } .limit { stroke: #c26a00; stroke-width: 1.4; stroke-dasharray: 6 4 }
.began { stroke: #c62828; stroke-width: 1.4 } .bad { fill: #c62828; opacity: 0.2 }
text.limit { stroke: none; fill: #a85b00 } text.began { stroke: none; fill: #c62828 }
@media (prefers-color-scheme: dark) { text { fill: #bbb } .grid { stroke: #444 }
.line { stroke: #6aa9ee } .dot { fill: #6aa9ee } text.limit { fill: #e39a3d }
.began { stroke: #ef6a6a } text.began { fill: #ef6a6a } .bad { fill: #ef6a6a } }
"""


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            every = max(1, math.ceil(len(decades) / _TICKS))
            return [10.0**decade for decade in decades][::every]
        step = _nice((self.high - self.low) / _TICKS)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def series_svg(series: Series, *, first_step: int | None, title: str) -> str:
    """The picture as the text of a file.

    Args:
        first_step: marked if it is a step of the series.
        title: the text for a reader who cannot see it.
    """
    drawing = Drawing.from_series(series, first_step)
    across = _across(drawing.steps)
    up = _up(drawing)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE}</style>",
        *_grid(across, up, drawing.x_label),
        _text(_LEFT, 14, drawing.y_label),
    ]
    lines += _bad(drawing.gone, across)
    lines += _drawn(drawing, across, up)
    if (limit := drawing.limit) is not None:
        y = up.at(limit)
        lines.append(_line("limit", _LEFT, y, WIDTH - _RIGHT, y))
        above = y > _TOP + 16
        label = f"limit {_short(limit)}"
        lines.append(_text(_LEFT + 4, y - 5 if above else y + 15, label, kind="limit"))
    if drawing.first_step is not None:
        x = across.at(drawing.first_step)
        left = x > WIDTH / 2
        lines.append(_line("began", x, _TOP, x, HEIGHT - _BOTTOM))
        began = f"began at step {drawing.first_step:,}"
        lines.append(_text(x, 32, began, anchor="end" if left else "start", kind="began"))
    return "\n".join([*lines, "</svg>", ""])


def _across(steps: Sequence[int]) -> _Axis:
    low, high = min(steps), max(steps)
    if low == high:
        low, high = low - 1, high + 1
    return _Axis(low, high, _LEFT, WIDTH - _RIGHT)


def _up(drawing: Drawing) -> _Axis:
    values = drawing.heights or [0.0, 1.0]
    low, high = min(values), max(values)
    bottom, top = float(HEIGHT - _BOTTOM), float(_TOP)
    if drawing.logarithmic:
        return _Axis(low / 1.5, high * 1.5, bottom, top, log=True)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return _Axis(
        low - room if low < 0 or low > 2 * room else min(low, 0.0), high + room, bottom, top
    )


def _grid(across: _Axis, up: _Axis, label: str) -> Iterator[str]:
    for tick in up.ticks():
        y = up.at(tick)
        yield _line("grid", _LEFT, y, WIDTH - _RIGHT, y)
        yield _text(_LEFT - 6, y + 4, _short(tick), anchor="end")
    for tick in across.ticks():
        if tick == round(tick):
            text = f"{round(tick):,}"
            yield _text(across.at(tick), HEIGHT - _BOTTOM + 16, text, anchor="middle")
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    yield _text(middle, HEIGHT - 5, label, anchor="middle")


def _drawn(drawing: Drawing, across: _Axis, up: _Axis) -> Iterator[str]:
    """The line, in pieces where values are missing, with dots where they are few."""
    piece: list[str] = []
    points = zip(drawing.steps, drawing.values, strict=True)
    places = [(across.at(x), up.at(y)) if drawable(y) else None for x, y in points]
    for place in [*places, None]:
        if place is not None:
            piece.append(f"{_px(place[0])},{_px(place[1])}")
        elif piece:
            yield f'<polyline class="line" points="{" ".join(piece)}"/>'
            piece = []
    if drawing.dotted:
        for place in places:
            if place is not None:
                yield f'<circle class="dot" cx="{_px(place[0])}" cy="{_px(place[1])}" r="2.4"/>'


def _bad(steps: Sequence[int], across: _Axis) -> Iterator[str]:
    """Steps whose value is no number, or too large to be drawn."""
    half = max(2.0, (across.end - across.start) / (2 * max(1.0, across.high - across.low)))
    gone = [across.at(step) for step in steps]
    for x in gone:
        left, right = max(x - half, across.start), min(x + half, across.end)
        yield (
            f'<rect class="bad" x="{_px(left)}" y="{_TOP}" width="{_px(right - left)}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"/>'
        )
    if gone:
        yield _text(min(gone[0], WIDTH - 120), _TOP + 14, "NaN or infinite", kind="began")


def _nice(step: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * (1 - 1e-9))


def _short(value: float) -> str:
    """A number in little room: four digits, and a power of ten where there are many."""
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return number_text(float(f"{value:.4g}"))


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _px(value: float) -> str:
    return f"{value:.1f}"
