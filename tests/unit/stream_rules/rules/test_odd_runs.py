"""Cold, short and odd runs that are well: no rule at its defaults says more than an info."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from tocsin.schemas.records.runs import RunStarted
from tocsin.stream_rules.testing import RunBuilder, assert_quiet

Doubles = npt.NDArray[np.float64]
ROWS = ("head.weight", "body.2.weight", "body.1.weight", "body.0.weight")


@dataclass
class Odd:
    """A run as capture would tell it: healthy, unless what is set says otherwise."""

    losses: Doubles
    first_step: int = 0
    optimizers: int = 1
    loss_every: int = 1
    ratio: float = 2e-3
    norms: Doubles | None = None
    rates: Doubles | None = None
    seconds: Doubles | None = None
    evaluates: bool = True
    restored: bool = False

    def run(self) -> RunBuilder:
        run = RunBuilder()
        run.event(
            RunStarted(
                run_id=run.run_id,
                incarnation=run.incarnation,
                job_id="job",
                optimizer="AdamW",
                optimizers=self.optimizers,
                collections=("gradients", "weights"),
            )
        )
        count = len(self.losses)
        chance = np.random.default_rng(9)
        norms = 1 + 0.1 * chance.standard_normal(count) if self.norms is None else self.norms
        rates = np.full(count, 1e-3) if self.rates is None else self.rates
        seconds = np.full(count, 0.05) if self.seconds is None else self.seconds
        for i in range(count):
            step = self.first_step + i
            columns = {"lr.0": float(rates[i])}
            if i % self.loss_every == 0:
                columns["loss"] = float(self.losses[i])
            run.steps(
                [step],
                gradient_norm=float(norms[i]),
                gradient_nonfinite=0,
                step_time_s=float(seconds[i]),
                forward_s=0.4 * float(seconds[i]),
                backward_s=0.4 * float(seconds[i]),
                optimizer_s=0.005,
                columns=columns,
            )
            if i % 10 == 0:
                self._tensors(run, step, i, float(norms[i]))
            if self.evaluates and i % 50 == 49:
                run.steps([step], mode="eval", loss=float(self.losses[i]) + 0.01)
        run.ended()
        return run

    def _tensors(self, run: RunBuilder, step: int, i: int, norm: float) -> None:
        sizes = norm * np.array([1.0, 0.9, 1.1, 0.8])
        run.tensors(step, "gradients", ROWS, columns={"l2": sizes, "l1": 10 * sizes})
        run.tensors(step, "weights", ROWS, columns={"l2": 10 * (1 + self.ratio * i)})
        run.tensors(step, "updates", ROWS, columns={"update_l2": 10 * self.ratio, "l2": 10.0})
        if i == 0:
            names = [f"{row}.exp_avg" for row in ROWS]
            parts = np.array([0.3, 2.0, 0.9, 0.05]) if self.restored else 0.1
            run.tensors(step, "optimizer_state", names, columns={"l2": sizes * parts})


def learns(steps: int, *, start: float = 2.3, end: float = 0.3, noise: float = 0.03) -> Doubles:
    chance = np.random.default_rng(4)
    curve = end + (start - end) * np.exp(-np.arange(steps) / (steps / 6))
    return np.asarray(curve * (1 + noise * chance.standard_normal(steps)), np.float64)


def flat(steps: int, level: float = 2.0, noise: float = 0.02) -> Doubles:
    return level * (1 + noise * np.random.default_rng(5).standard_normal(steps))


def warm_up(steps: int) -> Doubles:
    return np.asarray(1e-3 * np.minimum(1.0, np.arange(steps) / 100), np.float64)


def rewards(steps: int) -> Doubles:
    """The loss of a policy gradient: near zero, of either sign, and larger later."""
    chance = np.random.default_rng(6)
    return np.asarray(chance.standard_normal(steps) * np.linspace(0.01, 0.4, steps), np.float64)


def jumps(steps: int, times: float) -> Doubles:
    losses = learns(steps)
    losses[steps // 2 :] *= times
    return losses


def larger_batches(steps: int) -> Odd:
    seconds = np.full(steps, 0.05)
    seconds[steps // 2 :] *= 4
    losses = learns(steps, noise=0.06)
    return Odd(losses, seconds=seconds)


ODD: dict[str, Callable[[], Odd]] = {
    "thirty steps": lambda: Odd(learns(30)),
    "a loss every 50 steps": lambda: Odd(learns(600), loss_every=50),
    "fine-tuning at 1e-6": lambda: Odd(flat(400), ratio=1e-7, rates=np.full(400, 1e-6)),
    "a loss near zero": lambda: Odd(learns(400, start=1e-5, end=1e-7)),
    "negative losses": lambda: Odd(learns(400) - 50),
    "losses that cross zero": lambda: Odd(learns(400) - 1.5),
    "a GAN whose loss rises": lambda: Odd(np.asarray(np.linspace(0.7, 3.0, 1000)), optimizers=2),
    "policy gradients": lambda: Odd(rewards(1000), evaluates=False),
    "a warm-up from 0": lambda: Odd(learns(500), rates=warm_up(500)),
    "a resumed run": lambda: Odd(flat(400), first_step=120_000, restored=True),
    "resumed, from step 0": lambda: Odd(flat(400), restored=True),
    "larger batches later": lambda: larger_batches(600),
    "a harder task later": lambda: Odd(jumps(600, 1.5)),
    "a solved task": lambda: Odd(
        learns(500, end=1e-6), norms=np.asarray(np.geomspace(1.0, 1e-6, 500), np.float64)
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_run_that_is_well(name: str) -> None:
    assert_quiet(ODD[name]().run().records)


def test_a_run_that_only_evaluates() -> None:
    run = RunBuilder()
    run.started(optimizers=0)
    for i in range(300):
        run.steps([0], mode="eval", loss=2.0 + 0.1 * (i % 7))
        run.wait(1)
    run.heartbeat(forward_calls=300)
    run.ended()
    assert_quiet(run.records)


def test_a_run_that_says_nothing_and_ends() -> None:
    run = RunBuilder()
    run.started(role="launcher")
    run.wait(60)
    run.ended(role="launcher")
    assert_quiet(run.records)
