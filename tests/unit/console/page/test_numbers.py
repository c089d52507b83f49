"""What is computed of a run's numbers for its pages."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from support.records.issues import issue
from tocsin.console.charts import Line
from tocsin.console.page.numbers import line_of, newest_of
from tocsin.console.page.run_charts import aligned, phases_chart, run_charts
from tocsin.console.page.system_page import _rank_maps
from tocsin.console.page.tensors_page import Asked, divided, statistics_of
from tocsin.console.page.zoom_page import points, zoom_content
from tocsin.store import Matrix, NotCaptured, Run, Series


def line(count: int) -> Line:
    steps = np.arange(count, dtype=np.float64)
    values = np.sin(steps / 100)
    values[count // 2] = 50.0
    values[count // 3] = np.nan
    return Line("loss", steps, values)


def test_far_away_a_line_has_few_points_and_no_spike_or_nan_is_lost() -> None:
    found = points(line(200_000), [], low=-np.inf, high=np.inf, groups=1_000)
    xs, ys = found["x"], found["y"]
    assert isinstance(xs, list)
    assert isinstance(ys, list)
    assert len(xs) <= 3_100
    assert found["total"] == 200_000
    assert max(y for y in ys if y is not None) == 50.0
    assert found["bad"] == [66_666.0]


def test_near_by_all_points_are_there_and_one_beyond_each_edge() -> None:
    found = points(line(1_000), [], low=100.5, high=103.5, groups=1_000)
    assert found["x"] == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_issues_of_the_range_are_marked() -> None:
    about = issue().model_copy(update={"first_step": 10})
    assert points(line(100), [about], low=0, high=50, groups=100)["marks"]
    assert not points(line(100), [about], low=20, high=50, groups=100)["marks"]
    assert points(None, [about], low=0, high=50, groups=100)["x"] == []


class FleetRun:
    """A run of 300 ranks, of which the last is the slowest."""

    def ranks(self) -> range:
        return range(300)

    def series(self, column: str, *, rank: int) -> Series:
        if column != "step_time_s":
            raise NotCaptured("scalar", column, [])
        steps = np.arange(3)
        return Series(steps, np.full(3, 0.1 + rank / 1000), steps, column, "s")


def test_the_slowest_of_some_ranks_is_not_called_the_slowest() -> None:
    ((_, _, note),) = _rank_maps(cast("Run", FleetRun()), [])
    assert note == "Highest median: rank 255, of the first 256 of 300 ranks"


class LastStageRun:
    """A pipeline of four ranks: the last one has the loss."""

    def ranks(self) -> range:
        return range(4)

    def scalars(self, mode: str) -> list[str]:
        return ["loss", "step_time_s"] if mode == "train" else []

    def series(self, column: str, mode: str = "train", rank: int = 0) -> Series:
        if mode != "train" or (column == "loss" and rank != 3):
            raise NotCaptured("scalar", column, [])
        steps = np.arange(5)
        return Series(steps, np.full(5, 1.0 + rank), steps, column)


def test_the_loss_of_a_pipeline_is_that_of_its_last_stage() -> None:
    run = cast("Run", LastStageRun())
    found = line_of(run, "loss", "loss")
    assert found is not None
    assert (found.name, found.y[0]) == ("loss (rank 3)", 4.0)
    assert newest_of(run) == (4, 4.0)
    step = line_of(run, "step_time_s", "step")
    assert step is not None
    assert (step.name, step.y[0]) == ("step", 1.0)
    assert line_of(run, "loss", "loss", rank=0) is None
    assert "training (rank 3)" in str(run_charts(run, [], None)["loss"])
    page = zoom_content("r1", run, "loss", None, "", "")
    assert (page.values["known"], page.values["rank"]) == (True, 3)
    page = zoom_content("r1", run, "loss", 0, "", "")
    assert (page.values["known"], page.values["rank"]) == (False, 0)


def matrix(steps: list[int], values: list[list[float]], *rows: str) -> Matrix:
    cells = np.array(values)
    return Matrix(rows, np.array(steps), cells, np.isfinite(cells))


def test_an_update_ratio_takes_the_weights_as_they_were_last_known() -> None:
    updates = matrix([5, 15, 25], [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]], "a", "b")
    weights = matrix([10, 20], [[4.0, 6.0]], "a")
    found = divided(updates, weights, 1.0, "update_ratio")
    assert np.isnan(found.values[0, 0]), "not known yet"
    assert found.values[0, 1:].tolist() == [0.5, 0.5]
    assert np.isnan(found.values[1]).all(), "no weights of that name"


def test_no_numberdivided_by_nothing_is_shown() -> None:
    found = divided(matrix([1], [[0.0]], "a"), matrix([1], [[0.0]], "a"), 100.0, "zero_share")
    assert np.isnan(found.values).all()


def test_the_most_telling_statistics_come_first() -> None:
    captured = ["min", "l2", "zeros", "nans", "numel"]
    assert statistics_of(captured, "gradients", ["gradients"])[:3] == ["l2", "min", "zeros"]
    assert "zero_share" in statistics_of(captured, "gradients", ["gradients"])
    both = statistics_of(["update_l2"], "updates", ["updates", "weights"])
    assert both == ["update_ratio", "update_l2"]


def test_a_choice_of_tensors_is_an_address() -> None:
    asked = Asked(collection="weights", tensor="a/b?", rank=3)
    assert asked.url("r1") == "/runs/r1/tensors?collection=weights&rank=3&tensor=a%2Fb%3F"
    assert Asked().url("r1", page=2) == "/runs/r1/tensors?page=2"


def test_phases_are_aligned_by_step() -> None:
    found = aligned(Line("x", np.array([2.0, 4.0]), np.array([1.0, np.nan])), np.arange(5.0))
    assert found.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert phases_chart(None, []) == ""


@pytest.mark.parametrize("groups", [0, 1, 10**9])
def test_what_a_browser_asks_for_is_bounded(groups: int) -> None:
    xs = points(line(100_000), [], low=-np.inf, high=np.inf, groups=groups)["x"]
    assert isinstance(xs, list)
    assert 50 <= len(xs) <= 9_100
