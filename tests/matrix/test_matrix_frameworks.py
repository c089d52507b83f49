"""Lightning, the Hugging Face Trainer and Accelerate: with no code, and with our callbacks.

Each trains the same three times: without capture, with it, and with the callback on top.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.records.stops import StopSigner
from support.trainings.captured import Said, captured, said
from support.trainings.matrix import Trained, needed, same
from support.trainings.watched import records
from tocsin.emitter import api
from tocsin.emitter.checkpoints.health import health
from tocsin.emitter.checkpoints.pins import pin
from tocsin.emitter.hooks import torch_patches
from tocsin.emitter.run import Run
from tocsin.emitter.stop import exit_points
from tocsin.emitter.stop import rank_stop as rank_module
from tocsin.emitter.training.context import current
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.program_facts import TrainingPlanned
from tocsin.schemas.records.runs import (
    CaptureDegraded,
    PhaseMark,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.records.stops.commands import StopCheckpoint, StopLeft
from tocsin.stream_rules.testing import issues_of

# What the frameworks themselves warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

Train = Callable[[Path, list[Any]], Trained]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    torch_patches.hooks.asleep = True
    try:
        yield
    finally:
        torch_patches.hooks.asleep = False
        gc.freeze()  # of several optimizers that are alive the largest is the main one


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Capture goes on, and a run that was begun by `start()`; the folder of the bus."""
    signer = StopSigner()
    signer.key.write(tmp_path / "keys" / "actions.key")
    monkeypatch.setenv("TOCSIN_STOP_KEYS", str(tmp_path / "keys"))
    monkeypatch.delenv("TOCSIN_STOP", raising=False)
    with captured(tmp_path):
        assert current.session is not None
        monkeypatch.setattr(api, "_run", Run(current.session))
        monkeypatch.setattr(StopSigner, "here", signer, raising=False)
        yield tmp_path


def stop_now(**changes: object) -> None:
    """A verified stop arrives at this process."""
    rank = exit_points._rank
    assert rank is not None
    signer: StopSigner = getattr(StopSigner, "here")  # noqa: B009
    rank.receive(signer.sign(signer.command("r1", rank.origin.incarnation, **changes)))


def three_times(folder: Path, train: Train, callback: Callable[[], Any]) -> tuple[Said, Said]:
    """What was captured with no code, and with the callback."""
    folders = [folder / name for name in ("plain", "watched", "called")]
    for each in folders:
        each.mkdir()
    with unwatched():
        plain = train(folders[0], [])
    with captured(folders[1]):
        watched = train(folders[1], [])
    gc.freeze()
    with captured(folders[2]), pytest.MonkeyPatch.context() as patch:
        assert current.session is not None
        patch.setattr(api, "_run", Run(current.session))
        called = train(folders[2], [callback()])
    same(plain, watched)
    same(plain, called)
    for each in folders[1:]:
        assert issues_of(records(each)) == []
    found = said(folders[1]), said(folders[2])
    for one in found:
        assert one.of(CaptureDegraded) == []
        assert [e.outcome for e in one.of(RunEnded)] == ["completed"]
    # The callback adds; what capture says is the same, and nothing is there twice.
    for mode in ("train", "eval"):
        assert captured_of(found[0], mode) == captured_of(found[1], mode)
    return found


def captured_of(found: Said, mode: str) -> list[tuple[int, str, float]]:
    """All scalars of a mode but names of the user's and times, in order."""
    return sorted(
        (step, name, value)
        for step, of, cells in found.rows
        for name, value in cells.items()
        if of == mode and not name.startswith("log.") and not name.endswith("_s")
    )


def logged(found: Said, name: str, mode: str = "train") -> dict[int, float]:
    """The series `log.NAME`; each step once."""
    cells = [
        (step, values[f"log.{name}"])
        for step, of, values in found.rows
        if of == mode and f"log.{name}" in values
    ]
    assert len(cells) == len(dict(cells))
    return dict(cells)


def planned(found: Said) -> list[tuple[int | None, int | None, str]]:
    return [(p.total_steps, p.done_steps, p.source) for p in found.of(TrainingPlanned)]


def marks(found: Said, name: str) -> list[tuple[str, int | None]]:
    return [(mark.edge, mark.step) for mark in found.of(PhaseMark) if mark.name == name]


# -- Lightning


BATCHES = 4
EPOCHS = 3


