"""A bus that others can write to: they could forge an issue, and this user's key sign the stop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.somebody import give_away
from tocsin.bus.embedded.location import default_place, explicit_place
from tocsin.bus.port import BusError, UnusableBus
from tocsin.bus.urls import open_bus
from tocsin.schemas.topics import Topics

LOCAL = "/dev/vda / ext4 rw 0 0\n"


async def made(path: Path) -> Path:
    """A bus that was used before."""
    async with open_bus(f"embedded:{path}") as bus:
        await bus.init(Topics("tocsin").specs())
    return path


def assert_not_used(folder: Path) -> None:
    """Neither where somebody wrote the path down, nor by default."""
    path = folder / ".tocsin" / "bus.db"
    with pytest.raises(UnusableBus, match="choose a path in a folder of your own"):
        explicit_place(path, mounts=LOCAL)
    found = default_place(folder, mounts=LOCAL, env={"XDG_RUNTIME_DIR": str(folder)})
    assert found.path.is_relative_to(folder / f"tocsin-{os.getuid()}")
    assert found.notice is not None
    assert str(found.path) in found.notice


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".tocsin").mkdir(mode=0o700)
    return tmp_path


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
async def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, mode: int) -> None:
    await made(folder / ".tocsin" / "bus.db")
    (folder / ".tocsin").chmod(mode)
    assert_not_used(folder)


@pytest.mark.parametrize("name", ["bus.db", "bus.db-wal", "bus.db-journal"])
async def test_a_file_that_others_can_write_to_is_not_used(folder: Path, name: str) -> None:
    path = await made(folder / ".tocsin" / "bus.db")
    planted = path.with_name(name)
    planted.touch()
    planted.chmod(0o666)
    assert_not_used(folder)


@pytest.mark.parametrize("name", [".tocsin", ".tocsin/bus.db"])
async def test_what_somebody_else_has_made_is_not_used(folder: Path, name: str) -> None:
    await made(folder / ".tocsin" / "bus.db")
    give_away(folder / name)
    assert_not_used(folder)


def test_a_link_that_somebody_else_has_made_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / ".tocsin").symlink_to(tmp_path / "other")
    assert explicit_place(tmp_path / ".tocsin" / "bus.db", mounts=LOCAL)
    give_away(tmp_path / ".tocsin")
    assert_not_used(tmp_path)


def test_what_a_link_leads_to_counts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other").chmod(0o777)
    (tmp_path / ".tocsin").symlink_to(tmp_path / "other")
    assert_not_used(tmp_path)


async def test_a_bus_that_is_exchanged_while_it_is_open_is_refused(folder: Path) -> None:
    path = folder / ".tocsin" / "bus.db"
    other = await made(folder / ".tocsin" / "other.db")
    specs = Topics("tocsin").specs()
    async with open_bus(f"embedded:{path}") as bus:
        await bus.init(specs)
        other.chmod(0o666)
        os.replace(other, path)
        with pytest.raises(BusError, match="others can write to"):
            await bus.show(specs)
