"""What a report says of runs that are not as most: it claims no more than the numbers allow."""

from __future__ import annotations

import numpy as np
import pytest

from support.records.numbered_runs import START_MS, MadeRun, issue_of, view_of
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.report import Report, report_of
from tocsin.console.report.section import Section
from tocsin.console.report.sections import gpu_utilization as gpus
from tocsin.console.report.sections.bottlenecks import cpu_bottlenecks
from tocsin.console.report.sections.data_loader import data_loader
from tocsin.console.report.sections.load_balancing import load_balancing
from tocsin.console.report.sections.memory import memory
from tocsin.console.report.sections.outliers import outliers
from tocsin.console.report.sections.step_durations import step_durations
from tocsin.console.report.sections.step_phases import step_phases
from tocsin.console.report.sections.tensors import tensors
from tocsin.console.report.sections.training_curves import training_curves
from tocsin.schemas.records.runs import DataLoaderSeen, RunStarted

COUNT = 100
GIB = 1024.0**3
ONES = np.ones(COUNT)
LATER_MS = START_MS + 3_600_000


def reported(run: MadeRun) -> tuple[Report, dict[str, Section]]:
    report = report_of(run, now_ms=LATER_MS)
    return report, {section.key: section for section in report.sections}


def test_a_run_that_no_rule_has_judged_is_not_called_good() -> None:
    report, sections = reported(MadeRun().scalar("loss", np.linspace(2, 1, COUNT)))
    assert report.status == "plain"
    assert sections["issues"].status == "not_captured"
    assert "No rule has judged" in sections["issues"].finding


@pytest.mark.parametrize("section", [step_durations, outliers], ids=lambda one: one.__name__)
def test_step_times_of_nan_alone_are_none(section: object) -> None:
    assert callable(section)
    found = section(RunNumbers(MadeRun().scalar("step_time_s", [np.nan] * 3)))
    assert found.status == "not_captured"


def test_the_only_step_time_that_is_known_counts() -> None:
    times = RunNumbers(MadeRun().scalar("step_time_s", [np.nan, 0.5, np.nan])).step_times()
    assert times is not None
    assert times.total_s.tolist() == [0.5]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([2.0], "The loss was 2 in 1 step."),
        ([4.0, 2.0], "The loss went from 4 to 2 in 2 steps."),
        ([5.0, 4.0, 3.0, 2.0, 1.0, 0.5], "The loss went from 4 to 1 in 6 steps."),
    ],
)
def test_few_losses_are_told_apart(losses: list[float], told: str) -> None:
    assert training_curves(RunNumbers(MadeRun().scalar("loss", losses))).finding == told


def test_steps_whose_loss_was_not_captured_count_as_steps() -> None:
    run = MadeRun().scalar("loss", [4.0, 3.0, 2.0], steps=[0, 5, 10])
    found = training_curves(RunNumbers(run)).finding
    assert found == "The loss went from 4 to 2 in 11 steps, 3 of which have one."


def test_a_run_of_evaluations_alone_has_their_loss() -> None:
    run = MadeRun().scalar("loss", [3, 1, 4, 2], steps=[49, 49, 99, 99], mode="eval")
    found = training_curves(RunNumbers(run))
    assert "No loss of the training was captured" in found.finding
    assert "lowest at step 49 (2), and 3 in the last one" in found.finding
    assert len(found.charts) == 1


def test_the_loss_of_many_ranks_says_whose_it_is() -> None:
    run = MadeRun()
    for rank in range(3):
        run.scalar("loss", np.linspace(2, 1, COUNT), rank=rank)
    assert "on rank 0, one of 3" in training_curves(RunNumbers(run)).finding


def test_more_ranks_than_are_read_are_told() -> None:
    run = MadeRun()
    for rank in range(70):
        run.scalar("step_time_s", ONES, rank=rank).scalar("forward_s", ONES / 2, rank=rank)
    assert (
        "The 64 checked ranks of 70 have about equally much to do."
        in load_balancing(RunNumbers(run)).finding
    )


def test_ranks_that_were_not_timed_are_not_called_one() -> None:
    run = MadeRun()
    for rank in range(2):
        run.scalar("loss", ONES, rank=rank)
    found = load_balancing(RunNumbers(run))
    assert found.status == "not_captured"
    assert "one rank" not in found.finding


