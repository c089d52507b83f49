"""What the bases of rules do for each rule of their kind; docs/how-to has examples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from tocsin.schemas.records.frames import Doubles, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes
from tocsin.stream_rules.reading.rank_series import SERIES_POINTS, PointHistory, RankSeries
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.reading.tensor_rows import doubles
from tocsin.stream_rules.rule import Params, RuleMeta, scalar, system, tensors
from tocsin.stream_rules.rule_bases import (
    NodeRule,
    NodeState,
    NodeWindow,
    RowState,
    SeriesRule,
    SeriesState,
    TensorRowRule,
)
from tocsin.stream_rules.signals.streaks import Streak
from tocsin.stream_rules.testing import RunBuilder, issues_of, only


class NoParams(Params):
    """None."""


def meta(name: str, input_: object) -> RuleMeta:
    return RuleMeta(
        name=name,
        version=1,
        family="numerical",
        meaning="m",
        severity="warning",
        inputs=(input_,),  # type: ignore[arg-type]
        remedy="r",
        params=NoParams,
        resolve_after_steps=0,
        history_steps=0,
    )


class Saturated(TensorRowRule[NoParams, RowState]):
    meta = meta("saturated_rows", tensors("activations"))
    state_type = RowState
    columns = ("saturated", "zeros")

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        rows = np.flatnonzero(doubles(table, "saturated") > 0.5).tolist()
        if not rows:
            return [Clear(table.step)]
        reason = f"{table.rows[rows[0]]} of {len(table.rows)}"
        return [self.row_finding(table, rows, kind="layer", reason=reason, others=" and {} more")]


class HighLoss(SeriesRule[NoParams, SeriesState]):
    meta = meta("high_loss", scalar("loss"))
    state_type = SeriesState
    column = "loss"

    def on_value(self, step: int, value: float, at: Moment) -> Outcomes:
        seen = len(self.state.rank_series.steps)
        if value < 10:
            return [Clear(step)]
        subject = Subject(kind="loss", name="loss")
        return [Finding(subject=subject, reason=f"{value:g} after {seen} values", first_step=step)]


class BusyGpu(NodeRule[NoParams, NodeState]):
    meta = meta("busy_gpu", system("gpu.*"))
    state_type = NodeState

    def window(self) -> int:
        return 4

    def quantities(self, frame: SystemFrame) -> Iterable[tuple[str, Sequence[Doubles] | None]]:
        rate, of_job = frame.column("gpu.0.rate"), frame.column("gpu.0.of_job")
        assert of_job is not None
        yield frame.node, None if not of_job[-1] or rate is None else [rate]

    def on_window(self, name: str, window: NodeWindow, at: Moment) -> Outcomes:
        rates = window.samples.rows[:, 0].tolist()
        return [Finding(about=name, subject=Subject(kind="node", name=name), reason=f"{rates}")]


def started(world_size: int = 1) -> RunBuilder:
    run = RunBuilder(world_size=world_size)
    for rank in range(world_size):
        run.started(rank=rank)
    return run


def test_a_finding_of_rows_is_about_the_first_and_names_the_others() -> None:
    run = started()
    shares = {"saturated": [0.1, 0.9, 0.8, 0.7]}
    run.tensors(5, "activations", ["a", "b", "c", "d"], columns=shares)
    (issue,) = issues_of(run.records, specs=only(Saturated))
    assert issue.reason == "b of 4 and 2 more"
    assert (issue.subject.kind, issue.subject.name) == ("layer", "b")
    assert issue.subject.collection == "activations"
    assert (issue.evidence.followed, issue.evidence.also) == (2, ("c", "d"))
    assert issue.first_rank == 0


def test_one_row_alone_has_no_others() -> None:
    run = started()
    run.tensors(5, "activations", ["a"], columns={"saturated": 0.9})
    (issue,) = issues_of(run.records, specs=only(Saturated))
    assert (issue.reason, issue.evidence.followed) == ("a of 1", 0)


def test_a_table_that_lacks_a_column_takes_no_place_of_the_step() -> None:
    run = started()
    run.tensors(5, "activations", ["relu"], columns={"dead": 0.9})
    run.tensors(5, "activations", ["a"], columns={"saturated": 0.9})
    assert [issue.reason for issue in issues_of(run.records, specs=only(Saturated))] == ["a of 1"]


def test_a_series_is_that_of_the_lowest_rank_and_has_no_gaps() -> None:
    run = started(world_size=2)
    run.steps([0], rank=1, loss=1.0)
    run.steps([1], rank=1, loss=2.0)
    run.steps([0, 1], rank=0, loss=1.0)
    run.steps([2], rank=1, loss=50.0)
    run.steps([2], rank=0, loss=float("nan"))
    run.steps([2, 3], rank=0, loss=20.0)
    (issue,) = issues_of(run.records, specs=only(HighLoss))
    assert issue.reason == "20 after 4 values"
    assert issue.first_step == 3


def test_a_window_of_a_node_keeps_the_last_samples_since_training_started() -> None:
    run = started()
    run.system({"gpu.0.rate": [1.0, 2.0], "gpu.0.of_job": [1.0] * 2}, every_s=1.0)
    run.steps([0], loss=1.0)
    run.system({"gpu.0.rate": [3.0, 4.0, 5.0], "gpu.0.of_job": [1.0] * 3}, every_s=1.0)
    run.system({"gpu.0.rate": [6.0, 7.0], "gpu.0.of_job": [1.0] * 2}, every_s=1.0)
    run.system({"gpu.0.rate": [8.0], "gpu.0.of_job": 0.0}, every_s=1.0)
    first, last = issues_of(run.records, specs=only(BusyGpu))
    assert (first.state, first.reason) == ("firing", "[3.0, 4.0, 5.0]")
    assert last.state == "resolved"


def test_a_streak_starts_where_its_condition_first_held() -> None:
    streak = Streak()
    held = [streak.update(step, 10 * step, holds=step != 2) for step in range(6)]
    assert held == [1, 2, 0, 1, 2, 3]
    assert (streak.first_step, streak.first_ms) == (3, 30)


def test_a_history_keeps_as_many_points_as_the_evidence_carries() -> None:
    history = PointHistory()
    for step in range(SERIES_POINTS + 3):
        history.append(step, step / 2)
    series = history.series("share", unit="percent", limit=3.0)
    assert (series.steps[0], series.steps[-1]) == (3, SERIES_POINTS + 2)
    assert len(history.steps) == len(series.values) == SERIES_POINTS
    assert (series.unit, series.limit) == ("percent", 3.0)


def test_a_saved_series_keeps_its_key_in_snapshots() -> None:
    state = SeriesState(rank_series=RankSeries(rank=3))
    saved = dump_state(state)
    assert set(json.loads(saved)) == {"lead"}
    assert load_state(SeriesState, saved) == state
