"""The JSON form of a comparison. Within a version fields are only added."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.console.compare.batch_means import ALPHA, TEST
from tocsin.console.compare.comparison import Comparison, Judged
from tocsin.console.compare.differences import Kind
from tocsin.console.compare.measures import Measured
from tocsin.schemas.records.events import Model
from tocsin.schemas.records.real import Real


class DifferenceDocument(Model):
    """One thing that differs."""

    kind: Kind
    what: str
    first: str
    second: str
    step: int | None = Field(description="the first step at which it differs; null: it has none")


class MeasureDocument(Model):
    """One measure of both runs."""

    name: str
    unit: str | None
    first: Real | None = Field(description="null: not decided")
    second: Real | None
    change: Real | None = Field(description="a share of the first, if `relative`")
    relative: bool
    low: Real | None = Field(description="lower bound of the change")
    high: Real | None
    test: str | None = Field(description="null: two single numbers, no test")
    values: tuple[int, int] = Field(description="values of the first and of the second run")
    batches: tuple[int, int]
    undecided: str = Field(description="why it is not decided; empty: it is")


class ConditionDocument(Model):
    """A condition of --fail-if."""

    expression: str
    holds: bool
    measure: MeasureDocument
    undecided: str = Field(description="why it cannot be judged; empty: it can")


class ComparisonDocument(Model):
    """What `tocsin compare A B --json` prints."""

    version: Literal[1] = 1
    first: str
    second: str
    verdict: str
    failed: bool = Field(description="whether a condition of --fail-if holds")
    alpha: float = Field(description="level of the tests, one-sided")
    differences: tuple[DifferenceDocument, ...]
    measures: tuple[MeasureDocument, ...]
    conditions: tuple[ConditionDocument, ...]


def document_of(comparison: Comparison) -> ComparisonDocument:
    """The comparison in its JSON form."""
    return ComparisonDocument(
        first=comparison.first,
        second=comparison.second,
        verdict=comparison.verdict,
        failed=comparison.failed,
        alpha=ALPHA,
        differences=tuple(
            DifferenceDocument(
                kind=one.kind, what=one.what, first=one.first, second=one.second, step=one.step
            )
            for one in comparison.differences
        ),
        measures=tuple(map(_measure, comparison.measures)),
        conditions=tuple(map(_condition, comparison.conditions)),
    )


def to_json(comparison: Comparison) -> str:
    """The comparison as JSON text, indented."""
    return document_of(comparison).model_dump_json(indent=2)


def _condition(judged: Judged) -> ConditionDocument:
    return ConditionDocument(
        expression=judged.condition.text,
        holds=judged.holds,
        measure=_measure(judged.measured),
        undecided=judged.undecided,
    )


def _measure(measured: Measured) -> MeasureDocument:
    change = measured.change
    return MeasureDocument(
        name=measured.name,
        unit=measured.unit,
        first=None if change is None else change.first,
        second=None if change is None else change.second,
        change=None if change is None else change.change,
        relative=change is not None and change.relative,
        low=None if change is None else change.low,
        high=None if change is None else change.high,
        test=TEST if measured.tested and change is not None else None,
        values=(0, 0) if change is None else change.values,
        batches=(0, 0) if change is None else change.batches,
        undecided=measured.why,
    )
