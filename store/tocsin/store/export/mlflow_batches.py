"""A run in MLflow's words: metrics, tags and times. Pure.

Reference: https://mlflow.org/docs/latest/api_reference/rest-api.html
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.text import plain_line, where_text
from tocsin.store.export.series import Scalar

Json = dict[str, object]

METRICS: Final = 1_000
"""Metrics of a request at most."""

TAGS: Final = 100
"""Tags of a request at most."""

RUN_TAG: Final = "tocsin.run_id"
INCARNATION_TAG: Final = "tocsin.incarnation"

_NAME: Final = re.compile(r"[^\w.\- /]", re.ASCII)
_LONGEST_NAME: Final = 250
_LONGEST_TAG: Final = 4_000
_ISSUES: Final = 1_000

_STATUS: Final[Mapping[str | None, str]] = {
    "completed": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
    "interrupted": "KILLED",
}


def metric_name(name: str) -> str:
    """A name that MLflow takes: letters, digits, `_ - . /` and spaces; others become `_`."""
    text = _NAME.sub("_", name).strip("/ ") or "_"
    # MLflow wants a name to be a plain path: none of its parts is empty, `.` or `..`.
    parts = [part if part.strip(".") else "_" for part in text.split("/")]
    return "/".join(parts)[:_LONGEST_NAME]


def metrics_of(scalars: Iterable[Scalar]) -> Iterator[Json]:
    """Each number as a metric. Names that MLflow cannot tell apart get a number."""
    known: dict[str, str] = {}
    for one in scalars:
        name = metric_name(one.name)
        if known.setdefault(name.lower(), one.name) != one.name:
            count = 2
            while f"{name.lower()}_{count}" in known:
                count += 1
            name = f"{name[: _LONGEST_NAME - 8]}_{count}"
            known[name.lower()] = one.name
        series = one.series
        for step, value, at_us in zip(
            series.steps.tolist(), series.values.tolist(), series.at_us.tolist(), strict=True
        ):
            yield {"key": name, "value": _real(value), "timestamp": at_us // 1_000, "step": step}


def issue_metrics(issues: Sequence[IssueFiring]) -> Iterator[Json]:
    """Of each rule how many issues it has found, at the steps at which they started."""
    counts: dict[str, int] = {}
    for issue in issues:
        name = metric_name(f"tocsin/issues/{issue.rule}")
        counts[name] = counts.get(name, 0) + 1
        yield {
            "key": name,
            "value": float(counts[name]),
            "timestamp": issue.onset_ms or issue.at_ms,
            "step": issue.first_step or 0,
        }


def tags_of(run_id: str, view: RunView | None, incarnation: str) -> dict[str, str]:
    """By which the run is found again, and what it is."""
    tags = {"mlflow.runName": run_id, RUN_TAG: run_id, INCARNATION_TAG: incarnation}
    if view is not None:
        tags["tocsin.state"] = view.outcome or view.state
        for key, value in sorted(view.labels.items()):
            tags[metric_name(f"tocsin.label.{plain_line(key)}")] = plain_line(value)[:_LONGEST_TAG]
    return tags


def issue_tags(issues: Sequence[IssueFiring]) -> dict[str, str]:
    """A tag for each issue, and how many there are; of very many the first."""
    tags = {"tocsin.issues": str(len(issues))}
    for issue in issues[:_ISSUES]:
        text = f"{issue.severity} {issue.rule}, {issue.state}: {issue.reason} ({where_text(issue)})"
        tags[f"tocsin.issue.{issue.short_id}"] = plain_line(text)[:_LONGEST_TAG]
    return tags


def batches(items: Iterable[Json], size: int) -> Iterator[list[Json]]:
    """The items in lists of that size at most."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def as_tags(tags: Mapping[str, str]) -> Iterator[Json]:
    """Tags as a request has them."""
    return ({"key": key, "value": value} for key, value in tags.items())


def status_of(view: RunView | None) -> str:
    """The status of the run in MLflow's words."""
    if view is None or view.state == "running":
        return "RUNNING"
    return _STATUS.get(view.outcome, "FAILED" if view.state == "lost" else "FINISHED")


def _real(value: float) -> float | str:
    """As protobuf's JSON has it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
