"""Where the time of a run went, in one line. Pure."""

from __future__ import annotations

from typing import Final

from tocsin.schemas.records.goodput import PARTS, Goodput
from tocsin.schemas.text import share_text

NAMES: Final = {
    "productive": "productive",
    "redone": "lost and redone",
    "unknown": "unknown whether kept",
    "starting": "starting",
    "data_wait": "waiting for data",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "other": "other phases",
    "stalled": "stalled",
    "ending": "ending",
    "down": "down",
}


def goodput_line(goodput: Goodput) -> str:
    """`3.2 h in 2 incarnations: 81 % productive, 9 % lost and redone, …`; empty without time."""
    if goodput.wall_s <= 0:
        return ""
    count = goodput.incarnations
    incarnations = f" in {count:,} incarnations" if count > 1 else ""
    shares = ((name, 100 * goodput.part(name) / goodput.wall_s) for name in PARTS)
    # The productive share is printed even if it is nothing.
    parts = [f"{share_text(p)} % {NAMES[n]}" for n, p in shares if p >= 0.05 or n == PARTS[0]]
    return f"{duration_text(goodput.wall_s)}{incarnations}: {', '.join(parts)}"


def duration_text(seconds: float) -> str:
    """A duration in one unit: `42 s`, `12 min`, `3.2 h`, `2.5 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{float(f'{seconds:.3g}'):g} s"
