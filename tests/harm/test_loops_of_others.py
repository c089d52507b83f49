"""Loops as other people write them: nothing of ours may stop one that is well, or misread it.

Each is trained in this process, under real capture, and judged by all rules at their defaults.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from support.trainings.captured import HOOK, Said, captured, environment, said
from support.trainings.watched import records
from tocsin.emitter.hooks import torch_patches
from tocsin.emitter.model.optimizers import ALONE_PATIENCE, PRIMARY_PATIENCE
from tocsin.emitter.run import Run
from tocsin.emitter.stop import datagrams, unwatched
from tocsin.emitter.training.context import current
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import RunEnded, RunStarted
from tocsin.stream_rules.testing import issues_of


@dataclass
class Seen:
    """What was captured of a loop, and what the rules say of it."""

    said: Said
    issues: list[IssueFiring]

    @property
    def critical(self) -> list[str]:
        """What would stop the run."""
        return [f"{i.rule}: {i.reason}" for i in self.issues if i.severity == "critical"]

    def of(self, rule: str) -> list[IssueFiring]:
        """The issues of one rule."""
        return [issue for issue in self.issues if issue.rule == rule]


def watch(folder: Path, train: Callable[[], object], **more: str) -> Seen:
    torch.manual_seed(0)
    with captured(folder, **more):
        train()
    firing = {issue.issue_id: issue for issue in reversed(issues_of(records(folder)))}
    return Seen(said(folder), list(reversed(firing.values())))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(*, bad: bool = False) -> torch.Tensor:
    x = torch.randn(8, 6)
    if bad:
        x[0, 0] = math.nan
    return x


def loss_of(model: nn.Module, *, bad: bool = False) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(bad=bad)) - 1).square().mean()
    return loss


# -- batches that the loop skips

Clear = Callable[[torch.optim.Optimizer], None]
CLEARED: list[Clear] = [
    lambda o: o.zero_grad(),
    lambda o: o.zero_grad(set_to_none=False),
]


def skipping_loop(
    bad_at: range, *, steps: int = 60, clear: Clear = CLEARED[0], clip: bool = True
) -> list[float]:
    """A loop that clears the gradients of a bad batch and goes on; the losses of its steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(steps):
        loss = loss_of(model, bad=i in bad_at)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if not torch.isfinite(norm):
            clear(optimizer)
            continue
        optimizer.step()
        clear(optimizer)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clear", CLEARED, ids=["to None", "to zero"])
@pytest.mark.parametrize("at", [0, 30])
def test_a_nan_batch_that_the_loop_skips_is_a_warning(
    tmp_path: Path, clear: Clear, at: int
) -> None:
    losses: list[float] = []
    seen = watch(tmp_path, lambda: losses.extend(skipping_loop(range(at, at + 1), clear=clear)))
    assert seen.critical == []
    steps = seen.said.steps()
    assert [steps[i]["loss"] for i in range(59)] == pytest.approx(losses, rel=1e-5)
    assert not any("micro_batches" in cells for cells in steps.values())
    if at:
        assert steps[at]["steps_skipped"] == 1
        (issue,) = seen.of("nonfinite")
        assert (issue.severity, issue.branch, issue.first_step) == ("warning", "skipped", at)
        assert "input of 0 has NaN" in issue.reason


def test_a_loop_that_skips_all_its_batches_is_told_after_five(tmp_path: Path) -> None:
    seen = watch(tmp_path, lambda: skipping_loop(range(20, 60)))
    critical = [issue for issue in seen.of("nonfinite") if issue.severity == "critical"]
    assert [(issue.first_step, issue.branch) for issue in critical] == [(20, "input")]
    rows = [cells for step, _, cells in seen.said.rows if step == 20]
    assert [cells["nonfinite_skipped"] for cells in rows[:4]] == [1, 2, 3, 4]
    assert math.isnan(rows[4]["loss"])
    assert len(rows) == 5


def test_a_nan_with_which_a_step_is_made_is_told_with_that_step(tmp_path: Path) -> None:
    def train() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i in range(22):
            optimizer.zero_grad()
            loss_of(model, bad=i == 20).backward()
            optimizer.step()

    seen = watch(tmp_path, train)
    (issue,) = seen.of("nonfinite")
    assert (issue.severity, issue.branch, issue.first_step) == ("critical", "input", 20)
    assert math.isnan(seen.said.steps()[20]["loss"])


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_batch_that_a_grad_scaler_skips_is_a_warning(tmp_path: Path, *, fused: bool) -> None:
    def train() -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(60):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, bad=i == 30)).backward()
            scaler.step(optimizer)
            scaler.update()

    seen = watch(tmp_path, train)
    assert seen.critical == []
    (issue,) = seen.of("nonfinite")
    assert (issue.severity, issue.branch, issue.first_step) == ("warning", "skipped", 30)
    assert seen.said.steps()[30]["scaler_skipped"] == 1


