"""The folder of keys: made, listed and rotated.

A private key `NAME.key` signs, and each public key `*.pub` is trusted. A rotation keeps the public
half of the old key as `NAME-KEYID.pub`, so that both are valid until the old one is retired.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.signing import SigningKey, VerifyKey, why_untrusted

KeyRole = Literal["signs", "next", "retiring", "trusted"]
"""`signs`: its private key is here. `next`: it will sign after the rotation. `retiring`: it signed
before the last rotation, and is still valid. `trusted`: its private key is somewhere else."""

OWN_NAME: Final = "actions"
"""The key that signs, unless another is named."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_NEXT: Final = "-next"


@dataclass(frozen=True, slots=True)
class FolderKey:
    """A public key of the folder."""

    name: str
    key_id: str
    role: KeyRole
    path: Path


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which key signed before a rotation, and which one since."""

    old_id: str
    new_id: str
    old_public: Path


def keys_folder(environ: Mapping[str, str]) -> Path:
    """`${XDG_CONFIG_HOME:-~/.config}/tocsin/keys`."""
    base = environ.get("XDG_CONFIG_HOME") or str(
        Path(environ.get("HOME", "~")).expanduser() / ".config"
    )
    return Path(base) / "tocsin" / "keys"


def own_key(folder: Path, name: str = OWN_NAME) -> SigningKey:
    """This machine's signing key, made if there is none.

    Processes that make it at the same time end with the same one.

    Raises:
        ConfigurationError: the key cannot be read or written, or others can write to the folder.
    """
    path = folder / f"{name}.key"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make(path)
        if (why := why_untrusted(folder)) is not None:
            raise ConfigurationError(why)
        key = SigningKey.read(path)
        if not path.with_suffix(".pub").exists():
            # The maker died between the two files; the public half follows from the private one.
            _publish(key.public, path.with_suffix(".pub"))
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: cannot make a key for signing stops ({error})"
        ) from error
    return key


def list_keys(folder: Path) -> list[FolderKey]:
    """The keys that are trusted because they are in the folder, by name. Empty without a folder.

    Raises:
        ConfigurationError: a file cannot be read, is not a public key, or others can write to it.
    """
    if (why := why_untrusted(folder)) is not None:
        raise ConfigurationError(why)
    found: list[FolderKey] = []
    for path in sorted(folder.glob("[!.]*.pub"), key=lambda path: path.stem):
        key_id = VerifyKey.read(path).key_id
        found.append(FolderKey(path.stem, key_id, _role(path, key_id), path))
    return found


def new_key(folder: Path, name: str = OWN_NAME) -> SigningKey:
    """Make a key that signs under a new name.

    Raises:
        ConfigurationError: the name is taken or not a name, or the folder cannot be written to.
    """
    _check_name(name)
    return _made_anew(folder, name, "choose another name, or replace it: `tocsin keys rotate`")


def prepare_key(folder: Path, name: str = OWN_NAME) -> SigningKey:
    """Make the key to which the next rotation changes: trainings can trust it before it signs.

    Raises:
        ConfigurationError: one is prepared, or the folder cannot be written to.
    """
    _check_name(name)
    _private_of(folder, name)
    advice = f"`tocsin keys rotate {name}` changes to it"
    return _made_anew(folder, name + _NEXT, advice)


def rotate_key(folder: Path, name: str = OWN_NAME) -> Rotation:
    """Change to the prepared key, or to one made now. The old one stays trusted.

    At each moment the key that signs is trusted: the process can be killed at any line, and
    a second rotation then completes the change.

    Raises:
        ConfigurationError: there is no key of that name, or the folder cannot be written to.
    """
    _check_name(name)
    path = _private_of(folder, name)
    prepared = folder / f"{name}{_NEXT}.key"
    with _alone_in(folder):
        old = SigningKey.read(path).public
        old_public = folder / f"{name}-{old.key_id}.pub"
        if not old_public.exists():
            _publish(old, old_public)
        source = prepared
        if not prepared.exists():
            source = _draft(path)
            SigningKey.generate().write(source)
        new = SigningKey.read(source).public
        _publish(new, path.with_suffix(".pub"))
        os.replace(source, path)
        for public in (source.with_suffix(".pub"), prepared.with_suffix(".pub")):
            public.unlink(missing_ok=True)
    return Rotation(old.key_id, new.key_id, old_public)


def retire_key(folder: Path, key_id: str) -> FolderKey:
    """Trust a key no longer: its public half leaves the folder. Returns what it was.

    Args:
        key_id: the id, or its first digits, at least four.

    Raises:
        ConfigurationError: no key or several have that id, or it is the one that signs.
    """
    keys = list_keys(folder)
    found = [key for key in keys if len(key_id) >= 4 and key.key_id.startswith(key_id.lower())]
    if len({key.key_id for key in found}) != 1:
        ids = ", ".join(f"{key.key_id} ({key.name})" for key in keys) or "no key"
        raise ConfigurationError(f"{folder}: expected the id of one key; the folder has {ids}")
    for key in found:
        if key.role == "signs":
            raise ConfigurationError(
                f"{key.path}: this key signs; replace it first: `tocsin keys rotate {key.name}`"
            )
    with _alone_in(folder):
        for key in found:
            key.path.with_suffix(".key").unlink(missing_ok=True)
            key.path.unlink(missing_ok=True)
    return found[0]


def _role(path: Path, key_id: str) -> KeyRole:
    if path.with_suffix(".key").exists():
        return "next" if path.stem.endswith(_NEXT) else "signs"
    name, _, suffix = path.stem.rpartition("-")
    if suffix == key_id and (path.parent / f"{name}.key").exists():
        return "retiring"
    return "trusted"


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None or name.endswith(_NEXT):
        raise ConfigurationError(
            f"{name!r} is not a name for a key: expected at most 64 lower-case letters, digits, "
            f"'_', '-' and '.', and not {_NEXT!r} at the end"
        )


def _private_of(folder: Path, name: str) -> Path:
    path = folder / f"{name}.key"
    if not path.exists():
        raise ConfigurationError(f"{path}: no such key; `tocsin keys new {name}` makes one")
    return path


def _made_anew(folder: Path, name: str, advice: str) -> SigningKey:
    path = folder / f"{name}.key"
    with _alone_in(folder):
        if path.exists() or path.with_suffix(".pub").exists():
            raise ConfigurationError(f"{path}: this key exists; {advice}")
        return own_key(folder, name)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Blocks while another process changes keys."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (why := why_untrusted(folder)) is not None:
            raise ConfigurationError(why)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigurationError(f"{folder}: the keys cannot be changed ({error})") from error


def _make(path: Path) -> None:
    made = SigningKey.generate()
    draft = _draft(path)
    made.write(draft)
    try:
        # link() is the atomic "create if absent"; the loser of a race reads the winner's key.
        with suppress(FileExistsError):
            os.link(draft, path)
            _publish(made.public, path.with_suffix(".pub"))
    finally:
        draft.unlink(missing_ok=True)
        draft.with_suffix(".pub").unlink(missing_ok=True)


def _publish(key: VerifyKey, path: Path) -> None:
    # Whole or not at all, since a trainer may read the folder at any moment.
    draft = _draft(path)
    key.write(draft)
    os.replace(draft, path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
