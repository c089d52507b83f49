"""Ed25519 signatures over commands.

The signature covers the record's key and its exact value bytes, under a fixed context, so that a
command cannot be moved to another key or read as anything else. Public keys are stored as PEM;
`key_id` is the first 16 hex digits of the SHA-256 of the raw public key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tocsin.schemas.errors import ConfigurationError, SignatureError
from tocsin.schemas.process.private_folders import why_open

_CONTEXT: Final = b"tocsin-command-v1\0"


@dataclass(frozen=True, slots=True)
class Signature:
    """What travels beside a command: in the headers `tocsin-key-id` and `tocsin-signature`."""

    key_id: str
    text: str


class SigningKey:
    """A private key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: Final = VerifyKey(private.public_key())

    @classmethod
    def generate(cls) -> Self:
        """A fresh one, from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigurationError: no readable Ed25519 private key there."""
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(f"{path}: not a readable private key ({error})") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError(f"{path}: expected an Ed25519 private key")
        return cls(key)

    def write(self, path: Path) -> None:
        """Write `path` (0600) and its public half beside it (`.pub`); never overwrite.

        Raises:
            FileExistsError: there is one.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        pem = self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        # The public half first: a private key that is seen has its public one beside it.
        self.public.write(path.with_suffix(".pub"))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)

    def sign(self, key: bytes, value: bytes) -> Signature:
        """Sign a record's key and value."""
        signature = self._private.sign(_message(key, value))
        return Signature(self.public.key_id, base64.b64encode(signature).decode())


class VerifyKey:
    """A public key."""

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.key_id: Final = hashlib.sha256(raw).hexdigest()[:16]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigurationError: no readable Ed25519 public key there, or one that others can
        write.
        """
        try:
            key = serialization.load_pem_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(f"{path}: not a readable public key ({error})") from error
        if (why := why_untrusted(path)) is not None:
            raise ConfigurationError(why)
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigurationError(f"{path}: expected an Ed25519 public key")
        return cls(key)

    def write(self, path: Path) -> None:
        """Write the PEM; raises FileExistsError if there is a file."""
        pem = self._public.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        # Whatever the umask: what others can write is not trusted.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(pem)

    def verify(self, key: bytes, value: bytes, signature: Signature) -> None:
        """Raises SignatureError."""
        try:
            raw = base64.b64decode(signature.text, validate=True)
            self._public.verify(raw, _message(key, value))
        except (binascii.Error, ValueError, InvalidSignature) as error:
            raise SignatureError(f"not signed by key {self.key_id} over these bytes") from error


class TrustedKeys:
    """The public keys whose commands are obeyed."""

    def __init__(self, keys: Iterable[VerifyKey]) -> None:
        self._keys = {key.key_id: key for key in keys}

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """Read files, and all `*.pub` of folders. A path that is not there holds no key.

        Raises:
            ConfigurationError: a file there is not a public key, cannot be read, or can be written
                by others.
        """
        return cls(VerifyKey.read(file) for path in paths for file in _key_files(path))

    def __len__(self) -> int:
        return len(self._keys)

    def trusts(self, key_id: str) -> bool:
        """Whether a key of that id is among them."""
        return key_id in self._keys

    def verify(self, key: bytes, value: bytes, signature: Signature | None) -> None:
        """Raises SignatureError: unsigned, by an untrusted key, or not over these bytes."""
        if signature is None:
            raise SignatureError("the command is not signed")
        trusted = self._keys.get(signature.key_id)
        if trusted is None:
            raise SignatureError(f"key {signature.key_id} is not trusted here")
        trusted.verify(key, value, signature)


def _key_files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path] if path.exists() else []
        # Hidden ones are drafts of `own_key` in another process.
        names = (name for name in os.listdir(path) if not name.startswith("."))
        files = [path / name for name in sorted(names) if name.endswith(".pub")]
        if files and (why := why_untrusted(path)) is not None:
            raise ConfigurationError(why)
        return files
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from error


def why_untrusted(path: Path) -> str | None:
    """Why no key there is trusted, in a sentence: others can write to the folder, or the file.

    None: they cannot, or there is nothing.
    """
    why = why_open(path)
    if why is None:
        return None
    return f"{why}, and could add a key there, so none is trusted: run `chmod go-w` on it"


def _message(key: bytes, value: bytes) -> bytes:
    return _CONTEXT + len(key).to_bytes(4, "little") + key + value
