"""The folder of keys: one key for all who make it; a rotation under which no stop is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tocsin.console.__main__ import app
from tocsin.emitter.stop.verification import read_keys
from tocsin.schemas.errors import ConfigurationError, SignatureError
from tocsin.schemas.key_folder import (
    keys_folder,
    list_keys,
    new_key,
    own_key,
    prepare_key,
    retire_key,
    rotate_key,
)
from tocsin.schemas.signing import SigningKey, TrustedKeys

KEY, VALUE = b"gpt-1/i-1/stop", b'{"reason":"NaN"}'


def test_the_folder_of_keys() -> None:
    assert keys_folder({"HOME": "/home/ana"}) == Path("/home/ana/.config/tocsin/keys")
    assert keys_folder({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/tocsin/keys")


def test_own_key_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"

    made = own_key(folder)

    assert own_key(folder).public.key_id == made.public.key_id
    assert sorted(path.name for path in folder.iterdir()) == ["actions.key", "actions.pub"]
    assert stat.S_IMODE((folder / "actions.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_missing_public_half_is_made_again(tmp_path: Path) -> None:
    made = own_key(tmp_path)
    (tmp_path / "actions.pub").unlink()

    again = own_key(tmp_path)

    assert again.public.key_id == made.public.key_id
    TrustedKeys.read([tmp_path]).verify(KEY, VALUE, made.sign(KEY, VALUE))


@pytest.mark.parametrize("obstacle", ["keys", "keys/actions.key"])
def test_a_folder_that_cannot_hold_a_key(obstacle: str, tmp_path: Path) -> None:
    blocked = tmp_path / obstacle
    blocked.parent.mkdir(exist_ok=True)
    if obstacle == "keys":
        blocked.write_text("a file where the folder should be")
    else:
        blocked.mkdir()

    with pytest.raises(ConfigurationError):
        own_key(tmp_path / "keys")


def make_key(folder: str, queue: multiprocessing.queues.Queue[tuple[str, int]]) -> None:
    key = own_key(Path(folder))
    # Whatever a trainer reads at this moment is whole, and holds this very key.
    trusted = TrustedKeys.read([Path(folder)])
    trusted.verify(KEY, VALUE, key.sign(KEY, VALUE))
    queue.put((key.public.key_id, len(trusted)))


def test_processes_that_make_it_at_once_end_with_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        folder = tmp_path / str(round_)
        queue: multiprocessing.queues.Queue[tuple[str, int]] = context.Queue()
        makers = [context.Process(target=make_key, args=(str(folder), queue)) for _ in range(6)]
        for maker in makers:
            maker.start()
        found = {queue.get(timeout=20) for _ in makers}
        for maker in makers:
            maker.join(timeout=20)

        assert found == {(own_key(folder).public.key_id, 1)}
        assert [maker.exitcode for maker in makers] == [0] * 6
        assert sorted(path.name for path in folder.iterdir()) == ["actions.key", "actions.pub"]


def obeys(folder: Path, key: SigningKey) -> bool:
    """Whether a training that reads the folder now obeys the key."""
    try:
        read_keys([folder]).verify(KEY, VALUE, key.sign(KEY, VALUE))
    except SignatureError:
        return False
    return True


def roles(folder: Path) -> dict[str, str]:
    return {key.name: key.role for key in list_keys(folder)}


def test_both_keys_are_valid_while_a_rotation_is_under_way(tmp_path: Path) -> None:
    old = own_key(tmp_path)

    prepared = prepare_key(tmp_path)
    assert roles(tmp_path) == {"actions": "signs", "actions-next": "next"}
    assert own_key(tmp_path).public.key_id == old.public.key_id
    assert obeys(tmp_path, old)
    assert obeys(tmp_path, prepared)

    rotation = rotate_key(tmp_path)
    assert (rotation.old_id, rotation.new_id) == (old.public.key_id, prepared.public.key_id)
    assert own_key(tmp_path).public.key_id == prepared.public.key_id
    # A service that still runs signs with the old key.
    assert obeys(tmp_path, old)
    assert obeys(tmp_path, prepared)
    old_name = f"actions-{old.public.key_id}"
    assert roles(tmp_path) == {"actions": "signs", old_name: "retiring"}

    retire_key(tmp_path, old.public.key_id[:6])
    assert not obeys(tmp_path, old)
    assert obeys(tmp_path, prepared)
    assert roles(tmp_path) == {"actions": "signs"}


def test_a_rotation_needs_no_preparation(tmp_path: Path) -> None:
    old = own_key(tmp_path)

    rotation = rotate_key(tmp_path)

    new = own_key(tmp_path)
    assert new.public.key_id == rotation.new_id != old.public.key_id
    assert obeys(tmp_path, old)
    assert obeys(tmp_path, new)
    assert (tmp_path / "actions.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("killed_at", range(7))
def test_a_rotation_that_is_killed_leaves_a_key_that_is_trusted(
    prepared: bool, killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = own_key(tmp_path)
    if prepared:
        prepare_key(tmp_path)
    calls = 0

    class Killed(BaseException):
        pass

    def killing(call: object) -> object:
        def wrapped(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls > killed_at:
                raise Killed
            return call(*args, **options)  # type: ignore[operator]

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("replace", "link", "open", "unlink"):
            patch.setattr(os, name, killing(getattr(os, name)))
        try:
            rotate_key(tmp_path)
        except Killed:
            pass
        else:
            pytest.skip("the rotation ended before that call")

    assert obeys(tmp_path, own_key(tmp_path))
    assert obeys(tmp_path, old)
    rotate_key(tmp_path)
    new = own_key(tmp_path)
    assert new.public.key_id != old.public.key_id
    assert obeys(tmp_path, new)
    assert obeys(tmp_path, old)
    assert "next" not in roles(tmp_path).values()


def test_the_key_that_signs_is_not_retired(tmp_path: Path) -> None:
    key = own_key(tmp_path)

    with pytest.raises(ConfigurationError, match="this key signs; replace it first"):
        retire_key(tmp_path, key.public.key_id)
    with pytest.raises(ConfigurationError, match=f"the folder has {key.public.key_id}"):
        retire_key(tmp_path, "0000" if not key.public.key_id.startswith("0000") else "1111")
    with pytest.raises(ConfigurationError, match="the id of one key"):
        retire_key(tmp_path, key.public.key_id[:3])


def test_a_key_of_another_machine_is_listed_and_retired(tmp_path: Path) -> None:
    own_key(tmp_path)
    other = SigningKey.generate()
    other.public.write(tmp_path / "night-shift.pub")

    assert roles(tmp_path) == {"actions": "signs", "night-shift": "trusted"}
    retire_key(tmp_path, other.public.key_id)
    assert len(TrustedKeys.read([tmp_path])) == 1


def test_no_key_is_overwritten(tmp_path: Path) -> None:
    new_key(tmp_path, "ana")
    with pytest.raises(ConfigurationError, match="this key exists"):
        new_key(tmp_path, "ana")
    prepare_key(tmp_path, "ana")
    with pytest.raises(ConfigurationError, match="`tocsin keys rotate ana` changes to it"):
        prepare_key(tmp_path, "ana")
    with pytest.raises(ConfigurationError, match="`tocsin keys new bob` makes one"):
        rotate_key(tmp_path, "bob")


@pytest.mark.parametrize("name", ["", "../evil", "Ana", "a/b", ".hidden", "ana-next", "a" * 65])
def test_a_name_is_a_file_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not a name for a key"):
        new_key(tmp_path, name)


def test_nothing_is_changed_in_a_folder_that_others_can_write(tmp_path: Path) -> None:
    own_key(tmp_path)
    tmp_path.chmod(0o777)
    for change in (new_key, prepare_key, rotate_key, list_keys):
        with pytest.raises(ConfigurationError, match="chmod go-w"):
            change(*((tmp_path, "ana") if change is new_key else (tmp_path,)))


def keys(*words: str) -> Result:
    return CliRunner().invoke(app, ["keys", *words], catch_exceptions=False)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "tocsin" / "keys"
    assert "no key; `tocsin run`" in keys("list").output

    assert "copy it to the machines that train" in keys("new").output
    assert "actions-next.pub" in keys("rotate", "--prepare").output
    rotated = keys("rotate").output
    listed = json.loads(keys("list", "--json").output)
    assert [key["role"] for key in listed["keys"]] == ["signs", "retiring"]
    signs, retiring = listed["keys"]
    assert f"signs with key {signs['id']}" in rotated
    assert f"tocsin keys retire {retiring['id'][:8]}" in rotated
    assert "still valid" in keys("list").output

    assert f"key id {retiring['id']}" in keys("retire", retiring["id"][:8]).output
    assert roles(folder) == {"actions": "signs"}
