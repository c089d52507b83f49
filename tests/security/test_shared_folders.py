"""Names in folders that others use too: taken before us, exchanged, or led elsewhere by a link."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.somebody import SOMEBODY, give_away
from tocsin.bus.embedded.doorbell import ALL_TOPICS, Bell, Doorbell, bell_folder
from tocsin.emitter.node.registry import NodeFolder
from tocsin.emitter.process import runtime_folder
from tocsin.emitter.stop import datagrams
from tocsin.schemas.process import private_folders
from tocsin.schemas.process.private_folders import (
    is_private,
    make_private,
    open_private,
    others_write,
    remove_socket,
    user_folder,
)

NAME = f"tocsin-{os.getuid()}"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path as short as that of a session; pytest's own may be too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def shared(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp."""
    folder = short / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(private_folders, "SHARED", folder)
    monkeypatch.setattr(runtime_folder, "SHARED", folder)
    return folder


def precious(folder: Path) -> list[Path]:
    """Files of the user that are called as sockets of ours are."""
    folder.mkdir()
    names = ["1f-0-ffffffffffffffff", "ffffffffffffffff", "model-ffffffffffffffff"]
    for name in names:
        (folder / name).write_text("precious")
    return [folder / name for name in names]


def ring_all(path: Path) -> None:
    doorbell = Doorbell(path)
    doorbell.ring(ALL_TOPICS)
    doorbell.close()


# -- the bells -----------------------------------------------------------------------------


async def test_a_link_in_the_place_of_the_bells_is_not_followed(tmp_path: Path) -> None:
    files = precious(tmp_path / "objects")
    bus = tmp_path / "bus.db"
    bell_folder(bus).symlink_to(tmp_path / "objects")

    bell = Bell.hang(bus, ["topic"])
    ring_all(bus)
    bell.close()

    assert not bell.works
    assert sorted((tmp_path / "objects").iterdir()) == sorted(files)


async def test_what_is_no_socket_is_never_removed_from_among_the_bells(tmp_path: Path) -> None:
    bus = tmp_path / "bus.db"
    files = precious(bell_folder(bus))
    bell_folder(bus).chmod(0o700)
    bell = Bell.hang(bus, ["topic"])
    assert bell.works
    ring_all(bus)
    bell.close()
    assert sorted(bell_folder(bus).iterdir()) == sorted(files)


async def test_bells_hang_in_no_folder_that_others_can_write_to(tmp_path: Path) -> None:
    bus = tmp_path / "bus.db"
    folder = bell_folder(bus)
    folder.mkdir()
    folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trap:
        trap.bind(f"{folder}/1-0-ffffffffffffffff")
        trap.setblocking(False)
        assert not Bell.hang(bus, ["topic"]).works
        ring_all(bus)
        with pytest.raises(BlockingIOError):
            trap.recv(1)
    assert [path.name for path in folder.iterdir()] == ["1-0-ffffffffffffffff"]


# -- the folder of the user ----------------------------------------------------------------


def test_the_folder_of_the_session_comes_first_if_it_is_there(short: Path, shared: Path) -> None:
    session = short / "run"
    session.mkdir(mode=0o700)
    assert user_folder({"XDG_RUNTIME_DIR": str(session)}) == session / NAME
    assert user_folder({"XDG_RUNTIME_DIR": str(short / "gone")}) == shared / NAME
    assert user_folder({"XDG_RUNTIME_DIR": "run"}) == shared / NAME
    assert user_folder({"XDG_RUNTIME_DIR": ""}) == shared / NAME
    assert user_folder({}) == shared / NAME
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("taken", ["link", "open folder", "readable folder", "file", "other's"])
def test_a_name_that_is_taken_is_not_used(short: Path, shared: Path, taken: str) -> None:
    name = shared / NAME
    if taken == "link":
        (short / "mine").mkdir(mode=0o700)
        name.symlink_to(short / "mine")
    elif taken == "file":
        name.touch(mode=0o600)
    else:
        name.mkdir()
        name.chmod({"open folder": 0o777, "readable folder": 0o755}.get(taken, 0o700))
    if taken == "other's":
        give_away(name)

    assert user_folder({}) is None
    folder = runtime_folder.job_folder({})

    assert not folder.is_relative_to(name)
    assert is_private(folder)
    assert is_private(folder.parent)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        make_private(name)


def test_a_base_in_which_others_may_rename_is_passed_over(short: Path, shared: Path) -> None:
    base = short / "run"
    base.mkdir()
    base.chmod(0o777)
    assert user_folder({"XDG_RUNTIME_DIR": str(base)}) == shared / NAME


def test_a_session_of_another_user_is_passed_over(short: Path, shared: Path) -> None:
    base = short / "run"
    base.mkdir(mode=0o700)
    give_away(base)
    assert user_folder({"XDG_RUNTIME_DIR": str(base)}) == shared / NAME


def test_what_lies_below_is_made_for_this_user_alone(shared: Path) -> None:
    made = [
        runtime_folder.job_folder({}),
        runtime_folder.shared_job_folder({}, "job"),
        NodeFolder.from_environ({}).path,
    ]
    assert {folder.parent for folder in made} == {shared / NAME}
    assert {stat.S_IMODE(folder.lstat().st_mode) for folder in made} == {0o700}


def test_a_node_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        NodeFolder(tmp_path)


# -- what they are made of -----------------------------------------------------------------


def test_an_endpoint_removes_no_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    path.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        datagrams.Endpoint(path)
    assert path.read_text() == "precious"


def test_a_link_to_a_socket_is_not_removed(short: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(short / "real"))
        (short / "link").symlink_to(short / "real")
        remove_socket(str(short / "link"))
        remove_socket(str(short / "real"))
        remove_socket(str(short / "gone"))
    assert [path.name for path in short.iterdir()] == ["link"]


def test_a_folder_is_opened_only_if_nobody_else_can_write_to_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.close(open_private(tmp_path))
    tmp_path.chmod(0o757)
    with pytest.raises(PermissionError):
        open_private(tmp_path)


def test_the_group_of_one_s_own_is_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    own = path.stat()
    values = list(own)
    values[5] = SOMEBODY
    assert others_write(os.stat_result(values))
    assert not others_write(os.stat_result([0o100644, *values[1:]]))
    values[4] = SOMEBODY
    assert others_write(os.stat_result([0o100600, *values[1:]]))
