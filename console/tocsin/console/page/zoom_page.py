"""Where people zoom: a scalar of a run, with as many of its points as the screen can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tocsin.console.charts import Line, decimate
from tocsin.console.page.numbers import scalars_of, series_of
from tocsin.console.page.templating import Content
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.text import plain_line

if TYPE_CHECKING:
    from tocsin.store import Run

LISTED: Final = 200
"""Names of scalars that are offered at once; the search finds the rest."""

POINTS: Final = 3_000
"""Most groups of points for one line on the screen."""


def zoom_content(
    run_id: str, run: Run | None, name: str, rank: int | None, search: str, trouble: str
) -> Content:
    """The page: the choice of scalar and rank, and a place for the plot. Without a rank it is the
    lowest one that has the scalar."""
    found = series_of(run, name, rank=rank)
    names = [one for one in scalars_of(run) if search.lower() in one.lower()]
    return Content(
        "zoom",
        {
            "trouble": trouble,
            "run_id": run_id,
            "names": names[:LISTED],
            "more": max(0, len(names) - LISTED),
            "name": name,
            "known": found is not None,
            "search": search,
            "rank": rank or 0 if found is None else found[0],
            "ranks": [] if run is None else list(run.ranks()),
        },
    )


def points(
    line: Line | None, issues: Sequence[IssueFiring], *, low: float, high: float, groups: int
) -> Mapping[str, object]:
    """The points between two steps as JSON values, at most about three for each group: no spike and
    no NaN is lost. With one more point on each side, so that the line reaches the edges.
    """
    if line is None:
        return {"x": [], "y": [], "bad": [], "total": 0, "marks": []}
    start = max(0, int(np.searchsorted(line.x, low)) - 1)
    stop = min(len(line.x), int(np.searchsorted(line.x, high, side="right")) + 1)
    x, y = decimate(line.x[start:stop], line.y[start:stop], min(max(groups, 50), POINTS))
    finite = np.isfinite(y)
    return {
        "x": x.tolist(),
        "y": [value if good else None for value, good in zip(y.tolist(), finite, strict=True)],
        "bad": x[~finite].tolist(),
        "total": stop - start,
        "marks": [
            {
                "x": issue.first_step,
                "severity": issue.severity,
                "text": f"{plain_line(issue.rule)}: {plain_line(issue.reason)}"[:160],
                "url": f"/issues/{issue.issue_id}",
            }
            for issue in issues
            if issue.first_step is not None and low <= issue.first_step <= high
        ][:200],
    }
