"""Steps that are passed over: the rest says what it would, and nothing is lost but their rows."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from support.trainings.captured import captured, said
from support.trainings.loops import (
    Loop,
    adversaries,
    checkpointed,
    in_backward,
    linear,
    loop,
    unseen,
)
from tocsin.emitter.capture import user_values
from tocsin.emitter.hooks import passed_steps
from tocsin.emitter.hooks.passed_steps import PassedSteps
from tocsin.emitter.hooks.training_hooks import Hooks
from tocsin.emitter.probes.cuda_timing import CudaTiming, Event
from tocsin.emitter.stop import exit_points
from tocsin.emitter.stop.exception import StopTraining
from tocsin.emitter.training.training import Training
from tocsin.schemas.records.checkpoints import CheckpointWritten

pytestmark = pytest.mark.usefixtures("where")

NOTHING = (
    '{"pacing": "steps", "collections": {"gradients": "off", "weights": "off", '
    '"activations": "off", "optimizer_state": "off"}}'
)
EVERY = 5
FROM = 10


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed_steps, "FROM", FROM)
    monkeypatch.setattr(passed_steps, "LONGEST_S", 1e9)


def pass_over(hooks: Hooks) -> None:
    """Look at each `EVERY`-th step from here on."""
    assert hooks.capture is not None
    budget = hooks.capture.schedule.budget
    budget.looks_every = EVERY
    for share in budget.shares.values():
        share.interval = 1000
    hooks.hook_probes.checks.wakes = 10**9


def run(folder: Path, step: Loop, steps: int = 60) -> None:
    folder.mkdir(exist_ok=True)
    with captured(folder, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(steps):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)
        assert hooks.isolation.off == {}
        assert training(hooks).next_step == steps


def training(hooks: Hooks) -> Training:
    assert hooks.capture is not None
    return hooks.capture.training


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """What is said of each step, without what depends on the clock."""
    return {
        step: {name: value for name, value in cells.items() if not name.endswith("_s")}
        for step, cells in said(folder).steps().items()
    }


@pytest.mark.parametrize(
    "make",
    [
        loop,
        lambda: loop(clips=True),
        lambda: loop(batches=3),
        lambda: loop(scales=True, clips=True),
        adversaries,
        in_backward,
        lambda: checkpointed([]),
        unseen,
    ],
    ids=["plain", "clip", "accumulate", "scaler and clip", "two", "in backward", "checkpoints",
         "no loss"],
)  # fmt: skip
def test_steps_that_are_looked_at_say_what_they_say_where_none_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Loop]
) -> None:
    torch.manual_seed(0)
    run(tmp_path / "some", make())
    monkeypatch.setattr(PassedSteps, "start", lambda *_: None)
    torch.manual_seed(0)
    run(tmp_path / "all", make())
    some, every = rows(tmp_path / "some"), rows(tmp_path / "all")
    assert sorted(every) == list(range(60))
    assert sorted(some) == [*range(FROM + 1), *range(15, 60, EVERY)]
    assert some == {step: every[step] for step in some}


def test_that_steps_are_passed_over_is_told_once_they_are(tmp_path: Path) -> None:
    step = loop()
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(2 * FROM):
            if number == FROM - 1:
                pass_over(hooks)
                assert hooks.capture is not None
                assert "steps" not in hooks.capture.schedule.intervals()
            step(number)
        assert hooks.capture is not None
        assert hooks.capture.schedule.intervals()["steps"] == EVERY


def test_times_of_a_step_that_is_looked_at_are_its_own(tmp_path: Path) -> None:
    run(tmp_path, loop())
    steps = said(tmp_path).steps()
    for step in range(15, 60, EVERY):
        row = steps[step]
        parts = row["forward_s"] + row["backward_s"] + row["optimizer_s"]
        assert 0 < parts <= row["step_time_s"]


def test_a_loss_that_is_not_finite_is_found_at_the_next_look_and_all_is_looked_at_from_there(
    tmp_path: Path, where: str
) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        if number == 31:
            model.bias.data.fill_(math.nan)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()

    run(tmp_path, step, steps=120)  # beyond the spell of closer looks
    found = said(tmp_path).steps()
    bad = [step for step, row in found.items() if not math.isfinite(row.get("loss", 0.0))]
    # From a device it comes behind the step after, which was passed over.
    there = where == "on a device"
    assert bad == ([35, *range(37, 120)] if there else list(range(35, 120)))
    assert found[37 if there else 35]["gradient_nonfinite"] == 2


class Mark:
    """An event that the GPU has passed at once."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event, /) -> float:
        return 2.0