def test_a_grad_scaler_that_skips_for_bad_weights_is_told(tmp_path: Path) -> None:
    def train() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(30):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            if i == 19:
                with torch.no_grad():
                    model[0].weight[0, 0] = math.nan

    (issue,) = [i for i in watch(tmp_path, train).of("nonfinite") if i.severity == "critical"]
    assert (issue.branch, issue.subject.name, issue.first_step) == ("weight", "0.weight", 20)


def test_a_batch_that_was_dropped_is_not_added_to_the_next_loss(tmp_path: Path) -> None:
    losses: list[float] = []

    def train() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i in range(12):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            if i % 3 == 2:
                continue  # an outlier, say; the next turn clears it
            optimizer.step()
            losses.append(loss.item())

    steps = watch(tmp_path, train).said.steps()
    assert [steps[i]["loss"] for i in range(8)] == pytest.approx(losses, rel=1e-5)
    assert [steps[i].get("steps_skipped", 0) for i in range(8)] == [0, 0, 1, 0, 1, 0, 1, 0]


def test_losses_of_several_nets_before_their_steps_are_not_dropped(tmp_path: Path) -> None:
    """Actor and critic: at the second backward call the critic has no gradient yet."""

    def train() -> None:
        actor, critic = nn.Linear(6, 3), nn.Linear(6, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (actor, critic)]
        for _ in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(actor).backward()
            loss_of(critic).backward()
            for optimizer in optimizers:
                optimizer.step()

    steps = watch(tmp_path, train).said.steps()
    assert not any("steps_skipped" in cells for cells in steps.values())
    assert all(cells.get("micro_batches", 2.0) == 2 for cells in steps.values())


# -- several trainings in one process


def descend(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, goal: float = 1.0
) -> None:
    for _ in range(steps):
        x = batch()
        loss = (model(x) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(seen: Seen) -> list[int]:
    """How many steps each training has made, in order."""
    return [(each.last_step or 0) + 1 for each in seen.said.of(RunEnded)]


def test_pre_training_and_training_are_two(tmp_path: Path) -> None:
    def train() -> None:
        encoder = network()
        optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
        descend(encoder, optimizer, 120)
        del optimizer
        regressor = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(regressor.parameters(), lr=0.01)
        descend(regressor, optimizer, 80, goal=120.0)

    seen = watch(tmp_path, train)
    assert seen.critical == []
    assert seen.of("gradients_not_cleared") == []
    assert trained(seen) == [120, 80]
    assert len({each.incarnation for each in seen.said.of(RunStarted)}) == 2
    rows = [f.rows for f in seen.said.frames if f.collection == "weights" and len(f.rows) == 4]
    assert all(set(row) == {"0.weight", "0.bias", "2.weight", "2.bias"} for row in rows)


@pytest.mark.parametrize("kept", [False, True])
def test_trainings_of_ranks_are_two_whether_the_first_optimizer_is_freed_or_not(
    tmp_path: Path, *, kept: bool
) -> None:
    held: list[object] = []

    def training() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        descend(model, optimizer, 40)
        if kept:
            held.append(optimizer)

    def train() -> None:
        training()
        training()

    seen = watch(tmp_path, train, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    assert trained(seen) == [40, 40 - ALONE_PATIENCE]


@pytest.mark.parametrize(
    ("kept", "scheduled"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.torture),
        pytest.param(True, False, marks=pytest.mark.torture),
    ],
)
def test_each_fold_of_a_cross_validation_is_a_training(
    tmp_path: Path, *, kept: bool, scheduled: bool
) -> None:
    folds: list[object] = []

    roots: list[bool] = []

    def fold() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if scheduled:  # it and the optimizer hold one another
            torch.optim.lr_scheduler.StepLR(optimizer, 10)
        descend(model, optimizer, 40)
        capture = torch_patches.hooks.capture
        roots.append(capture is not None and capture.optimizers.root is model)
        with torch.no_grad():
            nn.functional.mse_loss(model.eval()(batch()), torch.ones(8, 3))
        if kept:
            folds.append((model, optimizer))

    def train() -> None:
        for _ in range(3):
            fold()

    seen = watch(tmp_path, train)
    assert seen.critical == []
    # Of a fold whose optimizer is alive it is known after some steps that it is over.
    late = ALONE_PATIENCE if kept else 0
    counted = [40, 40 - late, 40 - late]
    if scheduled and not kept:  # the garbage collector may have come by
        assert all(40 - ALONE_PATIENCE <= steps <= 40 for steps in trained(seen))
        counted = trained(seen)
    assert trained(seen) == counted
    assert len(counted) == 3
    assert roots == [True] * 3


def test_phases_of_one_training_are_counted_as_one(tmp_path: Path) -> None:
    """First the head alone, then all of it: both optimizers stay."""

    def train() -> None:
        model = network()
        head = torch.optim.Adam(model[2].parameters(), lr=0.01)
        whole = torch.optim.SGD(model.parameters(), lr=0.01)
        descend(model, head, 60)
        descend(model, whole, 60)

    seen = watch(tmp_path, train)
    assert trained(seen) == [120 - ALONE_PATIENCE]


def test_lbfgs_after_adam_is_counted(tmp_path: Path) -> None:
    def train() -> None:
        model = network()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        descend(model, adam, 50)
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        x = batch()
        for _ in range(20):

            def closure() -> torch.Tensor:
                lbfgs.zero_grad()
                loss: torch.Tensor = (model(x) - 1).square().mean()
                loss.backward()
                return loss

            lbfgs.step(closure)

    seen = watch(tmp_path, train)
    assert trained(seen) == [70 - ALONE_PATIENCE]
    assert seen.critical == []


def test_nets_that_take_turns_are_one_training(tmp_path: Path) -> None:
    """Blocks of steps of one net, then of the other; and new optimizers in each epoch."""

    def train() -> None:
        one, other = network(), nn.Linear(6, 2)
        for _ in range(4):
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (one, other)]
            for _ in range(6):
                descend(other, optimizers[1], 5)
                descend(one, optimizers[0], 5)

    assert len(trained(watch(tmp_path, train))) == 1


