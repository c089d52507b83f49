"""The series of a run that a rule follows: whose points it takes, and each once."""

from __future__ import annotations

import numpy as np

from tocsin.schemas.records.frames import RecordOrigin, StepFrame
from tocsin.stream_rules.reading.rank_series import RankSeries


def frame(*points: tuple[int, float], rank: int = 0, column: str = "loss") -> StepFrame:
    return StepFrame(
        origin=RecordOrigin(run_id="r1", incarnation="i1", rank=rank),
        steps=np.array([step for step, _ in points], np.uint64),
        at_us=np.zeros(len(points), np.uint64),
        columns=(column,),
        values=np.array([[value] for _, value in points], np.float32),
    )


def points(rank_series: RankSeries, frame: StepFrame) -> list[tuple[int, float]]:
    return list(rank_series.points(frame, "loss")) if rank_series.accepts(frame) else []


def test_a_repeated_step_is_taken_once() -> None:
    rank_series = RankSeries()
    assert points(rank_series, frame((0, 3.0), (1, 2.0))) == [(0, 3.0), (1, 2.0)]
    assert points(rank_series, frame((1, 9.0), (2, 1.0), (2, 9.0))) == [(2, 1.0)]
    assert points(rank_series, frame((0, 3.0), (1, 2.0))) == []
    assert (rank_series.steps, rank_series.values) == ([0, 1, 2], [3.0, 2.0, 1.0])


def test_a_column_that_is_not_there_gives_no_points() -> None:
    rank_series = RankSeries()
    assert points(rank_series, frame((0, 3.0), column="step_time_s")) == []
    assert points(rank_series, frame((0, 3.0))) == [(0, 3.0)]


def test_a_lower_rank_begins_anew_and_a_higher_one_is_left_out() -> None:
    rank_series = RankSeries()
    assert points(rank_series, frame((5, 1.0), rank=1)) == [(5, 1.0)]
    assert points(rank_series, frame((0, 2.0), rank=2)) == []
    lower = frame((0, 3.0))
    assert rank_series.overtaken_by(lower)
    assert points(rank_series, lower) == [(0, 3.0)]
    assert (rank_series.rank, rank_series.steps) == (0, [0])
