"""What the answers with numbers look like, and how numpy arrays become them. Pure.

A series that is longer than was asked for is reduced: of each stretch of steps the smallest and the
largest value stay, so that no spike is lost, and values that are not finite: all of them, or so
many that they are half of the points, the first and the last among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tocsin.console.api.documents import WHICH
from tocsin.schemas.records.events import Model
from tocsin.schemas.records.fields import Incarnation, RunId
from tocsin.schemas.records.real import Real

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

MAX_POINTS: Final = 20_000
"""Points of a series, samples of a node and cells of a matrix in one answer at most."""

Mode = Literal["train", "eval", "predict", "global"]

_INCARNATION: Final = "the training whose numbers these are"
_POINTS: Final = "how many there are between the first and the last, before they were reduced"


class Captured(Model):
    """Names of what was captured of a run."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation = Field(description=_INCARNATION)
    ranks: tuple[int, ...] = Field(description="ranks that sent numbers")
    nodes: tuple[str, ...] = Field(description="nodes that were sampled")
    scalars: dict[str, tuple[str, ...]] = Field(description="mode -> names of numbers per step")
    collections: tuple[CapturedCollection, ...] = Field(description="of tensors, by name")


class CapturedCollection(Model):
    """A collection of tensors."""

    name: str = Field(description="what the configuration calls it")
    tensors: int = Field(description="how many tensors it has")
    statistics: tuple[str, ...] = Field(description="what there is of each tensor")
    steps: int = Field(description="how many steps have a summary")


class Tensors(Model):
    """Names of tensors."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation = Field(description=_INCARNATION)
    total: int = Field(description="how many fit; the answer has the first of them")
    tensors: tuple[str, ...] = Field(description="in the order of capture")


class RunSeries(Model):
    """One number over the steps."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation = Field(description=_INCARNATION)
    name: str = Field(description="the scalar, or TENSOR/STATISTIC")
    collection: str | None = Field(
        default=None, description="the collection that the tensor was read from; None: a scalar"
    )
    unit: str | None = Field(description="of the values; None: none, or not known")
    mode: Mode = Field(description="what the training was doing")
    rank: int = Field(description="the rank that sent them")
    points: int = Field(description=_POINTS)
    reduced: bool = Field(
        description="whether points were left out: not the smallest and the largest, and of those "
        "that are not finite neither the first nor the last"
    )
    steps: tuple[int, ...] = Field(description="the step of each value, ascending")
    values: tuple[Real, ...] = Field(description="as many as there are steps")
    at_ms: tuple[int, ...] = Field(description="the sender's clock, Unix milliseconds")


class RunMatrix(Model):
    """One statistic of the tensors of a collection over the steps."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation = Field(description=_INCARNATION)
    collection: str = Field(description="the collection of the tensors")
    statistic: str = Field(description="of each tensor")
    mode: Mode = Field(description="what the training was doing")
    rank: int = Field(description="the rank that sent them")
    total_rows: int = Field(
        description="tensors of the collection; the answer has the first of them"
    )
    total_steps: int = Field(description="steps of the collection; the answer has some, evenly")
    rows: tuple[str, ...] = Field(description="names of the tensors, in the order of capture")
    steps: tuple[int, ...] = Field(description="ascending")
    values: tuple[tuple[Real | None, ...], ...] = Field(
        description="for each row, for each step; None: not captured there"
    )


class RunSystem(Model):
    """Samples of a node."""

    version: Literal[1] = Field(description=WHICH)
    run_id: RunId
    incarnation: Incarnation = Field(description=_INCARNATION)
    node: str = Field(description="its host name")
    nodes: tuple[str, ...] = Field(description="all nodes of the run that were sampled")
    points: int = Field(description=_POINTS)
    reduced: bool = Field(description="whether samples were left out, evenly")
    at_ms: tuple[int, ...] = Field(description="when each sample was taken, Unix milliseconds")
    columns: dict[str, tuple[Real | None, ...]] = Field(
        description="names that carry their unit -> a value for each sample; None: not sampled"
    )


def kept(values: Reals, most: int) -> Integers:
    """Which of the values stay, at most `most` (4 or more), in their order.

    Of each stretch of finite values the smallest and the largest; up to half are others.
    """
    count = values.size
    if count <= most:
        return np.arange(count, dtype=np.int64)
    finite = np.isfinite(values)
    broken = _evenly(np.flatnonzero(~finite), most // 2)
    places = np.flatnonzero(finite)
    stretches = max(1, (most - broken.size) // 2)
    bounds = np.linspace(0, places.size, stretches + 1).astype(np.int64)
    found = [broken]
    for first, last in pairwise(bounds.tolist()):
        if first < last:
            part = places[first:last]
            found.append(part[[values[part].argmin(), values[part].argmax()]])
    return np.unique(np.concatenate(found))


def evenly(count: int, most: int) -> Integers:
    """At most `most` of `count` places, the last one among them."""
    return _evenly(np.arange(count, dtype=np.int64), most)


def reals(values: Iterable[float]) -> tuple[float, ...]:
    """As Python's own numbers."""
    return tuple(map(float, values))


def cells(
    values: Iterable[float], present: Sequence[bool] | None = None
) -> tuple[Real | None, ...]:
    """The same, with None where there is no value: NaN, unless `present` marks it."""
    numbers = reals(values)
    if present is None:
        return tuple(None if math.isnan(value) else value for value in numbers)
    return tuple(value if there else None for value, there in zip(numbers, present, strict=True))


def as_json(model: Model) -> Mapping[str, object]:
    """The values of an answer; a number that is not finite is a word."""
    return model.model_dump(mode="json")


def _evenly(places: npt.NDArray[np.intp] | Integers, most: int) -> Integers:
    if places.size <= most:
        return places.astype(np.int64)
    chosen = np.unique(np.linspace(0, places.size - 1, max(1, most)).round().astype(np.int64))
    return places[chosen].astype(np.int64)


Captured.model_rebuild()