def test_an_optimizer_that_comes_back_ends_no_more_trainings(tmp_path: Path) -> None:
    def train() -> None:
        one, other = network(), nn.Linear(6, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (one, other)]
        for _ in range(3):
            descend(one, optimizers[0], 30)
            descend(other, optimizers[1], 30)

    assert len(trained(watch(tmp_path, train))) <= 2


# -- what is replaced, or over


def test_a_head_that_is_replaced_is_free_and_no_gradient_is_left_in_it(tmp_path: Path) -> None:
    gone: list[bool] = []

    def train() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        descend(model, optimizer, 30)
        # As it is after a step: with gradients.
        loss_of(model).backward()
        optimizer.step()
        old = weakref.ref(model[2].weight)
        model[2] = nn.Linear(8, 3)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        gc.collect()
        gone.append(old() is None)
        descend(model, optimizer, 30)

    seen = watch(tmp_path, train)
    assert gone == [True]
    assert seen.of("gradients_not_cleared") == []
    assert trained(seen) == [61]
    names = {f.rows for f in seen.said.frames if f.collection == "gradients"}
    assert names == {("2.bias", "2.weight", "0.bias", "0.weight")}


def test_nothing_of_a_training_is_kept_alive(tmp_path: Path) -> None:
    """At each 10th step the loop looks what lives of the steps before, with all probes on."""
    held: list[str] = []

    def alive(refs: dict[str, weakref.ref[object]], until: int) -> list[str]:
        gc.collect()
        return [
            name for name, ref in refs.items() if int(name.split()[1]) < until and ref() is not None
        ]

    def train() -> None:
        model: nn.Module = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        refs: dict[str, weakref.ref[object]] = {}
        for i in range(60):
            x, y = batch(), torch.randint(3, (8,))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for name, thing in (("batch", x), ("labels", y), ("loss", loss)):
                refs[f"{name} {i}"] = weakref.ref(thing)
            if i % 10 == 9:
                held.extend(alive(refs, i))
                with torch.no_grad():
                    nn.functional.cross_entropy(model.eval()(x), y)
                model.train()
        parts = (model, optimizer, *model.modules(), *model.parameters())
        refs = {f"{type(part).__name__} 0": weakref.ref(part) for part in parts}
        del model, optimizer, parts, x, y, loss, thing
        held.extend(alive(refs, 60))

    every = {name: {"every": 2} for name in ("gradients", "weights", "activations", "inputs")}
    every["optimizer_state"] = {"every": 2}
    watch(tmp_path, train, TOCSIN_CAPTURE=json.dumps({"collections": every}))
    assert held == []


