"""Looks that cost more than a short step may: near in the beginning, then as far as they cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from tocsin.emitter.plan.budget import Budget
from tocsin.emitter.probes.program_checks.kept_graphs import KeptGraphs
from tocsin.emitter.probes.program_checks.loss_inputs import LossInputs
from tocsin.emitter.probes.spacing import LATE, MAX_SPACING, Spacing
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.training.training import Training


def training(step_s: float | None) -> Training:
    """One with steps of that length; None: paced by steps."""
    budget = Budget(0.005, {}, fixed=step_s is None)
    budget.review([step_s or 0.001] * 32, 0.0)
    known = SimpleNamespace(isolation=Isolation(), schedule=SimpleNamespace(budget=budget))
    return cast(Training, known)


def looks(spacing: Spacing, of: Training, cost_s: float, until: int = 20_000) -> Iterator[int]:
    """The distances between looks that cost so much each, after `LATE`."""
    spacing.start(of, "looks")
    step = 0
    while step < until:
        of.isolation.spent["looks"] = of.isolation.spent.get("looks", 0.0) + cost_s
        apart = spacing.checked(step)
        if step >= LATE:
            yield apart
        else:
            assert apart == spacing.steps == 50
        step += apart


@pytest.mark.parametrize(
    ("step_s", "cost_s", "apart"),
    [
        (0.001, 20e-6, 50),  # 20 µs a step are allowed, and 1 µs for this
        (0.001, 90e-6, 100),
        (0.001, 490e-6, 500),
        (0.001, 1.0, MAX_SPACING),
        (0.1, 500e-6, 50),  # 500 µs are
        (None, 1.0, 50),
    ],
)
def test_looks_are_as_far_apart_as_they_cost(
    step_s: float | None, cost_s: float, apart: int
) -> None:
    assert set(looks(Spacing(50), training(step_s), cost_s)) == {apart}


def test_one_look_that_others_held_up_changes_nothing() -> None:
    of, spacing = training(0.001), Spacing(50)
    spacing.start(of, "looks")
    for step, cost_s in enumerate([40e-6, 40e-6, 1.0], LATE):
        of.isolation.spent["looks"] = of.isolation.spent.get("looks", 0.0) + cost_s
        assert spacing.checked(step) == 50


def test_nothing_is_spared_before_a_training_is_known() -> None:
    assert Spacing(50).checked(5000) == 50
    assert Budget(0.005, {}).allowed_s == math.inf


def test_losses_and_graphs_are_looked_at_by_it() -> None:
    losses, graphs, of = LossInputs(), KeptGraphs(), training(0.001)
    losses.spacing.start(of, "looks")
    graphs.spacing.start(of, "looks")
    seen, marked = [], []
    for step in range(3001):
        of.isolation.spent["looks"] = of.isolation.spent.get("looks", 0.0) + 400e-6
        if losses.due:
            seen.append(step)
        if step >= graphs.next_mark:
            marked.append(step)
            graphs.backward(None, step)
        losses.stepped(of, step)  # nothing is told: no loss has come by
    assert [step for step in seen if step >= 100] == [100, 200, 400, 600, 800, 1000, 2000]
    assert {b - a for a, b in itertools.pairwise(marked) if b <= LATE} == {10}
    assert {b - a for a, b in itertools.pairwise(marked) if a >= 2 * LATE} == {100}