def test_the_work_of_a_rank_is_not_compared_with_the_whole_step_of_another() -> None:
    run = MadeRun()
    for rank in range(2):
        run.scalar("step_time_s", ONES, rank=rank)
    run.scalar("forward_s", ONES / 10, rank=0)
    assert load_balancing(RunNumbers(run)).status == "good"


def test_a_step_whose_passes_were_not_timed_has_no_advice_about_them() -> None:
    run = MadeRun().scalar("step_time_s", ONES).scalar("data_wait_s", ONES / 100)
    found = step_phases(RunNumbers(run))
    assert "were not timed" in found.finding
    assert found.advice == ""
    assert found.status == "plain"


def test_a_forward_pass_alone_is_not_compared_with_the_backward_pass() -> None:
    run = MadeRun().scalar("step_time_s", ONES).scalar("forward_s", 0.6 * ONES)
    found = step_phases(RunNumbers(run))
    assert found.finding == "The backward pass was not timed."
    assert found.advice == ""


def test_a_share_of_nearly_all_is_told_in_percent() -> None:
    own = 0.1 * ONES
    own[50] = 4_000
    found = outliers(RunNumbers(MadeRun().scalar("step_time_s", own)))
    assert "more than usual, 100 % of the time of all steps." in found.finding


def test_gradients_that_were_never_finite_were_captured() -> None:
    run = MadeRun().tensors("gradients", "l2", ["a.weight"], [[np.nan, np.nan]])
    found = tensors(RunNumbers(run))
    assert found.status != "not_captured"
    assert "No norm of a gradient was finite" in found.finding


def test_a_failure_without_a_grave_issue_is_not_called_right() -> None:
    run = MadeRun()
    run.say(view_of(run, outcome="failed", exit_code=1), issue_of(run, severity="info"))
    report, _ = reported(run)
    assert "Nothing is wrong" not in report.verdict
    assert "The rules found nothing worse than this, worth knowing: the loss is NaN." in (
        report.verdict
    )


def test_a_lost_run_has_lasted_until_it_was_last_heard_of() -> None:
    run = MadeRun()
    ranks = [{"rank": 0, "last_step": 199, "last_heard_ms": START_MS + 60_000}]
    lost = view_of(run, state="lost", outcome=None, exit_code=None, ended_ms=None, ranks=ranks)
    report, _ = reported(run.say(lost))
    facts = {figure.name: figure.value for figure in report.facts}
    assert facts["duration"] == 60


def test_issues_of_earlier_incarnations_are_pointed_at() -> None:
    run = MadeRun()
    run.say(view_of(run), issue_of(run, incarnation="7a1f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a22"))
    report, _ = reported(run)
    assert "No rule found an issue. This report is about one incarnation." in report.verdict
    assert "Other incarnations of the run have 1 issue: `tocsin issues made`." in report.verdict


def test_a_training_that_was_resumed_is_not_credited_with_the_steps_before() -> None:
    steps = np.arange(500, 550)
    run = MadeRun().scalar("loss", np.linspace(2, 1, 50), steps=steps)
    report, _ = reported(run.say(view_of(run, last_step=549)))
    assert (
        "completed after step 549, 3.3 min after its start. Its numbers begin at step 500."
        in report.verdict
    )


def test_a_job_without_sampled_gpus_is_not_said_to_train_on_the_cpu() -> None:
    run = MadeRun().node({"cpu.percent": 50 * ONES})
    found = cpu_bottlenecks(RunNumbers(run))
    assert "trains on the CPU" not in found.finding
    assert "not held up" not in found.finding  # nothing was sampled that says so
    assert found.status == "plain"


def test_the_pressure_of_a_node_is_not_told_as_that_of_the_job() -> None:
    run = MadeRun().node({"cpu.percent": 99 * ONES, "pressure.cpu_some_percent": 60 * ONES})
    found = cpu_bottlenecks(RunNumbers(run))
    assert "On node-1 tasks of any program were waiting for a CPU for 60 %" in found.finding


