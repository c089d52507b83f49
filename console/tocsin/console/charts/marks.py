"""Where an issue began, marked in a chart: its severity has a shape and a colour. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.console.charts.markup import coordinate, element, titled, words
from tocsin.console.charts.numbers import value_text
from tocsin.console.charts.scale import Scale
from tocsin.schemas.records.issues import SEVERITIES, Severity

_NEAR: Final = 14.0
"""Marks that are closer than this are drawn as one, with their number."""

_HALF: Final = 5.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a place of the horizontal axis: an issue, as a rule.

    Attributes:
        step: the place on the axis: a step, or seconds where the axis counts those.
        label: what happened, for a pointer and a screen reader.
    """

    step: float
    severity: Severity
    label: str


def shape(severity: Severity, x: float, y: float, *, half: float = _HALF) -> str:
    """A diamond for critical, a triangle for a warning, a disc for info."""
    kind = f"mark {severity}"
    if severity == "info":
        return element("circle", cx=x, cy=y, r=half, class_=kind)
    points: tuple[tuple[float, float], ...]
    if severity == "warning":
        points = ((x, y - half), (x + half, y + half), (x - half, y + half))
    else:
        wide = half * 1.25
        points = ((x, y - wide), (x + wide, y), (x, y + wide), (x - wide, y))
    drawn = " ".join(f"{coordinate(a)},{coordinate(b)}" for a, b in points)
    return element("polygon", points=drawn, class_=kind)


def drawn_marks(marks: Sequence[Mark], scale: Scale, top: float, bottom: float) -> str:
    """A line at each place, under the shape of its severity; those outside of the scale are left
    out. Several at almost the same place are one, of the gravest severity, with their number.
    """
    inside = sorted((mark for mark in marks if scale.inside(mark.step)), key=lambda m: m.step)
    groups: list[list[Mark]] = []
    for mark in inside:
        if groups and scale.place(mark.step) - scale.place(groups[-1][0].step) < _NEAR:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return "".join(_group(group, scale, top, bottom) for group in groups)


def mark_texts(marks: Sequence[Mark], x_name: str, limit: int = 5) -> str:
    """The marks in words: `critical at step 900: NaN in …; …`; empty without any."""
    if not marks:
        return ""
    texts = [
        f"{m.severity} at {x_name} {value_text(m.step, digits=12)}: {m.label.rstrip('.')}"
        for m in marks[:limit]
    ]
    more = f"; and {len(marks) - limit:,} more" if len(marks) > limit else ""
    return f"Marked: {'; '.join(texts)}{more}"


def _group(group: Sequence[Mark], scale: Scale, top: float, bottom: float) -> str:
    worst = max(group, key=lambda mark: SEVERITIES.index(mark.severity))
    x = scale.place(worst.step)
    label = "; ".join(f"{mark.severity}: {mark.label}" for mark in group[:8])
    if len(group) > 8:
        label += f"; and {len(group) - 8:,} more"
    count = ""
    if len(group) > 1:
        count = element(
            "text", words(f"{len(group):,}"), x=x + _HALF + 3, y=top + 4, class_="count"
        )
    line = element("line", x1=x, y1=top + _HALF, x2=x, y2=bottom, class_=f"at {worst.severity}")
    return element("g", titled(label), line, shape(worst.severity, x, top), count)
