"""`loss_not_decreasing` on the first steps of a run that begins anew, and of one that goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from support.rules.restarts import told_with_restarts
from tocsin.schemas.records.runs import RunStarted
from tocsin.stream_rules.engine.replay import replay
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

RULE = only("loss_not_decreasing")
ROWS = ("head.weight", "body.weight", "body.bias")
Losses = npt.NDArray[np.float64] | Sequence[float]


def flat(steps: int = 200, *, seed: int = 0) -> npt.NDArray[np.float64]:
    return 2.3 + 0.02 * np.random.default_rng(seed).standard_normal(steps)


def run_of(
    losses: Losses,
    *,
    ratio: float = 2e-3,
    averages: Sequence[float] = (0.1, 0.1, 0.1),
    optimizers: int = 1,
    every: int = 1,
    name: str = "AdamW",
) -> RunBuilder:
    """`averages`: the optimizer's first averages, as multiples of each gradient."""
    run = RunBuilder()
    started = RunStarted(
        run_id=run.run_id,
        incarnation=run.incarnation,
        job_id="job",
        optimizer=name,
        optimizers=optimizers,
    )
    run.event(started)
    for i, loss in enumerate(losses):
        step = every * i
        run.steps([step], loss=float(loss))
        if step % 10 == 0:
            norms = np.array([1.0, 3.0, 0.2])
            run.tensors(step, "gradients", ROWS, columns={"l2": norms})
            run.tensors(step, "updates", ROWS, columns={"update_l2": ratio, "l2": 1.0})
        if step == 0 and averages:
            names = [f"{row}.exp_avg" for row in ROWS]
            run.tensors(0, "optimizer_state", names, columns={"l2": norms * averages})
    return run


def test_a_run_that_learns_nothing_is_named_after_a_hundred_steps() -> None:
    issue = assert_fires(run_of(flat()).records, "loss_not_decreasing", first_step=0, specs=RULE)
    assert (issue.branch, issue.severity, issue.step) == ("stuck", "warning", 99)
    assert "weights have moved by 20 %" in issue.reason
    records = run_of(flat()).records
    told = [one.issue.model_dump_json() for one in replay(records, RULE)]
    assert told_with_restarts(records, RULE, every=11) == told


def test_a_loss_that_rises_from_the_beginning_is_named_too() -> None:
    run = run_of([2.3 + 0.002 * i for i in range(120)])
    assert assert_fires(run.records, "loss_not_decreasing", specs=RULE).branch == "stuck"


def test_plain_gradient_descent_keeps_nothing_that_could_tell() -> None:
    run = run_of(flat(), averages=(), name="SGD")
    assert_fires(run.records, "loss_not_decreasing", specs=RULE)


def test_it_is_over_when_the_loss_falls_after_all() -> None:
    losses = np.concatenate([flat(150), np.linspace(2.3, 0.5, 300)])
    issues = issues_of(run_of(losses).records, specs=RULE)
    assert [(i.state, i.branch) for i in issues] == [("firing", "stuck"), ("resolved", "stuck")]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_of(flat(), ratio=1e-6), id="fine-tuning at 1e-6"),
        pytest.param(run_of(flat(), averages=(0.5, 0.1, 2.0)), id="goes on"),
        pytest.param(run_of(flat(), averages=()), id="not known whether it goes on"),
        pytest.param(run_of(flat(), optimizers=2), id="two optimizers"),
        pytest.param(run_of(flat(90)), id="ninety steps"),
        pytest.param(run_of(flat() - 2.4), id="negative losses"),
        pytest.param(run_of(0.5 + 50 * (flat() - 2.3)), id="noise that hides everything"),
        pytest.param(run_of(np.linspace(2.3, 2.1, 200) + flat() - 2.3), id="slow"),
        pytest.param(run_of(np.full(200, np.nan)), id="no numbers"),
        pytest.param(run_of(np.zeros(200)), id="zero"),
        pytest.param(run_of(np.geomspace(3, 1, 20), every=50), id="each fiftieth step"),
    ],
)
def test_runs_that_may_be_well(run: RunBuilder) -> None:
    assert issues_of(run.records, specs=RULE) == []
