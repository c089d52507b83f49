"""Elements of SVG as strings: what others wrote is escaped here, and nowhere else. Pure."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import Final

import numpy as np

from tocsin.console.charts.numbers import Floats
from tocsin.schemas.text import plain_line

_NO_XML: Final = {0xFFFE: None, 0xFFFF: None}
"""Characters that are printable for Unicode's categories, and not allowed in XML."""

_WIDE: Final = frozenset("WF")


def words(text: str) -> str:
    """Text of anybody as it may stand in an element or in an attribute between quotes."""
    return escape(plain_line(text).translate(_NO_XML), quote=True)


def element(tag: str, *children: str, **attributes: str | float | None) -> str:
    """One element. `children` are markup already; values of attributes are escaped.

    `class_` is the attribute `class`, `text_anchor` is `text-anchor`; None leaves one out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{''.join(children)}</{tag}>" if children else f"<{tag}{given}/>"


def titled(title: str) -> str:
    """The child that gives an element its name, for a pointer and for a screen reader."""
    return element("title", words(title))


def image(
    *children: str, width: float, height: float, title: str, description: str, kind: str
) -> str:
    """A whole picture: an `<svg>` with a role, a title and a description."""
    return element(
        "svg",
        titled(title),
        element("desc", words(description)) if description else "",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        class_=f"chart {kind}",
        role="img",
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
        width=width,
        height=height,
    )


def coordinate(value: float) -> str:
    """A place in a picture, to a tenth of a unit: `12.3`, `40`."""
    text = f"{value:.1f}"
    text = text[:-2] if text.endswith(".0") else text
    return "0" if text == "-0" else text


def path_points(x: Floats, y: Floats) -> str:
    """The data of a path through the points; where one is not finite, the path is interrupted.

    A point between two interruptions is a line of no length, which a round cap makes a dot.
    """
    parts: list[str] = []
    for start, stop in finite_stretches(np.isfinite(x) & np.isfinite(y)):
        places = zip(x[start:stop], y[start:stop], strict=True)
        points = [f"{coordinate(a)} {coordinate(b)}" for a, b in places]
        parts.append(f"M{points[0]}" + (f"L{' '.join(points[1:])}" if points[1:] else "h0"))
    return "".join(parts)


def finite_stretches(finite: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """The stretches of True, each as the index of its first and that after its last one."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], finite, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def shortened(text: str, width: float, size: float = 12) -> str:
    """A name that fits into `width`: what is left out is its middle, for ends tell names apart."""
    text = plain_line(text)
    if text_width(text, size) <= width:
        return text
    kept = max(int(width / (0.58 * size)), 2)
    while True:
        head = max(kept // 3, 1)
        found = f"{text[:head]}…{text[len(text) - (kept - head) :]}"
        if kept <= 2 or text_width(found, size) <= width:
            return found
        kept -= 1


def text_width(text: str, size: float = 12) -> float:
    """About how wide a text is drawn: fonts differ, and none is measured."""
    return sum(
        size * (1.0 if unicodedata.east_asian_width(character) in _WIDE else 0.58)
        for character in text
    )


def joined(parts: Iterable[str]) -> str:
    """Parts of a description, as sentences."""
    return " ".join(f"{part}." for part in parts if part)


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return words(value)
    return coordinate(value) if math.isfinite(value) else "0"
