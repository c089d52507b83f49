"""Sections of a report, on runs whose numbers are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from support.docs.plain_english import found_in
from support.records.numbered_runs import START_MS, MadeRun, issue_of, view_of
from tocsin.console.report.numbers import RunNumbers
from tocsin.console.report.report import PERFORMANCE, report_of
from tocsin.console.report.section import Section
from tocsin.console.report.sections.batch_size import batch_size
from tocsin.console.report.sections.bottlenecks import cpu_bottlenecks, io_bottlenecks
from tocsin.console.report.sections.data_loader import data_loader
from tocsin.console.report.sections.goodput import goodput_section
from tocsin.console.report.sections.gpu_utilization import gpu_utilization
from tocsin.console.report.sections.issues import issues
from tocsin.console.report.sections.load_balancing import load_balancing
from tocsin.console.report.sections.memory import growth, memory
from tocsin.console.report.sections.outliers import outlier_limit, outliers
from tocsin.console.report.sections.predictions import predictions, read_confusion
from tocsin.console.report.sections.rules_summary import rules_summary
from tocsin.console.report.sections.step_durations import drift, step_durations
from tocsin.console.report.sections.step_phases import step_phases
from tocsin.console.report.sections.stop import stop
from tocsin.console.report.sections.system_usage import system_usage
from tocsin.console.report.sections.tensors import tensors
from tocsin.console.report.sections.training_curves import training_curves
from tocsin.console.report.sections.trees import importances, trees
from tocsin.console.report.verdict import verdict
from tocsin.schemas.compute_estimates import NO_PRICES
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.runs import DataLoaderSeen, PhaseMark, RunStarted

COUNT = 200
GIB = 1024.0**3


def timed(*, data: float = 0.001, forward: float = 0.01, backward: float = 0.02) -> MadeRun:
    """A run of 200 steps whose parts take so many seconds, and another millisecond."""
    run = MadeRun()
    ones = np.ones(COUNT)
    run.scalar("loss", np.linspace(2, 1, COUNT))
    run.scalar("data_wait_s", data * ones)
    run.scalar("forward_s", forward * ones)
    run.scalar("backward_s", backward * ones)
    run.scalar("step_time_s", (data + forward + backward + 0.001) * ones)
    return run


def sampled(run: MadeRun, *, gpu: float, memory: float, cpu: float, core: float = 50) -> MadeRun:
    """Samples of a node with one GPU: shares in percent."""
    ones = np.ones(COUNT)
    return run.node(
        {
            "cpu.percent": cpu * ones,
            "cpu.busiest_percent": core * ones,
            "cpu.iowait_percent": 0 * ones,
            "gpu.0.utilization_percent": gpu * ones,
            "gpu.0.memory_used_bytes": memory / 100 * 80 * GIB * ones,
            "gpu.0.memory_total_bytes": 80 * GIB * ones,
        }
    )


def figures(section: Section) -> dict[str, float | int | str]:
    return {figure.name: figure.value for figure in section.figures}


def loader(run: MadeRun, **fields: object) -> DataLoaderSeen:
    given = {"run_id": run.run_id, "incarnation": run.incarnation, "mode": "train", "workers": 2}
    return DataLoaderSeen.model_validate(given | fields)


@pytest.mark.parametrize("section", PERFORMANCE, ids=lambda one: one.__name__)
def test_a_section_without_data_says_how_to_capture_it(
    section: Callable[[RunNumbers], Section],
) -> None:
    found = section(RunNumbers(MadeRun()))
    assert found.status == "not_captured"
    assert found.finding
    assert found.advice
    assert not found.charts


def test_a_report_of_an_empty_run_is_one() -> None:
    found = report_of(MadeRun(), now_ms=START_MS)
    assert {one.status for one in found.sections} <= {"not_captured", "good", "plain"}
    assert "no rule has judged it" in found.verdict


# Training


def test_the_training_tells_how_the_loss_went() -> None:
    run = MadeRun().scalar("loss", np.linspace(4, 1, COUNT)).scalar("lr.0", np.ones(COUNT))
    found = training_curves(RunNumbers(run))
    assert "from 3.97 to 1.03" in found.finding
    assert figures(found)["lowest loss"] == 1
    assert len(found.charts) == 2


def test_a_loss_of_nan_is_told_with_its_first_step() -> None:
    values = np.ones(COUNT)
    values[50:60] = np.nan
    found = training_curves(RunNumbers(MadeRun().scalar("loss", values)))
    assert "at 10 steps, first at step 50" in found.finding
    assert found.status == "warning"


def test_evaluations_are_means_over_their_batches() -> None:
    run = MadeRun().scalar("loss", np.linspace(2, 1, 100))
    run.scalar("loss", [3, 1, 4, 2], steps=[49, 49, 99, 99], mode="eval")
    found = training_curves(RunNumbers(run))
    assert "lowest at step 49 (2), and 3 in the last one" in found.finding


# The step


def test_the_parts_of_a_step_add_up() -> None:
    found = step_phases(RunNumbers(timed()))
    shares = {name.removeprefix("share of "): value for name, value in figures(found).items()}
    assert sum(float(value) for value in shares.values()) == pytest.approx(100)
    assert shares["backward"] == pytest.approx(100 * 20 / 32)
    assert found.status == "good"


def test_much_time_for_others_is_told_with_its_largest_part() -> None:
    found = step_phases(RunNumbers(timed(data=0.1)))
    assert "waiting for data" in found.finding
    assert "data loader" in found.advice
    assert found.status == "info"


def test_a_long_forward_pass_is_told() -> None:
    found = step_phases(RunNumbers(timed(forward=0.1)))
    assert "forward pass takes 83 %" in found.finding


def test_named_phases_have_a_table() -> None:
    run = timed()
    mark = PhaseMark.model_validate(
        {"run_id": run.run_id, "incarnation": run.incarnation, "name": "warm <up>", "edge": "end",
         "duration_s": 2.5}
    )  # fmt: skip
    found = step_phases(RunNumbers(run.say(mark)))
    assert ("warm <up>", "1", "2.5 s", "2.5 s") in [row for t in found.tables for row in t.rows]


def test_step_durations_are_without_evaluations() -> None:
    run = timed()
    evaluation, total = np.zeros(COUNT), 0.032 * np.ones(COUNT)
    evaluation[100], total[100] = 50, 50.032
    run.scalar("evaluation_s", evaluation).scalar("step_time_s", total)
    found = step_durations(RunNumbers(run))
    assert figures(found)["mean step time"] == pytest.approx(0.032)


def test_a_run_that_gets_slower_is_told() -> None:
    run = MadeRun().scalar("step_time_s", np.linspace(0.1, 0.2, COUNT))
    found = step_durations(RunNumbers(run))
    assert "longer than in the first fifth" in found.finding
    assert found.advice
    assert drift(np.ones(10)) is None


def test_outliers_do_not_raise_their_own_limit() -> None:
    """A tenth of the steps, 20 times as long: mean and deviation would find none."""
    own = 0.01 * (1 + 0.05 * np.random.default_rng(0).standard_normal(COUNT))
    own[::10] *= 20
    assert (own > outlier_limit(own)).sum() == 20
    found = outliers(RunNumbers(MadeRun().scalar("step_time_s", own)))
    assert figures(found)["outliers"] == 19  # the first step does not count
    assert found.status == "info"


def test_outliers_name_what_they_have_in_common() -> None:
    run = timed()
    data, total = 0.001 * np.ones(COUNT), 0.032 * np.ones(COUNT)
    data[50::50] += 1
    total[50::50] += 1
    run.scalar("data_wait_s", data).scalar("step_time_s", total)
    found = outliers(RunNumbers(run))
    assert "waiting for data" in found.finding
    assert found.tables[0].rows[0][0] in {"50", "100", "150"}


# The node


def test_system_usage_has_the_statistics_of_each_metric() -> None:
    run = MadeRun().node({"cpu.percent": np.arange(101.0), "memory.used_bytes": np.full(101, GIB)})
    found = system_usage(RunNumbers(run))
    assert ("node-1", "CPU", "100 %", "99 %", "95 %", "50 %", "0 %") in found.tables[0].rows
    assert ("node-1", "memory", *["1 GiB"] * 5) in found.tables[0].rows


@pytest.mark.parametrize(
    ("gpu", "cpu", "advice"),
    [(90, 20, ""), (30, 20, "smaller machine"), (30, 90, "wait while the CPUs are busy")],
)
def test_system_usage_has_the_advice_of_the_reference(gpu: float, cpu: float, advice: str) -> None:
    found = system_usage(RunNumbers(sampled(timed(), gpu=gpu, memory=50, cpu=cpu)))
    assert advice in found.advice
    assert bool(found.advice) == bool(advice)


def test_a_gpu_that_fluctuates_is_told_apart_from_one_that_is_idle() -> None:
    idle = gpu_utilization(RunNumbers(sampled(timed(), gpu=20, memory=1, cpu=1)))
    assert "Under-used" in idle.finding
    values = np.where(np.arange(COUNT) % 5 == 0, 0, 95)
    run = MadeRun().node({"gpu.0.utilization_percent": values})
    assert "Idle again and again" in gpu_utilization(RunNumbers(run)).finding


def test_gpus_of_others_do_not_count() -> None:
    ones = np.ones(COUNT)
    run = MadeRun().node(
        {
            "gpu.0.utilization_percent": 90 * ones,
            "gpu.0.of_job": ones,
            "gpu.1.utilization_percent": 5 * ones,
            "gpu.1.of_job": 0 * ones,
        }
    )
    assert gpu_utilization(RunNumbers(run)).status == "good"


def test_room_for_a_larger_batch_needs_all_three() -> None:
    idle = sampled(timed(), gpu=30, memory=30, cpu=30).say(loader(timed(), batch_size=64))
    found = batch_size(RunNumbers(idle))
    assert found.status == "info"
    assert "3.0 times" in found.advice
    assert "64 samples" in found.finding
    for gpu, memory_percent, cpu in ((90, 30, 30), (30, 90, 30), (30, 30, 90)):
        full = sampled(timed(), gpu=gpu, memory=memory_percent, cpu=cpu)
        assert batch_size(RunNumbers(full)).status == "good"


def test_a_bottleneck_is_an_idle_gpu_beside_a_busy_core() -> None:
    found = cpu_bottlenecks(RunNumbers(sampled(timed(), gpu=5, memory=5, cpu=50, core=99)))
    assert figures(found)["samples with a bottleneck"] == 100
    assert found.status == "info"
    for gpu, core in ((5, 50), (80, 99)):
        fine = cpu_bottlenecks(RunNumbers(sampled(timed(), gpu=gpu, memory=5, cpu=50, core=core)))
        assert figures(fine)["samples with a bottleneck"] == 0
        assert fine.status == "good"


def test_without_a_gpu_it_counts_what_held_the_job() -> None:
    ones = np.ones(COUNT)
    run = MadeRun().node(
        {"cpu.percent": 100 * ones, "cpu.throttled_percent": 60 * ones, "cpu.iowait_percent": ones}
    )
    found = cpu_bottlenecks(RunNumbers(run))
    assert "held back by its CPU quota for 60 %" in found.finding
    assert io_bottlenecks(RunNumbers(run)).status == "good"


def test_a_slow_rank_is_found_by_its_own_work() -> None:
    """All ranks end their steps together, so the step times are equal."""
    run = MadeRun()
    for rank in range(4):
        ones = np.ones(COUNT)
        run.scalar("step_time_s", 0.1 * ones, rank=rank)
        run.scalar("forward_s", (0.06 if rank == 2 else 0.02) * ones, rank=rank)
    found = load_balancing(RunNumbers(run))
    assert "Rank 2" in found.finding
    assert found.status == "info"


def test_equal_ranks_are_balanced() -> None:
    run = MadeRun()
    for rank in range(2):
        run.scalar("step_time_s", 0.1 * np.ones(COUNT), rank=rank)
        run.scalar("forward_s", 0.02 * np.ones(COUNT), rank=rank)
    assert load_balancing(RunNumbers(run)).status == "good"


def test_memory_that_grows_is_told_and_memory_of_the_start_is_not() -> None:
    steady = np.concatenate([np.linspace(0, 10, 20), np.full(180, 10)]) * GIB
    assert growth(steady) == 0
    leak = np.linspace(5, 10, COUNT) * GIB
    run = MadeRun().node(
        {"memory.process_tree_bytes": leak, "memory.total_bytes": np.full(COUNT, 64 * GIB)}
    )
    found = memory(RunNumbers(run))
    assert "It grew by" in found.finding
    assert "of 64 GiB" in found.finding
    assert found.status == "info"


def test_memory_of_all_nodes_is_judged_and_those_that_grow_most_are_shown() -> None:
    run = MadeRun()
    for number in range(12):
        grown = {10: 4, 11: 8}.get(number, 0)
        used = np.linspace(5, 5 + grown, COUNT) * GIB
        run.node({"memory.process_tree_bytes": used}, name=f"node-{number:02}")
    found = memory(RunNumbers(run))
    assert found.status == "info"
    shown = [figure.name.partition(":")[0] for figure in found.figures]
    assert shown == ["node-11", "node-10", *(f"node-0{number}" for number in range(6))]
    assert len(found.charts) == 8
    assert "node-06" not in found.finding
    assert "4 more nodes were judged: it did not grow there" in found.finding


def test_more_nodes_that_grow_than_are_shown_are_counted() -> None:
    run = MadeRun()
    for number in range(10):
        run.node(
            {"memory.process_tree_bytes": np.linspace(5, 10, COUNT) * GIB}, name=f"node-{number}"
        )
    assert "2 more nodes were judged: it grew on 2 of them." in memory(RunNumbers(run)).finding


# The loader


def test_a_starving_loader_without_workers_is_told_to_have_some() -> None:
    run = timed(data=0.1)
    found = data_loader(RunNumbers(run.say(loader(run, workers=0, cores=8))))
    assert "num_workers" in found.advice
    assert found.status == "info"


def test_a_loader_with_too_many_workers_is_told() -> None:
    run = timed()
    found = data_loader(RunNumbers(run.say(loader(run, workers=32, cores=8))))
    assert "32 workers share 8 cores" in found.advice


def test_memory_that_is_not_pinned_is_told_beside_a_gpu() -> None:
    run = timed()
    found = data_loader(RunNumbers(run.say(loader(run, gpu=True, cores=4))))
    assert "pin_memory" in found.advice


# Rules, issues, the stop


def test_rules_are_sorted_by_how_often_they_fired() -> None:
    run = MadeRun()
    other = issue_of(run, issue_id="c" * 8 + "-3b0f-5d0e-8a35-6a4c1c1f9d27", rule="loss_spike",
                     use="loss_spike", severity="warning", times=5)  # fmt: skip
    rules = {"nonfinite": "issues_found", "loss_spike": "issues_found", "overfit": "in_progress"}
    run.say(view_of(run, rules=rules), issue_of(run), other)
    found = rules_summary(RunNumbers(run))
    assert [row[0] for row in found.tables[0].rows] == ["loss_spike", "nonfinite"]
    assert (
        found.tables[1].rows
        == [
            (
                "overfit",
                "in progress",
                "The evaluation loss rises while it is well above the training loss.",
            )
        ]
        or found.tables[1].rows[0][0] == "overfit"
    )
    assert found.status == "critical"


def test_an_issue_has_its_evidence_and_its_story() -> None:
    run = MadeRun()
    run.say(view_of(run), issue_of(run))
    (part,) = issues(RunNumbers(run), NO_PRICES).parts
    assert part.status == "critical"
    assert part.finding == "the loss is NaN"
    assert len(part.charts) == 1
    assert {p.heading for p in part.paragraphs} >= {"Where it started", "Evidence", "What was done"}


def test_causes_come_before_their_consequences() -> None:
    run = MadeRun()
    cause = issue_of(run)
    consequence = issue_of(
        run, issue_id="c" * 8 + "-3b0f-5d0e-8a35-6a4c1c1f9d27", consequence_of=cause.issue_id,
        onset_ms=START_MS,
    )  # fmt: skip
    run.say(view_of(run), consequence, cause)
    keys = [part.key for part in issues(RunNumbers(run), NO_PRICES).parts]
    assert keys == [f"issue-{cause.short_id}", f"issue-{consequence.short_id}"]


def test_the_stop_tells_who_was_notified() -> None:
    run = MadeRun()
    issue = issue_of(run)
    stopped = view_of(
        run, outcome="stopped", exit_code=79,
        stop={"state": "exited", "command_id": issue.issue_id, "issue_id": issue.issue_id,
              "step": 41, "how": "edge", "states": {"requested": START_MS, "exited": START_MS + 9}},
    )  # fmt: skip
    run.say(stopped, issue)
    run.runs_view.add(_delivery(run))
    found = stop(RunNumbers(run), NO_PRICES)
    assert "Notified: mail." in found.finding
    assert "exited" in found.finding
    assert found.tables[0].rows[0][1] == "mail"


def _delivery(run: MadeRun) -> Delivery:
    return Delivery(
        delivery_id="7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11",
        issue_id="b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27",
        run_id=run.run_id,
        incarnation=run.incarnation,
        rule="nonfinite",
        issue_state="firing",
        action="mail",
        kind="email",
        state="delivered",
        reason="accepted",
        created_ms=START_MS,
        updated_ms=START_MS,
        give_up_ms=START_MS,
    )


def test_goodput_names_what_to_do_about_the_largest_loss() -> None:
    run = MadeRun()
    goodput = {"wall_s": 100, "productive_s": 50, "checkpoint_s": 40, "starting_s": 10}
    found = goodput_section(RunNumbers(run.say(view_of(run, goodput=goodput))))
    assert found.status == "info"
    assert "checkpoints less often" in found.advice
    assert figures(found)["productive share"] == 50


# Tensors, predictions, trees


def test_tensors_name_the_largest_and_the_smallest_gradient() -> None:
    run = MadeRun().tensors("gradients", "l2", ["a.weight", "b.weight"], [[1, 2], [10, 20]])
    found = tensors(RunNumbers(run))
    assert "largest for b.weight (15) and smallest for a.weight (1.5)" in found.finding


def test_precision_and_recall_are_those_of_the_confusion_matrix() -> None:
    run = MadeRun()
    # Of class 0, 8 of 10 are right; of class 1, 5 of 10.
    run.tensors("confusion", "0", ["0", "1"], [[8], [5]], steps=[99], mode="eval")
    run.tensors("confusion", "1", ["0", "1"], [[2], [5]], steps=[99], mode="eval")
    run.tensors("labels", "labels", ["0", "1"], [[10], [10]], steps=[99], mode="eval")
    confusion = read_confusion(RunNumbers(run), "eval")
    assert confusion is not None
    scores = {name: values for name, *values in confusion.scores()}
    assert scores["micro"] == pytest.approx([0.65, 0.65, 0.65])
    precision = (8 / 13 + 5 / 7) / 2
    assert scores["macro"][:2] == pytest.approx([precision, 0.65])
    found = predictions(RunNumbers(run))
    assert found is not None
    assert figures(found)["accuracy"] == pytest.approx(65)
    assert found.tables[1].rows[0] == ("1", "0", "5")


def test_importances_are_read_by_kind() -> None:
    run = MadeRun()
    for kind, age in (("gain", 3.0), ("weight", 1.0)):
        run.scalar(f"log.feature_importance.{kind}.age", [0, age])
        run.scalar(f"log.feature_importance.{kind}.income", [0, 1.0])
    run.scalar("log.feature_importance.plain", [0.5])
    run.scalar("log.tree_depth", [3, 7, 5])
    found = importances(RunNumbers(run))
    assert found["gain"] == {"age": 3, "income": 1}
    assert found[""] == {"plain": 0.5}
    section = trees(RunNumbers(run))
    assert section is not None
    assert "7 levels" in section.finding
    assert len(section.charts) == 4


def test_a_run_without_trees_has_no_such_section() -> None:
    assert trees(RunNumbers(timed())) is None
    assert predictions(RunNumbers(timed())) is None


# The verdict


def _verdict(run: MadeRun) -> str:
    found = report_of(run, now_ms=START_MS + 500_000)
    return verdict(RunNumbers(run), found.sections, NO_PRICES, START_MS + 500_000)


def test_the_verdict_begins_with_the_end_of_the_run() -> None:
    run = timed()
    assert _verdict(run.say(view_of(run))).startswith(
        "Run made completed after 200 steps in 3.3 min."
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outcome": "failed", "exit_code": 3}, "failed with exit code 3"),
        ({"outcome": "stopped"}, "was stopped"),
        ({"state": "running", "outcome": None, "ended_ms": None}, "is running: 200 steps"),
        ({"state": "lost", "outcome": None, "ended_ms": None}, "was lost"),
    ],
)
def test_the_verdict_knows_each_end(fields: dict[str, object], words: str) -> None:
    run = timed()
    assert words in _verdict(run.say(view_of(run, **fields)))


def test_the_verdict_has_the_main_finding_and_what_to_try() -> None:
    run = timed()
    found = _verdict(run.say(view_of(run), issue_of(run)))
    assert "The main finding is critical: the loss is NaN." in found
    assert "What to try: Go back to a checkpoint." in found


def test_facts_have_the_command_and_the_versions() -> None:
    run = timed()
    started = RunStarted.model_validate(
        {"run_id": run.run_id, "incarnation": run.incarnation, "job_id": "j", "command": "train.py",
         "node": "node-1", "versions": {"torch": "2.9"}, "optimizer": "SGD", "parameters": 12}
    )  # fmt: skip
    facts = {f.name: f.value for f in report_of(run.say(started), now_ms=START_MS).facts}
    assert facts["command"] == "train.py"
    assert facts["versions"] == "torch 2.9"
    assert facts["parameters"] == 12


def test_what_the_sections_say_is_plain_english() -> None:
    runs = [MadeRun(), timed(), sampled(timed(data=0.1), gpu=5, memory=5, cpu=95, core=99)]
    for run in runs:
        run.say(view_of(run), issue_of(run))
        for section in report_of(run, now_ms=START_MS).sections:
            for text in (section.title, section.finding, section.advice):
                assert list(found_in(text)) == []
