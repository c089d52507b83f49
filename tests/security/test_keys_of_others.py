"""Keys that others could have put there: none of them may stop a run, or sign for this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.somebody import give_away
from tocsin.emitter.stop.verification import read_keys, untrusted_places
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.key_folder import own_key
from tocsin.schemas.process.private_folders import why_open
from tocsin.schemas.signing import SigningKey, TrustedKeys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    own_key(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("mode", [0o777, 0o722, 0o1777])
def test_no_key_of_a_folder_that_others_can_write_is_trusted(keys: Path, mode: int) -> None:
    SigningKey.generate().write(keys / "theirs.key")
    keys.chmod(mode)

    assert len(read_keys([keys])) == 0
    (why,) = untrusted_places([keys])
    assert why.startswith(f"others can write to {keys} (mode {mode:04o}), and could add a key")
    with pytest.raises(ConfigurationError, match="so none is trusted"):
        TrustedKeys.read([keys])


def test_nor_does_this_user_sign_with_one(keys: Path) -> None:
    keys.chmod(0o777)
    with pytest.raises(ConfigurationError, match="`chmod go-w` on it"):
        own_key(keys)


def test_a_public_key_that_others_can_write_is_not_trusted_either(keys: Path) -> None:
    SigningKey.generate().write(keys / "theirs.key")
    (keys / "theirs.pub").chmod(0o666)

    assert len(read_keys([keys])) == len(read_keys([keys / "actions.pub"])) == 1
    assert len(read_keys([keys / "theirs.pub"])) == 0
    assert untrusted_places([keys / "theirs.pub"])


def test_a_folder_of_a_service_s_user_is_trusted(keys: Path) -> None:
    for path in (keys, keys / "actions.pub"):
        give_away(path)
    assert len(read_keys([keys])) == 1
    keys.chmod(0o775)
    assert why_open(keys) is not None


def test_public_keys_are_made_for_this_user_alone_to_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        own_key(tmp_path / "keys")
    finally:
        os.umask(before)
    assert len(read_keys([tmp_path / "keys"])) == 1
