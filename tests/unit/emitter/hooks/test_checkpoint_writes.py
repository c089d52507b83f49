"""Checkpoints of each framework: one record and one phase for each, with its path."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.trainings.captured import Said, captured, said
from tocsin.emitter.probes import checkpoint_files
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.runs import PhaseMark


class Loop:
    """A model that can be stepped once more."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(3, 4)).square().mean().backward()
        self.optimizer.step()


def written(found: Said) -> list[tuple[str, int]]:
    return [(w.checkpoint.path, w.checkpoint.step) for w in found.of(CheckpointWritten)]


def marks(found: Said) -> list[str]:
    return [mark.edge for mark in found.of(PhaseMark) if mark.name == "checkpoint"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_safetensors_and_distributed_checkpoints(tmp_path: Path) -> None:
    from safetensors.torch import save_file, save_model
    from torch.distributed import checkpoint as distributed

    loop = Loop()
    with captured(tmp_path):
        loop.step()
        save_file(loop.model.state_dict(), tmp_path / "a.safetensors")
        loop.step()
        save_model(loop.model, str(tmp_path / "b.safetensors"))
        torch.save(loop.model.state_dict(), io.BytesIO())
        distributed.save(loop.model.state_dict(), checkpoint_id=tmp_path / "c", no_dist=True)
    found = said(tmp_path)
    assert written(found) == [
        (str(tmp_path / "a.safetensors"), 0),
        (str(tmp_path / "b.safetensors"), 1),
        (str(tmp_path / "c"), 1),
    ]
    assert marks(found) == ["begin", "end"] * 3
    whole = found.of(CheckpointWritten)[2]
    files = [f.stat().st_size for f in (tmp_path / "c").iterdir()]
    assert whole.checkpoint.size_bytes == sum(files)
    assert whole.duration_s > 0
    assert {m.duration_s for m in found.of(PhaseMark) if m.edge == "begin"} == {None}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_write_that_goes_on_is_told_when_it_is_over(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as distributed

    loop = Loop()
    with captured(tmp_path):
        loop.step()
        writing = distributed.async_save(
            loop.model.state_dict(), checkpoint_id=tmp_path / "c", no_dist=True
        )
        loop.step()
        done = threading.Event()
        writing.add_done_callback(lambda _: done.set())
        assert done.wait(timeout=30)
        (tmp_path / "file").touch()
        failing = distributed.async_save(
            loop.model.state_dict(), checkpoint_id=tmp_path / "file" / "d", no_dist=True
        )
        assert failing.exception(timeout=30) is not None
    found = said(tmp_path)
    assert written(found) == [(str(tmp_path / "c"), 0)]
    assert found.of(CheckpointWritten)[0].checkpoint.size_bytes == sum(
        f.stat().st_size for f in (tmp_path / "c").iterdir()
    )
    assert marks(found) == ["begin", "end"] * 2


def test_a_write_that_fails_ends_its_phase(tmp_path: Path) -> None:
    loop = Loop()
    with captured(tmp_path) as hooks:
        loop.step()
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save({}, tmp_path / "no" / "where.pt")
        assert hooks.capture is not None
        assert hooks.capture.training.phases == []
    found = said(tmp_path)
    assert (written(found), marks(found)) == ([], ["begin", "end"])


def test_accelerates_state_is_one_folder(tmp_path: Path) -> None:
    import accelerate  # type: ignore[import-untyped]

    loop = Loop()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)
    with captured(tmp_path):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        accelerator.save_state(str(tmp_path / "state"))
    found = said(tmp_path)
    assert written(found) == [(str(tmp_path / "state"), 0)]
    assert marks(found) == ["begin", "end"]


def test_a_folder_is_found_under_its_final_name(tmp_path: Path) -> None:
    folder = tmp_path / "partial"
    (folder / "inner").mkdir(parents=True)
    (folder / "a").write_bytes(b"12345")
    (folder / "inner" / "b").write_bytes(b"123")
    seen = checkpoint_files.inspect(folder, step=3, duration_s=1.0, finite=None)
    assert seen is not None
    assert seen.size_bytes is None  # that is found out once
    folder.rename(tmp_path / "final")
    assert checkpoint_files.final_path(seen) == (tmp_path / "final", 8)
    assert checkpoint_files.final_path(seen, add_up=False) == (tmp_path / "final", None)
    assert checkpoint_files.inspect(tmp_path / "gone", step=3, duration_s=1.0, finite=None) is None


def test_a_file_that_goes_while_sizes_are_added_up_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b.tmp").write_bytes(b"1")
    seen = checkpoint_files.inspect(tmp_path, step=3, duration_s=1.0, finite=None)
    assert seen is not None
    walk = os.walk

    def slow(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, names in walk(top):
            (tmp_path / "b.tmp").unlink()
            yield str(folder), folders, names

    monkeypatch.setattr(os, "walk", slow)
    assert checkpoint_files.final_path(seen) == (tmp_path, 5)
