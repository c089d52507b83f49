"""How numbers, times and places are written for people, and text made safe to show. Pure."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime
from typing import Final

from tocsin.schemas.records.checkpoints import VERIFIED_STEPS, Checkpoint
from tocsin.schemas.records.issues import Fact, Issue, Series, Subject


def plain_line(text: str) -> str:
    """`text` in one line, without what moves a cursor, hides text or turns its direction."""
    return " ".join(still(text).split())


def still(text: str) -> str:
    """`plain_line`, but with its spaces, for columns."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(" " if unicodedata.category(c) in _UNPRINTED else c for c in text)


def number_text(value: float) -> str:
    """A number as people read it: `1,769,472`, `0.00125`, `NaN`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.6g}"


def counted(number: int, one: str, many: str = "") -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def share_text(percent: float) -> str:
    """A share as people read it, without its unit: `0.012`, `4.2`, `100`."""
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"


def unit_suffix(unit: str | None) -> str:
    """A unit as it follows a number, with its space; empty if there is none."""
    return {"percent": " %", None: ""}.get(unit, f" {unit}")


def time_text(at_ms: int) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def exit_text(how: str | None) -> str:
    """How a job exited after a stop: `cleanly`, `before the stop`, `by SIGTERM`; "" if unknown."""
    if how is None:
        return ""
    return {"edge": "cleanly", "itself": "before the stop"}.get(how, f"by {how}")


def checkpoint_text(good: Checkpoint) -> str:
    """The checkpoint to go back to: `/data/1000.pt (step 1,000), the newest verified one …`."""
    step = "before the first step" if good.step < 0 else f"step {good.step:,}"
    which = {
        True: f"the newest from before the onset that {VERIFIED_STEPS} healthy steps followed",
        False: "the newest from before the onset; fewer than "
        f"{VERIFIED_STEPS} healthy steps followed it",
        None: "the newest from before the onset",
    }[good.verified]
    return f"{plain_line(good.path)} ({step}), {which}"


def where_text(issue: Issue) -> str:
    """Where it began: `gradients of layer.weight, rank 1, step 1,200`."""
    parts = [_subject(issue.subject)]
    if issue.first_rank is not None and issue.subject.kind != "rank":
        parts.append(f"rank {issue.first_rank:,}")
    if issue.first_step is not None:
        parts.append(f"step {issue.first_step:,}")
    return ", ".join(parts)


def fact_text(fact: Fact) -> str:
    """One fact with its unit and limit: `ratio 41.2 (limit 20)`."""
    unit = unit_suffix(fact.unit)
    value = fact.value if isinstance(fact.value, str) else number_text(fact.value)
    limit = "" if fact.limit is None else f" (limit {number_text(fact.limit)}{unit})"
    return f"{fact.name.replace('_', ' ')} {value}{unit}{limit}"


def place_text(series: Series, x: int) -> str:
    """Where a point of a series stands: `step 1,200`, or `at 1,200 s`."""
    return f"step {x:,}" if series.x is None else f"at {x:,} s"


def _subject(subject: Subject) -> str:
    if subject.collection == "inputs":
        return subject.name if " of " in subject.name else f"input {subject.name}"
    if subject.collection is not None:
        return f"{subject.collection} of {subject.name}"
    kinds = {"tensor", "layer", "scalar", "device", "node"}
    return f"{subject.kind} {subject.name}" if subject.kind in kinds else subject.name


_UNPRINTED: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
