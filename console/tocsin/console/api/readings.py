"""What is answered with numbers: series, matrices, samples, and the names of what was captured.

A source reads them in a thread, for they are in files.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from tocsin.console.api.answers import Facts, find_run
from tocsin.console.api.numbers import (
    MAX_POINTS,
    Captured,
    CapturedCollection,
    RunMatrix,
    RunSeries,
    RunSystem,
    Tensors,
    as_json,
    cells,
    evenly,
    kept,
    reals,
)
from tocsin.console.api.problems import ProblemError
from tocsin.console.api.requests import (
    FindTensors,
    OfTraining,
    ReadMatrix,
    ReadSeries,
    ReadSystem,
    Request,
)
from tocsin.console.run_lookup import check_training
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.collections import MODES
from tocsin.schemas.records.events import Model

if TYPE_CHECKING:
    from tocsin.store.run import Run

T = TypeVar("T", bound=Model)

_US: Final = 1_000


async def get_captured(request: Request[OfTraining]) -> Facts:
    """Names of what was captured. Raises ProblemError, and as the source does."""

    def read(run: Run) -> Captured:
        return Captured(
            version=1,
            run_id=run.run_id,
            incarnation=run.incarnation,
            ranks=tuple(run.ranks()),
            nodes=tuple(run.nodes()),
            scalars={mode: tuple(names) for mode in MODES if (names := run.scalars(mode))},
            collections=tuple(
                CapturedCollection(
                    name=one.name,
                    tensors=len(one.tensors),
                    statistics=one.statistics,
                    steps=one.steps,
                )
                for one in run.collections().values()
            ),
        )

    return await _read(request, read)


async def find_tensors(request: Request[FindTensors]) -> Facts:
    """Names of tensors."""

    asked = request.asked

    def read(run: Run) -> Tensors:
        names = run.tensors(collection=asked.collection)
        found = [name for name in names if _fits(name, asked.pattern)]
        return Tensors(
            version=1,
            run_id=run.run_id,
            incarnation=run.incarnation,
            total=len(found),
            tensors=tuple(found[: asked.limit]),
        )

    return await _read(request, read)


async def read_series(request: Request[ReadSeries]) -> Facts:
    """One number over the steps."""
    asked = request.asked
    if (asked.name is None) == (asked.tensor is None):
        raise ProblemError(
            "wrong_request",
            "expected one of: name, for a scalar; tensor, with its statistic; "
            "what was captured of the run lists both",
        )

    def read(run: Run) -> RunSeries:
        collection = None
        if asked.tensor is None:
            found = run.series(asked.name or "", asked.mode, asked.rank)
        else:
            tensor = run.tensor(asked.tensor, asked.collection)
            collection = tensor.collection
            found = tensor.statistic(asked.statistic, asked.rank, asked.mode)
        wanted = np.ones(found.steps.shape, np.bool_)
        if asked.from_step is not None:
            wanted &= found.steps >= asked.from_step
        if asked.to_step is not None:
            wanted &= found.steps <= asked.to_step
        steps, values, at_us = found.steps[wanted], found.values[wanted], found.at_us[wanted]
        places = kept(values, asked.points)
        return RunSeries(
            version=1,
            run_id=run.run_id,
            incarnation=run.incarnation,
            name=found.name,
            collection=collection,
            unit=found.unit,
            mode=asked.mode,
            rank=asked.rank,
            points=steps.size,
            reduced=places.size < steps.size,
            steps=tuple(steps[places].tolist()),
            values=reals(values[places]),
            at_ms=tuple((at_us[places] // _US).tolist()),
        )

    return await _read(request, read)


async def read_matrix(request: Request[ReadMatrix]) -> Facts:
    """One statistic of the tensors of a collection over the steps."""
    asked = request.asked
    if asked.rows * asked.steps > MAX_POINTS:
        raise ProblemError(
            "wrong_request", f"rows times steps: expected at most {MAX_POINTS:,} cells"
        )

    def read(run: Run) -> RunMatrix:
        found = run.matrix(asked.collection, asked.statistic, asked.rank, asked.mode)
        rows, columns = len(found.rows[: asked.rows]), evenly(found.steps.size, asked.steps)
        return RunMatrix(
            version=1,
            run_id=run.run_id,
            incarnation=run.incarnation,
            collection=asked.collection,
            statistic=asked.statistic,
            mode=asked.mode,
            rank=asked.rank,
            total_rows=len(found.rows),
            total_steps=found.steps.size,
            rows=found.rows[:rows],
            steps=tuple(found.steps[columns].tolist()),
            values=tuple(
                cells(found.values[row, columns], found.present[row, columns].tolist())
                for row in range(rows)
            ),
        )

    return await _read(request, read)


async def read_system(request: Request[ReadSystem]) -> Facts:
    """Samples of a node."""

    asked = request.asked

    def read(run: Run) -> RunSystem:
        found = run.system(asked.node)
        names = [name for name in found.columns if _fits(name, asked.column)]
        # A node has hundreds of columns: the more there are, the fewer points of each.
        most = max(4, MAX_POINTS // max(len(names), 1))
        places = evenly(found.at_us.size, min(asked.points, most))
        return RunSystem(
            version=1,
            run_id=run.run_id,
            incarnation=run.incarnation,
            node=found.node,
            nodes=tuple(run.nodes()),
            points=found.at_us.size,
            reduced=places.size < found.at_us.size,
            at_ms=tuple((found.at_us[places] // _US).tolist()),
            columns={name: cells(found.column(name)[places]) for name in names},
        )

    return await _read(request, read)


async def _read(request: Request[OfTraining], read: Callable[[Run], T]) -> Facts:
    from tocsin.store.errors import NotCaptured, UnknownRun

    found = await find_run(request.source, request.about)
    wanted = request.asked.incarnation

    def checked(run: Run) -> T:
        try:
            check_training(run, wanted)
        except ConfigurationError as error:
            raise ProblemError("unknown", str(error)) from None
        return read(run)

    try:
        return as_json(await request.source.read(found.run_id, wanted, checked))
    except UnknownRun as error:
        raise ProblemError("unknown", str(error)) from None
    except NotCaptured as error:
        raise ProblemError("not_captured", str(error)) from None


def _fits(name: str, pattern: str | None) -> bool:
    """Whether a name has that text in it; `*` and `?` stand for other characters."""
    return pattern is None or fnmatchcase(name, f"*{pattern.replace('[', '[[]')}*")