def digits(lightning: types.ModuleType, *, functional: bool, losses: list[float]) -> Any:
    """A module whose evaluation loss comes from a function that capture knows, or not."""

    class Digits(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.layers(batch[0]).square().mean()
            losses.append(loss.item())
            self.log("train_loss", loss)
            self.log("both", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[torch.Tensor]) -> None:
            out = self.layers(batch[0])
            target = torch.zeros_like(out)
            loss = (
                nn.functional.mse_loss(out, target) if functional else (out - target).abs().mean()
            )
            self.log("val_loss", loss)
            self.log("accuracy", 0.5)

        def test_step(self, batch: list[torch.Tensor]) -> None:
            self.log("test_size", self.layers(batch[0]).abs().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Digits()


def lightning_trainer(
    lightning: types.ModuleType, folder: Path, callbacks: list[Any], **more: Any
) -> Any:
    checkpoint = lightning.callbacks.ModelCheckpoint(
        dirpath=folder / "kept", every_n_epochs=3, save_top_k=-1
    )
    return lightning.Trainer(
        **{
            "max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "logger": False,
            "callbacks": [*callbacks, checkpoint], "enable_progress_bar": False,
            "enable_model_summary": False, "log_every_n_steps": 2, **more,
        }
    )  # fmt: skip


def loader() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(8 * BATCHES, 6, generator=generator))
    return torch.utils.data.DataLoader(data, batch_size=8)


@pytest.mark.parametrize(
    ("name", "functional"), [("lightning.pytorch", True), ("pytorch_lightning", False)]
)
def test_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, functional: bool
) -> None:
    lightning = needed(name)
    monkeypatch.delitem(sys.modules, "tocsin.emitter.lightning", raising=False)

    def train(folder: Path, callbacks: list[Any]) -> Trained:
        losses: list[float] = []
        torch.manual_seed(0)
        module = digits(lightning, functional=functional, losses=losses)
        trainer = lightning_trainer(lightning, folder, callbacks, gradient_clip_val=0.5)
        trainer.fit(module, loader(), loader())
        trainer.test(module, loader(), verbose=False)
        return Trained.of(losses, module)

    made: list[Trained] = []

    def keep(folder: Path, callbacks: list[Any]) -> Trained:
        made.append(train(folder, callbacks))
        return made[-1]

    def callback() -> Any:
        from tocsin.emitter.lightning import TocsinCallback

        callback = TocsinCallback()
        assert isinstance(callback, lightning.Callback)
        # Strategies that spawn ranks send it there.
        assert pickle.loads(pickle.dumps(callback)).run is callback.run
        return callback

    if functional:
        plain, called = three_times(tmp_path, keep, callback)
        assert len([s for s, mode, _ in plain.rows if mode == "eval"]) == EPOCHS * BATCHES
    else:
        # Capture sees no loss in these evaluations: the callback's stands for it.
        with captured(tmp_path), pytest.MonkeyPatch.context() as patch:
            assert current.session is not None
            patch.setattr(api, "_run", Run(current.session))
            keep(tmp_path, [callback()])
        called = said(tmp_path)
        evaluated = {s: c["loss"] for s, c in called.steps("eval").items() if "loss" in c}
        assert evaluated == pytest.approx(logged(called, "val_loss", "eval"))
    losses = made[-1].losses
    assert planned(called) == [(EPOCHS * BATCHES, 0, "lightning")]
    steps = called.steps()
    assert [steps[i]["loss"] for i in range(len(losses))] == pytest.approx(losses, rel=1e-6)
    # As often as loggers do; the mean over an epoch has a name of its own.
    at = [1, 3, 5, 7, 9, 11]
    assert logged(called, "train_loss") == pytest.approx({i: losses[i] for i in at})
    assert logged(called, "both") == pytest.approx({i: losses[i] for i in at})
    means = {i: sum(losses[i - 3 : i + 1]) / 4 for i in (3, 7, 11)}
    assert logged(called, "both_epoch") == pytest.approx(means, rel=1e-5)
    assert logged(called, "accuracy", "eval") == pytest.approx({3: 0.5, 7: 0.5, 11: 0.5})
    assert sorted(logged(called, "val_loss", "eval")) == [3, 7, 11]
    edge = [(e, s) for s in (3, 7, 11) for e in ("begin", "end")]
    assert marks(called, "evaluation") == edge
    assert marks(called, "test") == [("begin", 11), ("end", 11)]
    assert sorted(logged(called, "test_size", "eval")) == [11]
    (written,) = called.of(CheckpointWritten)
    assert (written.checkpoint.step, written.checkpoint.finite) == (11, True)
    assert Path(written.checkpoint.path).parent.name == "kept"
    assert written.duration_s > 0