def test_a_gpu_is_timed_at_steps_that_are_looked_at(tmp_path: Path) -> None:
    step, timed = loop(), []
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        step(0)
        schedule, phases = training(hooks).schedule, hooks.hook_probes.phases
        phases.looks_every = lambda: schedule.budget.looks_every
        phases.timer = CudaTiming(lambda *row: timed.append(row), Mark, isolation=hooks.isolation)
        phases.wakes = 0
        for number in range(1, 120):
            if number == FROM:
                pass_over(hooks)
            step(number)
        assert hooks.isolation.off == {}
    assert [(step, seconds) for step, _, seconds in timed] == [
        (step, (0.002, 0.002, 0.002)) for step in (10, 50, 100)
    ]
    # A step that is timed is looked at, and so is the one before, behind which the time begins.
    looked = {*range(FROM + 1), *range(15, 120, EVERY), 49, 50, 51, 99, 100, 101}
    assert looked - {51, 101} <= set(said(tmp_path).steps()) <= looked | {11, 12}


def test_a_gpu_that_cannot_be_timed_costs_no_step_its_quick_way(tmp_path: Path) -> None:
    def refuse() -> Event:
        raise RuntimeError("no event can be made")

    step = loop()
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        step(0)
        phases = hooks.hook_probes.phases
        phases.timer = CudaTiming(lambda *_: None, refuse, isolation=hooks.isolation)
        phases.wakes = 0
        for number in range(1, 2 * FROM):
            step(number)
        assert phases.device is None
        assert phases.wakes > 2 * FROM
        assert list(hooks.isolation.off) == ["device time"]


def test_a_stop_takes_effect_behind_the_step_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, left = loop(), []
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(13):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)

        def leave(training: Training, edge: str) -> None:
            left.append((edge, training.last_step))
            raise StopTraining("enough", step=13, issue_id=None)

        assert hooks.fast_path.passed.on
        rank = exit_points.listening()
        assert rank is not None
        rank.awake = True
        monkeypatch.setattr(Training, "check", leave)
        with pytest.raises(StopTraining):
            step(13)
    assert left == [("optimizer_step", 13)]


def test_values_that_the_user_names_are_told_of_their_own_steps(tmp_path: Path) -> None:
    step = loop()
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(40):
            if number == FROM - 1:
                pass_over(hooks)
            known = None if hooks.capture is None else training(hooks)
            user_values.add_loss(hooks.hook_probes, known, "own", float(number))
            step(number)
        assert hooks.isolation.off == {}
    found = said(tmp_path).steps()
    assert [found[step]["loss.own"] for step in range(40)] == list(range(40))
    assert "loss" not in found[13]


