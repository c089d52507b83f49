"""The metrics of the time of runs, and of what stops have saved."""

from __future__ import annotations

from tocsin.runtime import metrics as names
from tocsin.runtime.prometheus_metrics import PrometheusMetrics
from tocsin.schemas.records.goodput import Goodput, Outlook
from tocsin.schemas.records.run_view import RankView, RunView, TelemetryCounts
from tocsin.stream_rules.engine.run_accounts import RunAccounts


def view(run: str, *, ended: bool = False, incarnation: str = "i1") -> RunView:
    return RunView(
        run_id=run,
        incarnation=incarnation,
        state="ended" if ended else "running",
        outcome="stopped" if ended else None,
        ended_ms=1_000 if ended else None,
        last_step=999,
        goodput=Goodput(wall_s=100, productive_s=90, starting_s=10),
        outlook=Outlook(total_steps=4_600, step_s=1.0),
        devices={"H100": 8},
    )


def saved(metrics: PrometheusMetrics) -> float:
    return metrics.value(names.SAVED_HOURS, unit="GPU-hours")


def productive(metrics: PrometheusMetrics, accounts: RunAccounts) -> float:
    accounts.publish()
    return metrics.value(names.RUN_SECONDS, part="productive")


def test_the_time_of_all_runs_of_a_worker_by_part() -> None:
    metrics = PrometheusMetrics()
    accounts = RunAccounts(metrics)
    for partition, run in ((1, "a"), (1, "b"), (2, "c")):
        accounts.apply(partition, view(run))

    assert productive(metrics, accounts) == 270
    accounts.drop(1, "a")
    assert productive(metrics, accounts) == 180
    accounts.release({1})
    assert productive(metrics, accounts) == 90


def test_what_a_stop_has_saved_counts_once_for_each_incarnation() -> None:
    metrics = PrometheusMetrics()
    accounts = RunAccounts(metrics)
    accounts.apply(1, view("a", ended=True))  # it ended before this worker
    assert saved(metrics) == 0
    accounts.apply(1, view("b"))
    assert saved(metrics) == 0
    for _ in range(2):
        accounts.apply(1, view("b", ended=True))
    assert saved(metrics) == 8
    accounts.apply(1, view("b", incarnation="i2"))
    accounts.apply(1, view("b", incarnation="i2", ended=True))
    assert saved(metrics) == 16


def test_the_ranks_of_runs_that_run_by_state() -> None:
    metrics = PrometheusMetrics()
    accounts = RunAccounts(metrics)
    ranks = tuple(RankView(rank=number, last_heard_ms=1, ended=number == 3) for number in range(4))
    counts = TelemetryCounts(ranks_late=1, ranks_missing=2)
    seen = view("a").model_copy(update={"ranks": ranks, "telemetry": counts})
    accounts.apply(1, seen)
    accounts.apply(2, seen.model_copy(update={"run_id": "b", "state": "lost"}))

    def by_state() -> list[float]:
        accounts.publish()
        return [metrics.value(names.RANKS, state=state) for state in ("heard", "late", "missing")]

    assert by_state() == [2, 1, 2]
    accounts.release({1})
    assert by_state() == [0, 0, 0]