@pytest.mark.parametrize("least", [0, 1000], ids=["at once", "must make more steps first"])
def test_a_stop_ends_fit_in_good_order(watched: Path, least: int) -> None:
    lightning = needed("lightning.pytorch")
    from tocsin.emitter.lightning import TocsinCallback

    seen: list[str] = []

    class Ends(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == 5:
                stop_now()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(f"end after {trainer.global_step}")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(f"{type(exception).__name__} after {trainer.global_step}")

    module = digits(lightning, functional=True, losses=[])
    trainer = lightning_trainer(
        lightning, watched, [Ends(), TocsinCallback()], max_epochs=1000, min_steps=least
    )
    with pytest.raises(SystemExit) as caught:
        trainer.fit(module, loader())
    assert caught.value.code == 79
    current.session.end()  # type: ignore[union-attr]
    found = said(watched)
    assert [e.outcome for e in found.of(RunEnded)] == ["stopped"]
    assert [(left.step, left.edge) for left in found.of(StopLeft)] == [(5, "optimizer_step")]
    # Lightning refuses to end before its own least number of steps: then the next edge is the end.
    if least:
        assert seen == ["StopTraining after 6"]
    else:
        assert seen == ["end after 6", "StopTraining after 6"]
    assert max(found.steps()) == (6 if least else 5)


@pytest.mark.parametrize("least", [0, 1000], ids=["validates first", "must make more steps first"])
def test_fit_saves_a_checkpoint_if_the_stop_asks_for_it(
    watched: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    lightning = needed("lightning.pytorch")
    from tocsin.emitter.lightning import TocsinCallback

    class Ends(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == 5:
                stop_now(checkpoint="save")

    monkeypatch.setattr(rank_module, "FRAMEWORK_STOP_WAIT_S", 0.0)
    module = digits(lightning, functional=True, losses=[])
    trainer = lightning_trainer(
        lightning, watched, [Ends(), TocsinCallback()], max_epochs=1000, min_steps=least
    )
    with pytest.raises(SystemExit):
        trainer.fit(module, loader(), loader())
    current.session.end()  # type: ignore[union-attr]
    (decided,) = said(watched).of(StopCheckpoint)
    assert (decided.decision, decided.reason) == ("saved", "")
    assert decided.checkpoint is not None
    assert decided.checkpoint.step == 5
    saved = torch.load(decided.checkpoint.path, weights_only=False)
    assert saved["global_step"] == 6


def test_fit_saves_a_checkpoint_for_a_stop_in_its_validation(watched: Path) -> None:
    lightning = needed("lightning.pytorch")
    from tocsin.emitter.lightning import TocsinCallback

    class Stops(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_validation_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1 and trainer.global_step == BATCHES:
                stop_now(checkpoint="save")

    module = digits(lightning, functional=True, losses=[])
    trainer = lightning_trainer(lightning, watched, [Stops(), TocsinCallback()])
    with pytest.raises(SystemExit):
        trainer.fit(module, loader(), loader())
    current.session.end()  # type: ignore[union-attr]
    found = said(watched)
    assert [left.edge for left in found.of(StopLeft)] == ["evaluation"]
    (decided,) = found.of(StopCheckpoint)
    assert (decided.decision, decided.reason) == ("saved", "")
    assert decided.checkpoint is not None
    assert decided.checkpoint.step == BATCHES - 1
    with unwatched():
        again = lightning_trainer(lightning, watched, [])
        again.fit(module, loader(), loader(), ckpt_path=decided.checkpoint.path)
    assert again.global_step == EPOCHS * BATCHES


# -- Hugging Face


def hugging_face(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    transformers = needed("transformers")
    needed("accelerate")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(0, 16, (64, 8), generator=generator)
    ]
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            **{
                "output_dir": str(folder / "out"), "max_steps": 6,
                "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
                "learning_rate": 0.01, "eval_strategy": "steps", "eval_steps": 3,
                "save_steps": 6, "logging_steps": 2, "use_cpu": True, "report_to": "none",
                "disable_tqdm": True, "dataloader_pin_memory": False, **more,
            }
        ),
        train_dataset=data,
        eval_dataset=data[:16],
        callbacks=callbacks,
    )  # fmt: skip


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    history: list[list[dict[str, Any]]] = []

    def train(folder: Path, callbacks: list[Any]) -> Trained:
        trainer = hugging_face(folder, callbacks)
        trainer.train()
        history.append(trainer.state.log_history)
        return Trained.of([log["loss"] for log in history[-1] if "loss" in log], trainer.model)

    def callback() -> Any:
        from tocsin.emitter.transformers import TocsinCallback

        return TocsinCallback()

    plain, called = three_times(tmp_path, train, callback)
    by_step = {log["step"] - 1: log for log in history[-1] if "loss" in log}
    assert sorted(by_step) == [1, 3, 5]
    assert logged(called, "loss") == pytest.approx({s: x["loss"] for s, x in by_step.items()})
    assert logged(called, "grad_norm") == pytest.approx(
        {s: x["grad_norm"] for s, x in by_step.items()}, rel=1e-5
    )
    steps = called.steps()
    for step, log in by_step.items():
        # Halves of the micro-batches are summed; the Trainer's own is the mean since its last.
        ours = (steps[step - 1]["loss"] + steps[step]["loss"]) / 2
        assert ours == pytest.approx(log["loss"], rel=1e-4)
        assert steps[step]["gradient_norm"] == pytest.approx(log["grad_norm"], rel=1e-4)
        assert steps[step]["micro_batches"] == 2
    evaluated = {log["step"] - 1: log for log in history[-1] if "eval_loss" in log}
    assert logged(called, "eval_loss", "eval") == pytest.approx(
        {s: x["eval_loss"] for s, x in evaluated.items()}
    )
    assert sorted(evaluated) == [2, 5]
    assert {s for s, mode, _ in plain.rows if mode == "eval"} == {2, 5}
    assert marks(called, "evaluation") == [(e, s) for s in (2, 5) for e in ("begin", "end")]
    for found in (plain, called):
        assert planned(found) == [(6, 0, "transformers")]
        (written,) = found.of(CheckpointWritten)
        assert Path(written.checkpoint.path).name == "checkpoint-6"
        assert (written.checkpoint.step, written.checkpoint.finite) == (5, True)
        assert written.duration_s > 0


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6),
    reason="transformers resumes with no torch before 2.6: CVE-2025-32434",
)
def test_a_trainer_that_resumes_tells_from_where(tmp_path: Path) -> None:
    with unwatched():
        hugging_face(tmp_path, []).train()
    kept = tmp_path / "out" / "checkpoint-6"
    with captured(tmp_path):
        hugging_face(tmp_path, [], max_steps=8).train(resume_from_checkpoint=str(kept))

    found = said(tmp_path)
    assert planned(found) == [(8, 6, "transformers")]
    assert {Path(path).parent for path in found.of(RunStarted)[0].loaded} == {kept}


