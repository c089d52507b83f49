"""What can be compared of two runs: series, whose noise a test weighs, and single numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tocsin.console.compare.batch_means import Centre, Change, Floats, change_of
from tocsin.console.report.numbers import PHASES, RunNumbers
from tocsin.store import Series

_SETTLING: Final = 10
"""Steps at the beginning that are left out of times and norms: caches and kernels are made."""

_LAST: Final = 0.2
"""The share of the common steps, the last ones, in which losses are compared."""

_CENTRES: Final[Mapping[str, Centre]] = {"": "median", "mean": "mean", "p95": "p95"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measure of both runs.

    Attributes:
        change: None: the test cannot decide, or one of the runs has no single number.
        tested: whether a test was made; else the two numbers are compared as they are.
        why: why it is not decided; empty otherwise.
    """

    name: str
    unit: str | None
    change: Change | None
    tested: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Pair:
    first: RunNumbers
    second: RunNumbers


def measure_names(first: RunNumbers, second: RunNumbers) -> list[str]:
    """The measures that both runs have."""
    pair = _Pair(first, second)
    found = [name for name in _TIMES if _time(pair, name) is not None]
    found += [name for name in _SINGLE if _single(pair, name) is not None]
    scalars = [name for name in first.run.scalars() if name in set(second.run.scalars())]
    return [*found, *(name for name in scalars if not name.endswith("_s"))]


def measure(first: RunNumbers, second: RunNumbers, name: str) -> Measured | None:
    """One measure of both runs; None: one of them does not have it.

    Names of series may end with `.mean` or `.p95`; the median is the default.
    """
    pair = _Pair(first, second)
    if name in _SINGLE:
        numbers = _single(pair, name)
        return None if numbers is None else _as_they_are(name, *numbers)
    base, _, last = name.rpartition(".")
    centre: Centre = "median"
    name_of_series = name
    values = _time(pair, name) or _scalar(pair, name)
    if values is None and base and last in _CENTRES:
        name_of_series, centre = base, _CENTRES[last]
        values = _time(pair, base) or _scalar(pair, base)
    if values is None:
        return None
    why = _not_finite(name_of_series, *values)
    change = None if why else change_of(*values, centre=centre)
    if change is None and not why:
        counts = " and ".join(f"{np.isfinite(one).sum():,}" for one in values)
        why = f"too few steps that are independent of one another: the runs have {counts}"
    return Measured(name=name, unit=_unit(name_of_series), change=change, tested=True, why=why)


_TIMES: Final[Mapping[str, str]] = {
    "step_time": "",
    "throughput": "",
    **{name.removesuffix("_s"): phase for name, phase in PHASES.items()},
}


