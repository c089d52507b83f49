"""The tensors of a run: a statistic of a collection as layers by steps, and one tensor in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt

from tocsin.console.charts import Line, Mark, heat_map, line_chart, ribbon_chart
from tocsin.console.page.run_charts import HEIGHT, WIDTH
from tocsin.console.page.templating import Content
from tocsin.schemas.text import number_text
from tocsin.store import Matrix, NotCaptured

if TYPE_CHECKING:
    from tocsin.store import Run

Floats = npt.NDArray[np.float64]

ROWS: Final = 50
"""Tensors on a page of the heat map: more would be put together, or be too thin to hit."""

MAX_CHARTS: Final = 12
"""Statistics of one tensor that are drawn beside its ribbon."""

_QUANTILES: Final[Sequence[str]] = ("min", "p05", "p25", "p50", "p75", "p95", "max")
_FIRST: Final = ("update_ratio", "l2", "update_l2", "saturated", "dead", "absmax", "std")
_SHARES: Final = {"zero_share": "zeros", "nan_share": "nans"}
"""Statistics that are computed of counts: name -> the count, as a share of `numel` in percent."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a viewer wants to see of the tensors; empty parts are chosen for them."""

    collection: str = ""
    statistic: str = ""
    rank: int = 0
    search: str = ""
    tensor: str = ""
    page: int = 1

    def url(self, run_id: str, **changes: object) -> str:
        """Where the same page with some changes is."""
        asked = replace(self, **changes)  # type: ignore[arg-type]
        given = {
            "collection": asked.collection,
            "statistic": asked.statistic,
            "rank": "" if asked.rank == 0 else str(asked.rank),
            "search": asked.search,
            "tensor": asked.tensor,
            "page": "" if asked.page == 1 else str(asked.page),
        }
        query = urlencode({name: value for name, value in given.items() if value})
        path = f"/runs/{run_id}/tensors"
        return f"{path}?{query}" if query else path


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor as it is listed beside the heat map."""

    name: str
    last: str
    url: str
    chosen: bool


def tensors_content(
    run_id: str, run: Run | None, query: Asked, marks: Sequence[Mark], trouble: str
) -> Content:
    """The page; reads what it shows, so it blocks."""
    values: dict[str, object] = {
        "trouble": trouble, "run_id": run_id, "asked": query, "collections": [], "statistics": [],
        "ranks": [] if run is None else list(run.ranks()), "heat": "", "rows": [], "found": 0,
        "pages": 1, "previous": "", "next": "", "ribbon": "", "others": {}, "numel": "",
    }  # fmt: skip
    collections = {} if run is None else run.collections()
    names = [name for name, one in collections.items() if one.tensors and one.statistics]
    values["collections"] = names
    if run is None or not names:
        return Content("tensors", values)
    collection = query.collection if query.collection in names else _first_of(names)
    statistics = statistics_of(collections[collection].statistics, collection, names)
    statistic = query.statistic if query.statistic in statistics else statistics[0]
    query = replace(query, collection=collection, statistic=statistic)
    values |= {"statistics": statistics}
    try:
        matrix = matrix_of(run, collection, statistic, query.rank)
    except NotCaptured:
        return Content("tensors", {**values, "asked": query})
    words = query.search.lower().split()
    kept = [i for i, name in enumerate(matrix.rows) if all(word in name.lower() for word in words)]
    pages = max(1, -(-len(kept) // ROWS))
    page = min(max(query.page, 1), pages)
    query = replace(query, page=page)
    shown = kept[(page - 1) * ROWS : page * ROWS]
    rows = [matrix.rows[i] for i in shown]
    if rows:
        values["heat"] = heat_map(
            rows, matrix.steps, matrix.values[shown], title=f"{statistic} of {collection}",
            unit=_unit(statistic), marks=marks, width=WIDTH * 2, heading=False,
        )  # fmt: skip
    values |= {
        "asked": query,
        "found": len(kept),
        "pages": pages,
        "previous": query.url(run_id, page=page - 1, tensor=""),
        "next": query.url(run_id, page=page + 1, tensor=""),
        "rows": [
            TensorRow(
                name, _last(matrix.values[i]), query.url(run_id, tensor=name), name == query.tensor
            )
            for i, name in zip(shown, rows, strict=True)
        ],
    }
    if query.tensor:
        values |= _one_tensor(run, query, marks)
    return Content("tensors", values)


def statistics_of(
    captured: Sequence[str], collection: str, collections: Sequence[str]
) -> Sequence[str]:
    """The statistics that can be shown of a collection, the most telling first."""
    found = [name for name in captured if name != "numel"]
    if "numel" in captured:
        found += [share for share, count in _SHARES.items() if count in captured]
    if collection == "updates" and "update_l2" in captured and "weights" in collections:
        found.append("update_ratio")
    first = [name for name in _FIRST if name in found]
    return [*first, *(name for name in found if name not in first)]


def matrix_of(run: Run, collection: str, statistic: str, rank: int) -> Matrix:
    """A statistic of all tensors over the steps; also of those that are computed.

    Raises:
        NotCaptured: this rank has no such statistic.
    """
    if statistic in _SHARES:
        counts = run.matrix(collection, _SHARES[statistic], rank)
        return divided(counts, run.matrix(collection, "numel", rank), 100.0, statistic)
    if statistic == "update_ratio":
        updates = run.matrix(collection, "update_l2", rank)
        return divided(updates, run.matrix("weights", "l2", rank), 1.0, statistic)
    return run.matrix(collection, statistic, rank)


def divided(above: Matrix, below: Matrix, times: float, name: str) -> Matrix:
    """Cell by cell, where both have one; the divisor as it was last known at a step."""
    place = {row: i for i, row in enumerate(below.rows)}
    at = np.searchsorted(below.steps, above.steps, side="right") - 1
    values = np.full(above.values.shape, np.nan)
    for i, row in enumerate(above.rows):
        if row not in place:
            continue
        divisor = np.where(at >= 0, below.values[place[row], np.maximum(at, 0)], np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            values[i] = np.where(divisor != 0, times * above.values[i] / divisor, np.nan)
    return Matrix(above.rows, above.steps, values, np.isfinite(values), name)


def _one_tensor(run: Run, query: Asked, marks: Sequence[Mark]) -> Mapping[str, object]:
    """The ribbon of a tensor's quantiles, and its other statistics."""
    try:
        tensor = run.tensor(query.tensor, query.collection)
    except NotCaptured:
        return {}
    series = {}
    for name in tensor.statistics():
        try:
            series[name] = tensor.statistic(name, query.rank)
        except NotCaptured:
            continue
    ribbon = ""
    quantiles = [name for name in _QUANTILES if name in series]
    if len(quantiles) >= 2:
        steps = np.unique(np.concatenate([series[name].steps for name in quantiles]))
        parts: dict[str, Floats] = {}
        for name in quantiles:
            parts[name] = np.full(steps.size, np.nan)
            parts[name][np.searchsorted(steps, series[name].steps)] = series[name].values
        ribbon = ribbon_chart(
            steps, parts, title=f"Values of {query.tensor}", marks=marks, width=WIDTH * 1.5,
            height=HEIGHT * 1.3, heading=False,
        )  # fmt: skip
    others = {
        name: line_chart(
            [Line(name, one.steps.astype(np.float64), one.values)], title=name,
            unit=_unit(name), marks=marks, width=WIDTH, height=HEIGHT, heading=False,
        )
        for name, one in series.items()
        if name not in (*_QUANTILES, "numel")
    }  # fmt: skip
    numel = series.get("numel")
    return {
        "ribbon": ribbon,
        "others": dict(list(others.items())[:MAX_CHARTS]),
        "numel": "" if numel is None else number_text(float(numel.values[-1])),
    }


def _first_of(names: Sequence[str]) -> str:
    return next((name for name in ("gradients", "weights") if name in names), names[0])


def _last(row: Floats) -> str:
    there = row[~np.isnan(row)]
    return f"{there[-1]:.3g}" if there.size else "-"


def _unit(statistic: str) -> str | None:
    return "percent" if statistic in _SHARES else None