def test_a_full_gpu_is_not_called_a_leak() -> None:
    run = MadeRun().node(
        {
            "gpu.0.utilization_percent": 90 * ONES,
            "gpu.0.memory_used_bytes": 79 * GIB * ONES,
            "gpu.0.memory_total_bytes": 80 * GIB * ONES,
        }
    )
    found = memory(RunNumbers(run))
    assert "almost full" in found.finding
    assert "`.item()`" not in found.advice
    assert "smaller batch" in found.advice


def test_a_node_without_samples_of_memory_says_so() -> None:
    found = memory(RunNumbers(MadeRun().node({"cpu.percent": 50 * ONES})))
    assert found.status == "not_captured"


def test_each_gpu_of_a_large_job_is_judged() -> None:
    made = MadeRun(run_id="large")
    for node in range(16):
        columns: dict[str, list[float]] = {"cpu.percent": [20.0] * 80}
        for gpu in range(8):
            columns[f"gpu.{gpu}.utilization_percent"] = [20.0 if node == 15 else 95.0] * 80
            columns[f"gpu.{gpu}.memory_used_bytes"] = [9.9e9 if node == 15 else 4e9] * 80
            columns[f"gpu.{gpu}.memory_total_bytes"] = [1e10] * 80
            columns[f"gpu.{gpu}.of_job"] = [1.0] * 80
        made.node(columns, name=f"node-{node:02}")
    numbers = RunNumbers(made)
    found = gpus.gpu_utilization(numbers)
    assert "Under-used" in found.finding
    assert found.status == "info"
    assert len(found.figures) == 64
    assert "of gpu 0 of node-15" in memory(numbers).finding
    assert "and 2 more is almost full" in memory(numbers).finding


def test_what_the_user_logs_is_not_left_out_without_a_word() -> None:
    made = MadeRun(run_id="logs").scalar("loss", np.linspace(2, 1, 50))
    made.scalar("log.feature_importance_entropy", np.full(50, 1.0))
    for i in range(33):
        made.scalar(f"log.metric_{i:02}", np.full(50, float(i)))
    made.scalar("log.feature_importance.a", np.full(50, 1.0))
    found = training_curves(RunNumbers(made))
    charts = " ".join(found.charts)
    assert "metric_28" in charts
    assert "feature_importance_entropy" in charts
    assert "feature_importance.a" not in charts
    assert "4 scalars more that you log: `tocsin query` shows them." in found.finding


def test_of_many_scalars_only_those_are_read_that_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = MadeRun(run_id="logs").scalar("loss", np.linspace(2, 1, 50))
    for i in range(200):
        made.scalar(f"log.metric_{i:03}", np.full(50, float(i)))
    asked = []
    series = made.series

    def counted(name: str, *of: object, **more: object) -> object:
        asked.append(name)
        return series(name, *of, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(made, "series", counted)
    assert "170 scalars more" in training_curves(RunNumbers(made)).finding
    assert len(asked) < 50


def test_gpus_are_empty_where_their_node_was_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def kept(rows: object, x: object, values: np.ndarray, **named: object) -> str:
        drawn.append(values)
        return ""

    monkeypatch.setattr(f"{gpus.__name__}.heat_map", kept)
    columns = {f"gpu.{n}.utilization_percent": 90 * ONES for n in range(4)}
    gap = 90 * ONES
    gap[10:20] = np.nan  # not sampled
    run = MadeRun().node(columns | {"gpu.1.utilization_percent": gap})
    run.node({name: values[:50] for name, values in columns.items()}, name="node-2")
    gpus.gpu_utilization(RunNumbers(run))
    (cells,) = drawn
    assert np.isfinite(cells[:4]).mean(axis=1).tolist() == [1, 0.9, 1, 1]
    assert np.isfinite(cells[4:]).mean(axis=1).tolist() == [0.5] * 4


def test_workers_of_other_nodes_do_not_share_the_cores() -> None:
    run = MadeRun().scalar("step_time_s", ONES)
    given = {"run_id": run.run_id, "incarnation": run.incarnation}
    for rank in range(8):
        run.say(
            RunStarted.model_validate(given | {"rank": rank, "job_id": "j", "node": f"n{rank}"}),
            DataLoaderSeen.model_validate(
                given | {"rank": rank, "mode": "train", "workers": 4, "cores": 8}
            ),
        )
    assert data_loader(RunNumbers(run)).advice == ""