def test_a_fit_that_resumes_tells_from_where(tmp_path: Path) -> None:
    lightning = needed("lightning.pytorch")
    with unwatched():
        module = digits(lightning, functional=True, losses=[])
        lightning_trainer(lightning, tmp_path, []).fit(module, loader())
    (kept,) = (tmp_path / "kept").iterdir()
    with captured(tmp_path):
        module = digits(lightning, functional=True, losses=[])
        trainer = lightning_trainer(lightning, tmp_path, [], max_epochs=EPOCHS + 1)
        trainer.fit(module, loader(), ckpt_path=kept)

    found = said(tmp_path)
    assert planned(found) == [((EPOCHS + 1) * BATCHES, EPOCHS * BATCHES, "lightning")]
    assert str(kept) in found.of(RunStarted)[0].loaded


def test_a_stop_ends_the_trainer_in_good_order(watched: Path) -> None:
    transformers = needed("transformers")
    from tocsin.emitter.transformers import TocsinCallback

    seen: list[str] = []

    class Ends(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                stop_now()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"end after {state.global_step}")

    trainer = hugging_face(watched, [Ends(), TocsinCallback()], max_steps=1000)
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 79
    current.session.end()  # type: ignore[union-attr]
    found = said(watched)
    assert seen == ["end after 4"]
    assert [e.outcome for e in found.of(RunEnded)] == ["stopped"]
    assert [(left.step, left.edge) for left in found.of(StopLeft)] == [(3, "optimizer_step")]
    assert max(found.steps()) == 3