@pytest.mark.parametrize("at", [0, 1, 10])
def test_nothing_is_kept_alive_by_a_step_that_raises(tmp_path: Path, *, at: int) -> None:
    held: list[str] = []

    class Failing(torch.optim.AdamW):  # type: ignore[misc]  # torch has no types here
        left = at

        def step(self, closure: None = None) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            super().step(closure)

    def train() -> None:
        model = network()
        optimizer = Failing(model.parameters(), lr=0.01)
        with pytest.raises(KeyboardInterrupt):
            descend(model, optimizer, at + 1)
        weight = model[0].weight
        things = {"optimizer": optimizer, "weight": weight, "gradient": weight.grad}
        things |= {name: value for name, value in optimizer.state[weight].items() if at}
        refs = {name: weakref.ref(thing) for name, thing in things.items()}
        del model, optimizer, weight, things
        gc.collect()
        held.extend(name for name, ref in refs.items() if ref() is not None)

    watch(tmp_path, train)
    assert held == []


# -- trainings that cannot be seen, or not all of them


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[datagrams.Endpoint]:
    """This process as a job under a launcher, which listens here."""
    for name, value in environment(tmp_path, TOCSIN_RUNTIME_DIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    endpoint = datagrams.Endpoint(tmp_path / datagrams.LAUNCHER_SOCKET)
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(endpoint.path))
    hooks = torch_patches.hooks
    torch_patches.install()
    hooks.reset()
    hooks.asleep = hooks.forked = False
    monkeypatch.setattr(hooks.gradients, "several", False)
    yield endpoint
    if current.session is not None:
        current.session.end()
    hooks.reset()
    hooks.asleep = False
    current.session = None
    endpoint.close()
    gc.collect()  # what is left would be found by the next test's training


def told(endpoint: datagrams.Endpoint) -> list[object]:
    """Which kinds of trainings the launcher was told not to be watched."""
    return [m["what"] for m in endpoint.drain() if m["kind"] == "unwatched"]


def in_children(train: Callable[[], object], count: int = 1, *, daemon: bool = False) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=train, daemon=daemon) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * count


def small_training() -> None:
    model = network()
    descend(model, torch.optim.SGD(model.parameters(), lr=0.05), 30)


def in_new_process(part: Callable[[], object]) -> None:
    """Run it as the job's first process, under the environment that `job` has set.

    Not in this process: once autograd has threads, torch refuses to train in a fork.
    """
    child = multiprocessing.get_context("spawn").Process(target=hooked, args=(part,))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def hooked(part: Callable[[], object]) -> None:
    torch_patches.install()
    part()
    if current.session is not None:
        current.session.end()


def trainings_in_children() -> None:
    in_children(small_training)
    in_children(small_training)


def training_beside_children(*, daemon: bool) -> None:
    small_training()
    in_children(small_training, 2, daemon=daemon)
    assert torch_patches.hooks.capture is not None


def test_a_training_in_a_child_process_is_watched(tmp_path: Path, job: datagrams.Endpoint) -> None:
    in_new_process(trainings_in_children)
    found = said(tmp_path)
    assert [each.last_step for each in found.of(RunEnded)] == [29, 29]
    assert len({each.incarnation for each in found.of(RunStarted)}) == 2
    assert told(job) == []


@pytest.mark.parametrize("daemon", [False, pytest.param(True, marks=pytest.mark.torture)])
def test_of_other_trainings_in_children_it_is_said(
    tmp_path: Path, job: datagrams.Endpoint, *, daemon: bool
) -> None:
    in_new_process(partial(training_beside_children, daemon=daemon))
    assert told(job) == ["child", "child"]
    assert len(said(tmp_path).of(RunStarted)) == 1


def test_a_training_without_optimizer_steps_is_said(
    job: datagrams.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwatched._claim, "reported", set())
    model = network()
    for _ in range(60):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
    assert told(job) == ["no_step"]


def test_a_long_accumulation_before_the_first_step_is_none(
    job: datagrams.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwatched._claim, "reported", set())
    model = network()
    for _ in range(80):
        loss_of(model).backward()
    assert told(job) == []


def test_trainings_in_several_threads_are_not_mixed(
    tmp_path: Path, job: datagrams.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwatched._claim, "reported", set())
    turn = threading.Barrier(3)

    def train() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(40):
            turn.wait(60)
            descend(model, optimizer, 1)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert told(job) == ["thread"]
    capture = torch_patches.hooks.capture
    assert capture is not None
    # The threads step at once: some steps pass before one of them is known to be the training.
    assert 40 - 2 * PRIMARY_PATIENCE <= capture.training.next_step <= 40


