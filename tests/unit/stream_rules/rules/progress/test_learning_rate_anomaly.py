"""`learning_rate_anomaly` on made series, and on PyTorch's own schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedules

from tocsin.schemas.records.runs import Group, RunEnded, RunStarted
from tocsin.stream_rules.testing import RunBuilder, assert_fires, assert_quiet, issues_of, only

SPECS = only("learning_rate_anomaly")
RULE = "learning_rate_anomaly"
Schedule = Callable[[torch.optim.Optimizer], object]


def run_of(rates: list[float], *, base: float | None = None, second: float = 1e-3) -> RunBuilder:
    run = RunBuilder()
    group = Group(index=0, parameters=1, lr=rates[0], initial_lr=base)
    run.event(RunStarted(run_id=run.run_id, incarnation="made-1", job_id="job", groups=(group,)))
    columns = {"lr.0": rates}
    if second != 1e-3:
        columns["lr.1"] = [second] * len(rates)
    run.steps(range(len(rates)), loss=1.0, columns=columns)
    return run


def test_a_jump_up_fires_at_its_step() -> None:
    run = run_of([1e-3] * 50 + [0.5] * 50)
    issue = assert_fires(run.records, RULE, first_step=50, specs=SPECS)
    assert (issue.severity, issue.stop_worthy) == ("warning", False)
    assert (issue.subject.kind, issue.subject.name) == ("learning_rate", "lr.0")


@pytest.mark.parametrize("after", [0.5, 1e-6], ids=["up", "down"])
def test_a_jump_is_over_when_the_rate_is_back_and_not_before(after: float) -> None:
    away = [1e-3] * 50 + [after] * 100
    assert [i.state for i in issues_of(run_of(away).records, specs=SPECS)] == ["firing"]
    back = issues_of(run_of([*away, *[2e-3] * 50]).records, specs=SPECS)
    assert [(i.state, i.first_step) for i in back] == [("firing", 50), ("resolved", 50)]
    assert (back[1].step, back[1].reason) == (170, back[0].reason)


def test_a_second_jump_further_away_is_the_same_issue() -> None:
    run = run_of([1e-3] * 50 + [0.5] * 30 + [30.0] * 30 + [0.5] * 30)
    assert_fires(run.records, RULE, first_step=50, specs=SPECS)
    assert [i.state for i in issues_of(run.records, specs=SPECS)] == ["firing"]


def test_a_jump_down_is_an_info() -> None:
    run = run_of([1e-3] * 50 + [1e-6] * 50)
    assert assert_fires(run.records, RULE, first_step=50, specs=SPECS).severity == "info"


def of_two_optimizers(*, second: int, steps: int = 50) -> RunBuilder:
    """A head is trained, then all of it by an optimizer of so many groups, at low rates."""
    run = run_of([1e-2] * steps)
    rates = {f"lr.{i}": [1e-4 * 10**i] * steps for i in range(second)}
    run.steps(range(steps, 2 * steps), loss=1.0, columns=rates)
    return run


def test_groups_of_another_optimizer_are_not_compared() -> None:
    assert issues_of(of_two_optimizers(second=2).records, specs=SPECS) == []
    assert assert_fires(of_two_optimizers(second=1).records, RULE, specs=SPECS).branch == "jump"


def test_a_jump_of_an_optimizer_that_another_one_follows_is_over() -> None:
    run = run_of([1e-3] * 50 + [0.5] * 30)
    run.steps(range(80, 130), loss=1.0, columns={"lr.0": 5e-2, "lr.1": 5e-2})
    issues = issues_of(run.records, specs=SPECS)
    assert [(i.state, i.first_step) for i in issues] == [("firing", 50), ("resolved", 50)]


def test_two_optimizers_that_step_in_turn_are_left_alone() -> None:
    run = RunBuilder()
    run.started(optimizers=2)
    for step in range(60):
        columns = {"lr.0": 1e-5, "lr.1": 1e-5} if step % 2 else {"lr.0": 1e-2}
        run.steps([step], loss=1.0, columns=columns)
    assert issues_of(run.records, specs=SPECS) == []


def test_a_jump_at_the_first_steps_fires() -> None:
    assert_fires(run_of([1e-3, 1.0, 1.0]).records, RULE, first_step=1, specs=SPECS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_number_fires(value: float) -> None:
    assert_fires(run_of([1e-3] * 5 + [value] * 5).records, RULE, first_step=5, specs=SPECS)


def test_it_goes_on_since_the_step_at_which_it_began() -> None:
    run = run_of([1e-3] * 50 + [math.nan] * 100)
    run.wait(3600)
    run.steps(range(150, 160), columns={"lr.0": [1e-3] * 5 + [math.nan] * 5})
    issues = issues_of(run.records, specs=SPECS)
    assert [i.state for i in issues] == ["firing", "ongoing"]
    reason = "the learning rate of lr.0 has been nan since step 50"
    assert [i.reason for i in issues] == [reason] * 2


def test_all_nan_is_one_issue() -> None:
    assert_fires(run_of([math.nan] * 100).records, RULE, first_step=0, specs=SPECS)


def test_zero_for_twenty_steps_fires() -> None:
    assert_fires(run_of([1e-3] * 5 + [0.0] * 20).records, RULE, first_step=5, specs=SPECS)
    issue = assert_fires(run_of([0.0] * 30).records, RULE, first_step=0, specs=SPECS)
    assert issue.reason.endswith("zero since step 0: the model does not learn")


def test_zero_from_the_first_step_without_a_schedule_fires_at_once() -> None:
    issue = assert_fires(run_of([0.0] * 10).records, RULE, first_step=0, specs=SPECS)
    assert (issue.branch, issue.step) == ("zero", 4)


def unstepped(epochs: float, *, stepped: float = 0.0, step: int = 60) -> RunBuilder:
    run = run_of([1e-3] * (step + 1), base=1e-3)
    run.steps([step], columns={"schedule_steps": stepped, "epochs": epochs})
    return run


def test_a_schedule_that_is_not_stepped_in_two_epochs_fires() -> None:
    issue = assert_fires(unstepped(2.0).records, RULE, first_step=0, specs=SPECS)
    assert (issue.branch, issue.severity) == ("unstepped", "warning")
    assert_quiet(unstepped(1.0).records, specs=SPECS)
    assert_quiet(unstepped(5.0, stepped=1.0).records, specs=SPECS)


def test_a_schedule_that_is_not_stepped_by_the_end_fires() -> None:
    run = unstepped(0.0)
    run.event(RunEnded(run_id=run.run_id, incarnation="made-1", outcome="completed", last_step=60))
    assert assert_fires(run.records, RULE, specs=SPECS).branch == "unstepped"
    early = unstepped(0.0, step=20)
    early.event(
        RunEnded(run_id=early.run_id, incarnation="made-1", outcome="completed", last_step=500)
    )
    assert_quiet(early.records, specs=SPECS)


def test_a_rate_that_has_vanished_fires_and_one_that_ends_low_does_not() -> None:
    by_batches = [0.1 * 0.1 ** (i // 3) for i in range(60)]
    issue = assert_fires(run_of(by_batches, base=0.1).records, RULE, first_step=12, specs=SPECS)
    assert issue.branch == "vanished"
    exponential = [1e-2 * 1e-5 ** (i / 1000) for i in range(1000)]
    assert_quiet(run_of(exponential, base=1e-2).records, specs=SPECS)


def test_a_schedule_that_stands_still_is_an_info() -> None:
    issue = assert_fires(run_of([1e-3] * 1000, base=1e-3).records, RULE, specs=SPECS)
    assert issue.severity == "info"
    assert "scheduler exists" in issue.reason


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: run_of([1e-3] * 3000), id="constant, none declared"),
        pytest.param(lambda: run_of([0.0] * 19 + [1e-3] * 50, base=1e-3), id="begins at zero"),
        pytest.param(lambda: run_of([0.0] * 4 + [1e-3] * 50), id="begins at zero by hand"),
        pytest.param(lambda: run_of([0.0] * 100, second=1e-4), id="one group frozen"),
        pytest.param(lambda: run_of([1e-6] * 30 + [2e-4] * 30, base=1e-3), id="warm-up by epochs"),
        pytest.param(lambda: run_of([1e-3] * 50 + [1e-4] * 50), id="decay by ten"),
        pytest.param(lambda: run_of([1e-6 + 1e-4 * n for n in range(50)]), id="warm-up by steps"),
        pytest.param(lambda: run_of([1e-3]), id="one step"),
    ],
)
def test_left_alone(make: Callable[[], RunBuilder]) -> None:
    assert_quiet(make().records, specs=SPECS)


def test_duplicates_and_out_of_order_ranks_change_nothing() -> None:
    run = RunBuilder(world_size=2)
    for step in range(60):
        run.steps([step], rank=1, columns={"lr.0": 10.0 ** (step % 5)})
        run.steps([step], columns={"lr.0": 1e-3})
        run.again(run.records[-1])
    assert issues_of(run.records, specs=SPECS) == []
    late = RunBuilder(world_size=2)
    late.steps(range(60), rank=0, columns={"lr.0": 1e-3})
    late.steps(range(60), rank=1, columns={"lr.0": 5.0})
    assert_quiet(late.records, specs=SPECS)


def test_a_resumed_run_starts_anew() -> None:
    run = run_of([1e-3] * 50)
    run.incarnation, run.boot = "made-2", "boot-2"
    run.started()
    run.steps(range(50, 100), columns={"lr.0": 1.0})
    assert_quiet(run.records, specs=SPECS)


def train(schedule: Schedule | None, *, steps: int = 60, forget: bool = False) -> RunBuilder:
    """A tiny regression under a schedule; the rates that its optimizer has used."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = schedule(optimizer) if schedule is not None else None
    run = RunBuilder()
    group = optimizer.param_groups[0]
    start = Group(index=0, parameters=2, lr=group["lr"], initial_lr=group.get("initial_lr"))
    run.event(RunStarted(run_id=run.run_id, incarnation="made-1", job_id="job", groups=(start,)))
    for step in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.steps([step], loss=loss.item(), columns={"lr.0": group["lr"]})
        if made is not None and not forget:
            made.step()  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(None, id="none"),
        pytest.param(lambda o: schedules.StepLR(o, 20), id="steps"),
        pytest.param(lambda o: schedules.CosineAnnealingLR(o, 60), id="cosine to zero"),
        pytest.param(lambda o: schedules.CosineAnnealingWarmRestarts(o, 20), id="warm restarts"),
        pytest.param(lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=61), id="one cycle"),
        pytest.param(lambda o: schedules.LinearLR(o, 1e-8, total_iters=30), id="linear warm-up"),
        pytest.param(lambda o: schedules.LambdaLR(o, lambda n: min(1.0, n / 30)), id="from zero"),
        pytest.param(lambda o: schedules.ExponentialLR(o, 0.9), id="exponential"),
        pytest.param(lambda o: schedules.CyclicLR(o, 1e-4, 0.1, step_size_up=10), id="cyclic"),
    ],
)
def test_schedules_of_pytorch_are_left_alone(schedule: Schedule | None) -> None:
    assert_quiet(train(schedule).records, specs=SPECS)