@pytest.mark.parametrize("spoiled", [False, True])
def test_the_trainer_saves_a_checkpoint_if_the_weights_are_finite(
    watched: Path, *, spoiled: bool
) -> None:
    transformers = needed("transformers")
    from tocsin.emitter.transformers import TocsinCallback

    class Ends(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                if spoiled:
                    with torch.no_grad():
                        next(kwargs["model"].parameters())[0, 0] = float("nan")
                stop_now(checkpoint="save")

    trainer = hugging_face(watched, [Ends(), TocsinCallback()], max_steps=1000, save_steps=500)
    with pytest.raises(SystemExit):
        trainer.train()
    current.session.end()  # type: ignore[union-attr]
    (decided,) = said(watched).of(StopCheckpoint)
    if spoiled:
        assert decided.decision == "not_saved"
        assert "the weights are not finite" in decided.reason
        assert not (watched / "out" / "checkpoint-4").exists()
    else:
        assert decided.decision == "saved"
        assert decided.checkpoint is not None
        assert decided.checkpoint.path == str(watched / "out" / "checkpoint-4")
        assert (watched / "out" / "checkpoint-4" / "trainer_state.json").exists()


@pytest.mark.parametrize(
    "more",
    [{"eval_steps": 4}, {"eval_steps": 4, "save_strategy": "best"}, {"eval_strategy": "epoch"}],
    ids=["at the step", "at the step, and saves the best", "at the end of the epoch"],
)
def test_a_stop_has_the_trainer_save_without_its_evaluation(
    watched: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    transformers = needed("transformers")
    from tocsin.emitter.transformers import TocsinCallback

    seen: list[str] = []

    class Ends(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                stop_now(checkpoint="save")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"end after {state.global_step}")

    monkeypatch.setattr(rank_module, "FRAMEWORK_STOP_WAIT_S", 0.0)
    given = {"metric_for_best_model": "loss", "save_steps": 500, **more}
    trainer = hugging_face(watched, [Ends(), TocsinCallback()], max_steps=1000, **given)
    with pytest.raises(SystemExit):
        trainer.train()
    current.session.end()  # type: ignore[union-attr]
    found = said(watched)
    (decided,) = found.of(StopCheckpoint)
    assert (decided.decision, decided.reason) == ("saved", "")
    assert (watched / "out" / "checkpoint-4" / "trainer_state.json").exists()
    assert seen == ["end after 4"]
    assert marks(found, "evaluation") == []


def test_the_rotation_of_the_trainer_leaves_the_pin(tmp_path: Path) -> None:
    transformers = needed("transformers")

    class Pin(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                pin(tmp_path / "out" / "checkpoint-1", "hard_link")

    with unwatched():
        hugging_face(tmp_path, [Pin()], max_steps=4, save_steps=1, save_total_limit=2).train()
    left = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert left == {"checkpoint-3", "checkpoint-4"}
    found = health(tmp_path / "out" / "tocsin-pinned" / "checkpoint-1")
    assert found.torn == ""
    assert found.tensors > 10


def test_accelerate_saves_its_state_for_a_stop(watched: Path) -> None:
    accelerate = needed("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())

    def train() -> None:
        for number, (x,) in enumerate(data):
            if number == 2:
                stop_now(checkpoint="save")
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    api.start().on_stop_save(lambda: accelerator.save_state(str(watched / "state")))
    try:
        with pytest.raises(SystemExit):
            train()
    finally:
        api.start().on_stop_save(None)
    current.session.end()  # type: ignore[union-attr]
    (decided,) = said(watched).of(StopCheckpoint)
    assert decided.decision == "saved"
    assert decided.checkpoint is not None
    assert decided.checkpoint.path == str(watched / "state")
    assert any((watched / "state").iterdir())


def test_accelerate(tmp_path: Path) -> None:
    accelerate = needed("accelerate")
    norms: list[float] = []

    def train() -> Trained:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)
        model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
        losses: list[float] = []
        norms.clear()
        for _ in range(EPOCHS):
            for (x,) in data:
                with accelerator.accumulate(model):
                    loss = model(x).square().mean()
                    accelerator.backward(loss)
                    losses.append(loss.item())
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        return Trained.of(losses, model)

    with unwatched():
        plain = train()
    with captured(tmp_path):
        watched = train()
    same(plain, watched)
    found = said(tmp_path)
    assert found.of(CaptureDegraded) == []
    assert issues_of(records(tmp_path)) == []
    steps = found.steps()
    pairs = zip(watched.losses[::2], watched.losses[1::2], strict=True)
    expected = [(one + other) / 2 for one, other in pairs]
    assert sorted(steps) == list(range(len(expected)))
    assert [steps[i]["loss"] for i in sorted(steps)] == pytest.approx(expected, rel=1e-5)
    assert [steps[i]["gradient_norm"] for i in sorted(steps)] == pytest.approx(norms, rel=1e-4)
    assert steps[1]["lr.0"] == pytest.approx(0.005)


# -- without the packages


@pytest.mark.parametrize(
    ("module", "packages", "remedy"),
    [
        ("lightning", ("lightning", "pytorch_lightning"), "pip install lightning"),
        ("transformers", ("transformers",), "pip install transformers accelerate"),
    ],
)
def test_a_missing_framework_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, packages: tuple[str, ...], remedy: str
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"tocsin.emitter.{module}", raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=remedy):
        __import__(f"tocsin.emitter.{module}")