def on_threads(parts: list[Callable[[], object]]) -> None:
    """One after another, each on a thread of its own; all are there to the end."""
    over = threading.Event()
    threads = []

    for part in parts:
        done = threading.Event()

        def run(part: Callable[[], object] = part, done: threading.Event = done) -> None:
            part()
            done.set()
            over.wait(120)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        assert done.wait(60)
    over.set()
    for thread in threads:
        thread.join(120)


ON_THREADS = """
import sys, threading, torch

sys.setswitchinterval(1e-5)
torch.set_num_threads(1)

def train(every, calls):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)
    for call in range(1, calls + 1):
        model(x).square().mean().backward()
        if call % every == 0:
            optimizer.step()
        optimizer.zero_grad()

calls = int(sys.argv[1])
threads = [threading.Thread(target=train, args=(n, calls)) for n in (50, 70, 10**9)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("over")
"""


@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=pytest.mark.torture)])
def test_trainings_on_threads_do_not_read_gradients_of_one_another(
    tmp_path: Path, calls: int
) -> None:
    """They come and go without Python's lock: to read one then was a segmentation fault."""
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", ON_THREADS, str(calls)],
        env={**os.environ, **environment(tmp_path, PYTHONPATH=path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert said(tmp_path).steps()


def test_a_loop_that_skips_on_another_thread_each_time_is_not_misread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_patches.hooks.gradients, "several", False)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def one(i: int) -> None:
        loss = loss_of(model, bad=i == 30)
        loss.backward()
        if math.isfinite(loss.item()):
            optimizer.step()
        optimizer.zero_grad()

    def train() -> None:
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            for i in range(60):
                (first, second)[i % 2].submit(one, i).result()

    seen = watch(tmp_path, train)
    assert seen.critical == []
    assert seen.said.steps()[30]["steps_skipped"] == 1
    assert not torch_patches.hooks.gradients.several


def test_a_training_that_goes_on_on_other_threads_is_one(
    tmp_path: Path, job: datagrams.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwatched._claim, "reported", set())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(steps: int) -> None:
        descend(model, optimizer, steps)

    train(30)
    on_threads([lambda: train(15)] * 3)
    train(15)
    assert torch_patches.hooks.capture is not None
    assert current.session is not None
    current.session.end()
    steps = said(tmp_path).steps()
    assert sorted(steps) == list(range(90))
    assert all("loss" in cells for cells in steps.values())
    assert told(job) == []


def test_two_nets_that_step_on_a_thread_each_are_one_training(
    tmp_path: Path, job: datagrams.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwatched._claim, "reported", set())
    nets = [network(), network()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]

    def both(steps: int) -> None:
        for _ in range(steps):
            for net, optimizer in zip(nets, optimizers, strict=True):
                descend(net, optimizer, 1)

    both(10)
    turn = threading.Barrier(2)

    def one(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(20):
            turn.wait(60)
            if net is nets[step % 2]:
                descend(net, optimizer, 1)

    pairs = zip(nets, optimizers, strict=True)
    threads = [threading.Thread(target=one, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    capture = torch_patches.hooks.capture
    assert capture is not None
    assert capture.training.next_step == 20
    assert told(job) == []


def test_another_training_on_another_thread_is_watched_after_the_first(
    job: datagrams.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwatched._claim, "reported", set())
    kept = []

    def train() -> None:
        model = network()
        kept.append(torch.optim.SGD(model.parameters(), lr=0.05))
        descend(model, kept[-1], 40)

    on_threads([train, train])
    capture = torch_patches.hooks.capture
    assert capture is not None
    assert capture.training.next_step == 40 - ALONE_PATIENCE
    assert told(job) == []


# -- models that the garbage collector does not list


class Holder:
    """An object of the program that has the model, as trainers do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


@pytest.mark.parametrize("named", ["by a global", "by watch", ""])
def test_a_model_that_is_frozen_for_the_collector_is_found_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    model = network()
    if named == "by a global":
        monkeypatch.setitem(globals(), "holder", Holder(model))
    with captured(tmp_path) as hooks:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        gc.freeze()
        try:
            if named == "by watch":
                assert current.session is not None
                Run(current.session).watch(model)
            descend(model, optimizer, 8)
            assert hooks.capture is not None
            found = hooks.capture.optimizers.root
            assert list(hooks.isolation.off) == ([] if named else ["model"])
            if not named:
                assert current.session is not None
                Run(current.session).watch(model)
                descend(model, optimizer, 12)
                found = hooks.capture.optimizers.root
        finally:
            gc.unfreeze()
        assert found is model
    rows = {f.rows for f in said(tmp_path).frames if f.collection == "weights"}
    assert ("0.weight", "0.bias", "2.weight", "2.bias") in rows