def _time(pair: _Pair, name: str) -> tuple[Floats, Floats] | None:
    """Times of the steps that both runs have made, without the settling ones."""
    if name not in _TIMES:
        return None
    found = []
    times = [numbers.step_times() for numbers in (pair.first, pair.second)]
    if any(one is None for one in times):
        return None
    first = max(int(one.steps[0]) for one in times if one is not None)
    last = min(int(one.steps[-1]) for one in times if one is not None)
    for one in times:
        assert one is not None
        part = _TIMES[name]
        values = one.own_s if not part else one.parts.get(part)
        if values is None:
            return None
        # Of a short run half: whatever it has says more than nothing.
        start = min(_SETTLING, one.steps.size // 2)
        kept = (one.steps >= first) & (one.steps <= last) & (np.arange(one.steps.size) >= start)
        values = values[kept]
        if name == "throughput":
            values = 1 / np.maximum(values, 1e-9)
        found.append(values)
    return found[0], found[1]


def _scalar(pair: _Pair, name: str) -> tuple[Floats, Floats] | None:
    """Losses of the last steps. Of anything else the steps that both runs have: what is not
    captured at each step is captured more often at some times, and those differ.
    """
    series = [numbers.series(name) for numbers in (pair.first, pair.second)]
    if series[0] is None or series[1] is None:
        return None
    first, second = series[0], series[1]
    if not name.startswith(("loss", "log.")):
        common, at_first, at_second = np.intersect1d(first.steps, second.steps, return_indices=True)
        settled = common >= _SETTLING
        return first.values[at_first[settled]], second.values[at_second[settled]]
    # A run that was resumed begins later than at step 0.
    begin = max(int(first.steps[0]), int(second.steps[0]))
    last = min(int(first.steps[-1]), int(second.steps[-1]))
    start = last - _LAST * (last - begin)
    return _between(first, start, last), _between(second, start, last)


def _between(series: Series, start: float, last: int) -> Floats:
    return series.values[(series.steps >= start) & (series.steps <= last)]


def _unit(name: str) -> str | None:
    return "s" if name in _TIMES and name != "throughput" else None


def _single(pair: _Pair, name: str) -> tuple[float, float] | None:
    read = _SINGLE[name]
    a, b = read(pair.first), read(pair.second)
    return None if a is None or b is None else (a, b)


def _not_finite(name: str, a: Floats, b: Floats) -> str:
    """Why losses, and what the user logs, cannot be compared: to leave out what is NaN would
    flatter the run. Of what is logged both runs may have some: of a class without samples."""
    logged = name.startswith("log.")
    if not logged and not name.startswith("loss"):
        return ""
    if logged and np.isfinite(a).all() == np.isfinite(b).all():
        return ""
    for place, values in (("second", b), ("first", a)):
        if gone := int((~np.isfinite(values)).sum()):
            are = "value that is" if gone == 1 else "values that are"
            return f"it has {gone:,} {are} not finite in the {place} run"
    return ""


def _as_they_are(name: str, a: float, b: float) -> Measured:
    for place, number in (("second", b), ("first", a)):
        if not math.isfinite(number):
            why = f"it is not finite in the {place} run"
            return Measured(
                name=name, unit=_SINGLE_UNITS.get(name), change=None, tested=False, why=why
            )
    relative = a > 0 and b > 0
    change = b / a - 1 if relative else b - a
    exact = Change(
        first=a, second=b, relative=relative, change=change, low=change, high=change,
        values=(1, 1), batches=(1, 1),
    )  # fmt: skip
    return Measured(name=name, unit=_SINGLE_UNITS.get(name), change=exact, tested=False)


def _evaluation_loss(numbers: RunNumbers) -> float | None:
    """The mean loss over the batches of the last evaluation."""
    series = numbers.series("loss", mode="eval")
    if series is None:
        return None
    return float(series.values[series.steps == series.steps[-1]].mean())


def _steps(numbers: RunNumbers) -> float | None:
    view = numbers.run.view
    return None if view is None or view.last_step is None else float(view.last_step + 1)


def _duration(numbers: RunNumbers) -> float | None:
    view = numbers.run.view
    if view is None or view.ended_ms is None or not view.started_ms:
        return None
    return (view.ended_ms - view.started_ms) / 1000


def _goodput(numbers: RunNumbers) -> float | None:
    view = numbers.run.view
    share = None if view is None or view.goodput is None else view.goodput.share
    return None if share is None else 100 * share


def _memory(numbers: RunNumbers) -> float | None:
    """The highest memory of the job on a node."""
    columns = [node.column("memory.process_tree_bytes") for node in numbers.nodes()]
    return max((float(np.nanmax(c)) for c in columns if c is not None), default=None)


def _issues(numbers: RunNumbers) -> float | None:
    """Of all incarnations: who asks for the run must know of a fault before a restart."""
    if numbers.run.view is None:
        return None
    return float(sum(issue.severity != "info" for issue in numbers.run.issues()))


_SINGLE: Final[Mapping[str, Callable[[RunNumbers], float | None]]] = {
    "eval_loss": _evaluation_loss,
    "steps": _steps,
    "duration": _duration,
    "goodput": _goodput,
    "memory": _memory,
    "issues": _issues,
}
_SINGLE_UNITS: Final = {"duration": "s", "goodput": "percent", "memory": "bytes"}