def run_scaled(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """60 iterations under a GradScaler, which skips two of them: infinite losses."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    made = 0
    with captured(folder, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(60):
            if number == FROM:
                pass_over(hooks)
            optimizer.zero_grad()
            scale = math.inf if number in (22, 43) else 1.0
            scaler.scale(model(torch.full((2, 4), scale)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            made += scale == 1.0
        assert hooks.isolation.off == {}
        assert training(hooks).next_step == made == 58


def test_each_step_that_a_scaler_skips_is_counted(tmp_path: Path) -> None:
    model = linear()
    run_scaled(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = said(tmp_path).steps()
    assert len(found) < 40
    assert sum(row.get("scaler_skipped", 0.0) for row in found.values()) == 2
    assert {row.get("scaler_scale") for step, row in found.items() if step > 42} == {2.0}


def test_steps_of_a_fused_optimizer_that_a_scaler_skips_are_none(tmp_path: Path) -> None:
    """It is called at those steps, too."""
    model = linear()
    run_scaled(tmp_path, model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True))


def test_nobody_knows_what_is_in_a_checkpoint_that_another_thread_writes_meanwhile(
    tmp_path: Path,
) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).pow(2).mean().backward()
        optimizer.step()
        if number == 31:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)
        if number == 32:
            saved = partial(torch.save, model.state_dict(), tmp_path / "model.pt")
            saving = threading.Thread(target=saved)
            saving.start()
            saving.join()

    run(tmp_path, step)
    (saved,) = said(tmp_path).of(CheckpointWritten)
    assert (saved.checkpoint.step, saved.checkpoint.finite) == (32, None)


def test_an_evaluation_and_a_checkpoint_end_the_stretch(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    function = torch.nn.functional.mse_loss

    def step(number: int) -> None:
        optimizer.zero_grad()
        function(model(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
        optimizer.step()
        if number == 22:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    function(model(torch.ones(2, 4)), torch.zeros(2, 3))
            model.train()
        if number == 37:
            torch.save(model.state_dict(), tmp_path / "model.pt")

    run(tmp_path, step)
    found = said(tmp_path)
    assert [step for step, mode, _ in found.rows if mode == "eval"] == [22] * 3
    steps = found.steps()
    assert steps[23]["evaluation_s"] < steps[23]["step_time_s"]
    assert steps[38]["checkpoint_s"] < steps[38]["step_time_s"]
    (saved,) = found.of(CheckpointWritten)
    assert saved.checkpoint.step == 37
    assert saved.checkpoint.finite is None  # nobody has looked


def test_batches_of_a_loader_are_passed_over_and_its_epochs_counted(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(torch.ones(14, 4)), batch_size=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for epoch in range(8):
            for (inputs,) in batches:
                if epoch == 1:
                    pass_over(hooks)
                optimizer.zero_grad()
                model(inputs).pow(2).mean().backward()
                optimizer.step()
            schedule.step()
        assert hooks.isolation.off == {}
        assert training(hooks).next_step == 56
        assert training(hooks).activity == 2 * 55  # all but those before the first step
    found = said(tmp_path).steps()
    assert len(found) < 40
    assert max(row.get("epochs", 0.0) for row in found.values()) == 8
    assert all("data_wait_s" in found[step] for step in range(40, 56, EVERY))


def test_another_optimizer_that_is_new_is_looked_at_at_once(tmp_path: Path) -> None:
    step = loop()
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(23):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)
        assert hooks.fast_path.passed.on
        other = linear()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not hooks.fast_path.passed.on
        assert training(hooks).next_step == 23
        assert hooks.isolation.off == {}


def test_the_training_after_this_one_is_another(tmp_path: Path) -> None:
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        step = loop()
        for number in range(33):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)
        first = training(hooks)
        assert hooks.fast_path.passed.on
        del step
        gc.collect()
        step = loop()
        step(0)
        assert training(hooks) is not first
        assert (first.next_step, training(hooks).next_step) == (33, 1)
        assert hooks.isolation.off == {}


def test_a_loop_that_makes_no_steps_any_more_is_looked_at_again(tmp_path: Path) -> None:
    step, model = loop(), linear()
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(13):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)
        assert hooks.fast_path.passed.on
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        assert not hooks.fast_path.passed.on
        assert hooks.backwards == 2


def test_nothing_is_passed_over_for_longer_than_a_tenth_of_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed_steps, "LONGEST_S", 0.0)
    run(tmp_path, loop(), 40)
    found = sorted(rows(tmp_path))
    # The first step of each stretch ends it.
    assert {later - step for step, later in itertools.pairwise(found)} == {1, 2}


def test_who_asks_for_each_loss_gets_it(tmp_path: Path) -> None:
    each = NOTHING.replace('"collections": {', '"collections": {"losses": {"every": 1}, ')
    step = loop()
    with captured(tmp_path, TOCSIN_CAPTURE=each) as hooks:
        for number in range(40):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)
    assert [step for step, row in rows(tmp_path).items() if "loss" in row] == list(range(40))


def test_an_error_of_ours_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = PassedSteps.end
    failed: list[int] = []

    def fail(self: PassedSteps) -> None:
        if self.on and not failed:
            failed.append(1)
            raise RuntimeError("planted")
        end(self)

    monkeypatch.setattr(PassedSteps, "end", fail)
    step = loop()
    with captured(tmp_path, TOCSIN_CAPTURE=NOTHING) as hooks:
        for number in range(60):
            if number == FROM - 1:
                pass_over(hooks)
            step(number)
        assert list(hooks.isolation.off) == ["quick steps"]
        assert training(hooks).next_step == 60
    assert {"loss", "step_time_s"} <= set(said(tmp_path).steps()[40])