def test_a_schedule_that_ends_before_the_training_is_seen() -> None:
    run = train(lambda o: schedules.LinearLR(o, 1.0, 0.0, total_iters=20))
    assert_fires(run.records, RULE, first_step=20, specs=SPECS)


def test_a_schedule_that_is_never_stepped_is_seen() -> None:
    run = train(lambda o: schedules.CosineAnnealingLR(o, 60), forget=True)
    specs = only(RULE, constant_steps=50)
    assert_fires(run.records, RULE, first_step=0, specs=specs)
    assert_quiet(train(lambda o: schedules.CosineAnnealingLR(o, 60)).records, specs=specs)


def test_a_schedule_that_leaps_is_seen() -> None:
    """A warm-up that was meant to end at the base rate, and ends at thirty times it."""
    run = train(lambda o: schedules.LambdaLR(o, lambda n: 1.0 if n < 30 else 30.0))
    issue = assert_fires(run.records, RULE, first_step=30, specs=SPECS)
    assert issue.evidence.facts[0].value == "jump"


def test_a_schedule_without_a_number_is_seen() -> None:
    """A decay by a root, of a training that is longer than its schedule."""

    def root(n: int) -> float:
        with np.errstate(invalid="ignore"):
            return float(np.sqrt(np.float64(30 - n) / 30))

    run = train(lambda o: schedules.LambdaLR(o, root))
    issue = assert_fires(run.records, RULE, first_step=31, specs=SPECS)
    assert issue.evidence.facts[0].value == "not finite"


@pytest.mark.parametrize("per_frame", [1, 50, 100])
def test_a_cosine_to_zero_is_quiet_however_many_steps_a_frame_has(per_frame: int) -> None:
    rates = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 200)) for step in range(200)]
    run = RunBuilder(step_ms=5)
    run.started()
    run.steps(range(200), per_frame=per_frame, loss=1.0, columns={"lr.0": rates})
    run.ended()
    assert_quiet(run.records, specs=SPECS)
