"""`stop.before_update`: the loop is left in front of a step that would write a NaN."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from support.records.stops import StopSigner
from support.trainings.captured import captured, said
from tocsin.emitter.hooks import passed_steps, torch_patches
from tocsin.emitter.hooks.training_hooks import Hooks
from tocsin.emitter.hooks.update_guard import UpdateGuard, all_finite
from tocsin.emitter.stop import before_update, datagrams, exit_points, saving
from tocsin.emitter.stop import rank_stop as rank_module
from tocsin.emitter.stop.before_update import CheckpointPolicy
from tocsin.emitter.stop.exception import StopTraining
from tocsin.emitter.stop.processes import Members
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.runs import CaptureDegraded, RunEnded
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopCheckpoint, StopLeft

BAD_AT = 7


@dataclass
class Node:
    """Who listens on this node, as the launcher does: permits, or not."""

    endpoint: datagrams.Endpoint
    signer: StopSigner
    permits: bool | None = True
    """None: it gives no answer."""
    members: Members = field(default_factory=lambda: Members("", lambda pid: True))
    asked: list[int] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)

    def listen(self) -> None:
        while (message := self.endpoint.receive()) is None or message["kind"] != "end":
            if message is None or not self.members.receive(message):
                continue
            asking = before_update.who_asks(message, self.members)
            if asking is not None:
                leaves = before_update.leaves(message)
                said = self.announced if leaves else self.asked
                said.append(datagrams.number(message, "step"))
                if self.permits is not None:
                    before_update.answer(asking, self.permits)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(before_update, "ASK_S", 10.0)
    monkeypatch.setattr(rank_module, "CONFIRMATION_WAIT_S", 0.0)
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(tmp_path / "launcher.sock"))
    monkeypatch.setenv("TOCSIN_STOP_KEYS", str(tmp_path / "keys"))
    signer = StopSigner()
    signer.key.write(tmp_path / "keys" / "actions.key")
    endpoint = datagrams.Endpoint(tmp_path / "launcher.sock")
    endpoint.set_blocking()
    node = Node(endpoint, signer)
    thread = threading.Thread(target=node.listen)
    thread.start()
    yield node
    datagrams.send(endpoint.path, {"kind": "end"})
    thread.join()
    endpoint.close()
    saving.on_stop(None)


@pytest.fixture
def guarded() -> Iterator[Callable[[CheckpointPolicy], None]]:
    handles = []

    def guard(policy: CheckpointPolicy) -> None:
        handles.append(UpdateGuard(torch_patches.hooks, policy).install())

    torch_patches.install()
    yield guard
    for handle in handles:
        handle.remove()


@dataclass
class Loop:
    """A training whose gradient is NaN at step `BAD_AT`; the loss too, if the input is."""

    micro_batches: int = 1
    scaler: torch.amp.GradScaler | None = None
    closure: str = ""
    bad_input: bool = False
    made: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        kind = torch.optim.LBFGS if self.closure == "lbfgs" else torch.optim.Adam
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.before: dict[str, torch.Tensor] = {}

    def train(self, steps: int = 12) -> None:
        for step in range(steps):
            self.before = copy.deepcopy(self.model.state_dict())
            self.step(step)
            self.made = step + 1

    def step(self, step: int) -> None:
        if self.closure == "none":
            self.compute(step)
            self.optimizer.step(None)
        elif self.closure == "keyword":
            self.optimizer.step(closure=partial(self.compute, step))
        elif self.closure:
            self.optimizer.step(partial(self.compute, step))
        else:
            self.compute(step)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()

    def compute(self, step: int) -> float:
        self.optimizer.zero_grad()
        for micro in range(self.micro_batches):
            bad = self.bad_input and step == BAD_AT
            out = self.model(torch.full((2, 4), math.nan if bad else 1.0))
            if step == BAD_AT and micro == self.micro_batches - 1:
                out = out + (out - out).sqrt()  # 0, whose gradient is infinite times 0
            loss = out.square().mean()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return float(loss.detach())

    def is_unchanged(self) -> bool:
        after = self.model.state_dict()
        return all(torch.equal(after[name], self.before[name]) for name in after)

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(value).all()) for value in self.model.state_dict().values())


@pytest.mark.parametrize(
    ("micro_batches", "closure"), [(1, ""), (3, ""), (1, "positional"), (1, "keyword"), (1, "none")]
)
def test_the_weights_stay_as_they_were(
    tmp_path: Path,
    node: Node,
    guarded: Callable[[CheckpointPolicy], None],
    micro_batches: int,
    closure: str,
) -> None:
    guarded("protect_last_good")
    loop = Loop(micro_batches, closure=closure)
    with captured(tmp_path) as hooks:
        with pytest.raises(StopTraining) as caught:
            loop.train()
        assert hooks.isolation.off == {}
    assert loop.made == BAD_AT
    assert loop.is_unchanged()
    assert loop.is_finite()
    assert (node.asked, node.announced) == ([BAD_AT], [BAD_AT])
    assert (caught.value.code, caught.value.step) == (79, BAD_AT - 1)
    assert "step 7; its update was not made" in caught.value.reason
    (trainer,) = node.members.ranks(node.members.incarnation)
    assert (trainer.early, trainer.left_at) == (True, BAD_AT - 1)
    found = said(tmp_path)
    # What the rule reads: the step that was not made, with its rates, as a step that was.
    row = found.steps()[BAD_AT]
    assert row["gradient_nonfinite"] > 0
    assert math.isfinite(row["loss"])
    assert row["lr.0"] == pytest.approx(0.01)
    nans = found.frame("gradients", BAD_AT).count("nans")
    assert nans is not None
    assert nans.any()
    (ended,) = found.of(RunEnded)
    assert (ended.outcome, ended.last_step) == ("stopped", BAD_AT - 1)


def test_where_a_bad_loss_began_is_known_though_the_step_is_not_made(
    tmp_path: Path, node: Node, guarded: Callable[[CheckpointPolicy], None]
) -> None:
    guarded("skip")
    with captured(tmp_path), pytest.raises(StopTraining):
        Loop(bad_input=True).train()
    frame = said(tmp_path).frame("inputs", BAD_AT)
    assert frame.rows == ("input of 0",)


def test_without_the_option_the_step_is_made(tmp_path: Path, node: Node) -> None:
    loop = Loop()
    with captured(tmp_path):
        loop.train()
    assert loop.made == 12
    assert not loop.is_finite()
    assert node.asked == []


@pytest.mark.parametrize("permits", [False, None])
def test_without_permission_the_step_is_made_and_nobody_is_asked_again(
    tmp_path: Path,
    node: Node,
    guarded: Callable[[CheckpointPolicy], None],
    monkeypatch: pytest.MonkeyPatch,
    permits: bool | None,
) -> None:
    monkeypatch.setattr(before_update, "ASK_S", 0.3)
    node.permits = permits
    guarded("skip")
    loop = Loop()
    with captured(tmp_path):
        loop.train()
    assert loop.made == 12
    assert (node.asked, node.announced) == ([BAD_AT], [])
    (degraded,) = said(tmp_path).of(CaptureDegraded)
    assert degraded.probe == "before_update"
    assert degraded.reason == "the update was made: no stop is permitted"


def test_a_step_that_a_scaler_skips_is_not_the_end(
    tmp_path: Path, node: Node, guarded: Callable[[CheckpointPolicy], None]
) -> None:
    guarded("skip")
    loop = Loop(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    with captured(tmp_path):
        loop.train()
    assert loop.made == 12
    assert loop.is_finite()
    assert node.asked == []


def test_gradients_that_are_not_final_are_not_judged(
    tmp_path: Path, node: Node, guarded: Callable[[CheckpointPolicy], None]
) -> None:
    guarded("skip")
    mended, searched = Loop(), Loop(closure="lbfgs")

    def mend(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    mended.optimizer.register_step_pre_hook(mend)
    for number, loop in enumerate((mended, searched)):
        (folder := tmp_path / str(number)).mkdir()
        with captured(folder):
            loop.train()
        assert loop.made == 12
    assert mended.is_finite()
    assert node.asked == []


def test_steps_that_are_passed_over_are_guarded_too(
    tmp_path: Path,
    node: Node,
    guarded: Callable[[CheckpointPolicy], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passed_steps, "FROM", 2)
    monkeypatch.setattr(passed_steps, "LONGEST_S", 1e9)
    guarded("skip")
    loop = Loop()
    over: list[bool] = []
    original = loop.step

    def step(hooks: Hooks, number: int) -> None:
        if number == 3:
            assert hooks.capture is not None
            budget = hooks.capture.schedule.budget
            budget.looks_every = 1000
            for share in budget.shares.values():
                share.interval = 1000
            hooks.hook_probes.checks.wakes = 10**9
        over.append(torch_patches.passed.on)
        original(number)

    nothing = '{"pacing": "steps", "collections": {"gradients": "off", "weights": "off", '
    nothing += '"activations": "off", "optimizer_state": "off"}}'
    with captured(tmp_path, TOCSIN_CAPTURE=nothing) as hooks:
        monkeypatch.setattr(loop, "step", partial(step, hooks))
        with pytest.raises(StopTraining):
            loop.train()
    assert over[BAD_AT]
    assert loop.is_unchanged()
    assert said(tmp_path).steps()[BAD_AT]["gradient_nonfinite"] > 0


@pytest.mark.parametrize("policy", ["save", "protect_last_good", "skip"])
def test_the_command_that_follows_confirms_it(
    tmp_path: Path,
    node: Node,
    guarded: Callable[[CheckpointPolicy], None],
    monkeypatch: pytest.MonkeyPatch,
    policy: CheckpointPolicy,
) -> None:
    monkeypatch.setattr(rank_module, "CONFIRMATION_WAIT_S", 30.0)
    guarded(policy)
    loop, saved = Loop(), tmp_path / "weights.pt"

    def save() -> Path:
        torch.save(loop.model.state_dict(), saved)
        return saved

    saving.on_stop(save)
    good = Checkpoint(path="/c/5.pt", step=5)
    with captured(tmp_path):
        with pytest.raises(StopTraining) as caught:
            loop.train()
        assert caught.value.save is (policy == "save")
        rank = exit_points.listening()
        assert rank is not None
        assert rank.socket is not None
        command = node.signer.command(
            "r1", rank.origin.incarnation, checkpoint=policy, last_good_checkpoint=good
        )
        datagrams.send(rank.socket, node.signer.sign(command).message())
        # Its end waits for that.
    found = said(tmp_path)
    assert [one.command_id for one in found.of(StopAcknowledged)] == [command.command_id]
    (left,) = found.of(StopLeft)
    assert (left.step, left.edge) == (BAD_AT - 1, "before_update")
    (kept,) = found.of(StopCheckpoint)
    if policy == "save":
        assert (kept.decision, kept.checkpoint and kept.checkpoint.path) == ("saved", str(saved))
        weights = torch.load(saved, weights_only=True)
        assert all(torch.equal(weights[name], loop.before[name]) for name in weights)
    elif policy == "skip":
        assert (kept.decision, kept.checkpoint) == ("skipped", None)
    else:
        assert (kept.decision, kept.checkpoint) == ("protected", good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_all_finite(dtype: torch.dtype) -> None:
    large = torch.full((3, 2), 6e4, dtype=dtype)
    assert all_finite([large, None, torch.zeros(0, dtype=dtype)])
    for value in (math.nan, math.inf, -math.inf):
        assert not all_finite([large, torch.tensor([1.0, value]).to(dtype)])


def test_all_finite_of_sums_that_overflow_and_of_sparse_gradients() -> None:
    assert all_finite([torch.full((1000,), 3e38)])
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([1.0, math.nan]), (4,), check_invariants=True
    )
    assert not all_finite([sparse])
