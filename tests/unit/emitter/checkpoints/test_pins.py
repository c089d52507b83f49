"""The last good checkpoint gets a second name, which the rotation of the job does not delete."""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch

from tocsin.emitter.checkpoints.health import health
from tocsin.emitter.checkpoints.pins import PIN, How, Pins, how_to_pin, pin
from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointPinned
from tocsin.schemas.records.events import Data

HOWS: tuple[How, ...] = ("hard_link", "copy")


def saved(path: Path, value: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.full((3, 3), value)}, path)
    return path


def keep_three(folder: Path) -> None:
    """What trainers do after each save."""
    newest_first = sorted(folder.glob("step-*"), key=lambda p: int(p.stem[5:]), reverse=True)
    for old in newest_first[3:]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
def test_a_rotation_deletes_the_checkpoint_and_not_its_pin(
    tmp_path: Path, how: How, *, folders: bool
) -> None:
    pinned = tmp_path
    for step in range(10):
        place = (
            tmp_path / f"step-{step}" / "deep" / "a.pt" if folders else tmp_path / f"step-{step}.pt"
        )
        saved(place, float(step))
        if step == 2:
            pinned = pin(tmp_path / (f"step-{step}" if folders else f"step-{step}.pt"), how)
        keep_three(tmp_path)

    left = sorted(path.stem for path in tmp_path.glob("step-*"))
    assert left == ["step-7", "step-8", "step-9"]
    assert pinned.parent == tmp_path / "tocsin-pinned"
    assert health(pinned).tensors == 1
    file = pinned / "deep" / "a.pt" if folders else pinned
    assert torch.load(file)["w"][0, 0] == 2.0


def test_a_hard_link_takes_no_space_and_a_copy_survives_a_write(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.pt")
    linked = pin(path, "hard_link")
    assert linked.stat().st_ino == path.stat().st_ino

    other = saved(tmp_path / "b" / "last.pt")
    copied = pin(other, "copy")
    saved(other, 5.0)
    assert torch.load(copied)["w"][0, 0] == 1.0


def test_pinned_twice_it_has_one_pin_and_another_of_its_name_gets_a_number(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.pt")
    first = pin(path, "copy")
    assert pin(path, "copy") == first
    path.unlink()
    saved(path, 2.0)
    os.utime(path, ns=(1, 1))
    second = pin(path, "copy")
    assert (first.name, second.name) == ("last.pt", "last.pt.1")
    assert torch.load(first)["w"][0, 0] == 1.0


@pytest.mark.parametrize("how", HOWS)
def test_launchers_of_several_nodes_may_pin_one_checkpoint(tmp_path: Path, how: How) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    for i in range(100):
        (path / f"shard-{i}").write_bytes(b"x" * 20_000)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: pin(path, how), range(4)))
    assert set(found) == {tmp_path / "tocsin-pinned" / "step-1"}
    assert len(list(found[0].iterdir())) == 100
    assert [one.name for one in (tmp_path / "tocsin-pinned").iterdir()] == ["step-1"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "step-1" / "a.pt").parent

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(shutil.Error, match="no hard links here"):
        pin(folder, "hard_link")
    assert list((tmp_path / "tocsin-pinned").iterdir()) == []
    with pytest.raises(FileNotFoundError):
        pin(tmp_path / "gone", "copy")


def told(how: How | None, *checkpoints: Checkpoint | None) -> list[CheckpointPinned]:
    said: list[Data] = []

    async def go() -> None:
        pins = Pins("r1", how, said.append)
        for checkpoint in checkpoints:
            pins.keep(checkpoint, "i1")
        assert await pins.settled(60.0)

    asyncio.run(go())
    return [cast(CheckpointPinned, one) for one in said]


def test_what_was_pinned_is_told_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt")
    checkpoint = Checkpoint(path=str(path), step=3)
    (done,) = told("hard_link", checkpoint, checkpoint, None, Checkpoint(path="a.pt", step=3))
    assert (done.pinned, done.reason) == (str(tmp_path / "tocsin-pinned" / "a.pt"), "")
    assert (done.incarnation, done.how, done.checkpoint.step) == ("i1", "hard_link", 3)

    (failed,) = told("copy", Checkpoint(path=str(tmp_path / "gone.pt"), step=4))
    assert failed.pinned == ""
    assert "No such file" in failed.reason


def test_without_leave_nothing_is_pinned(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt")
    assert told(None, Checkpoint(path=str(path), step=3)) == []
    assert not (tmp_path / "tocsin-pinned").exists()
    assert [how_to_pin({PIN: word}) for word in ("hard_link", "copy", "off")] == [*HOWS, None]
    assert how_to_pin({}) is None
