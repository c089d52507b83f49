"""A command is obeyed if a trusted key signed exactly these bytes under exactly this key."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tocsin.schemas.errors import ConfigurationError, SignatureError
from tocsin.schemas.records.wire import read_signature, signature_headers
from tocsin.schemas.signing import (
    Signature,
    SigningKey,
    TrustedKeys,
    VerifyKey,
)

KEY, VALUE = b"gpt-1/i-1/stop", b'{"reason":"NaN"}'


@pytest.fixture
def key() -> SigningKey:
    return SigningKey.generate()


def test_a_signature_holds(key: SigningKey) -> None:
    signature = key.sign(KEY, VALUE)

    TrustedKeys([key.public]).verify(KEY, VALUE, signature)


def flipped(text: str) -> str:
    raw = bytearray(base64.b64decode(text))
    raw[10] ^= 1
    return base64.b64encode(raw).decode()


def test_a_tampered_command_is_refused(key: SigningKey) -> None:
    good = key.sign(KEY, VALUE)
    trusted = TrustedKeys([key.public])

    for record_key, value, signature in [
        (KEY, VALUE + b" ", good),
        (KEY, b"", good),
        (b"gpt-2/i-1/stop", VALUE, good),
        # The border between key and value is signed too.
        (KEY + VALUE[:1], VALUE[1:], good),
        (KEY, VALUE, Signature(good.key_id, flipped(good.text))),
        (KEY, VALUE, Signature(good.key_id, good.text[:-4])),
        (KEY, VALUE, Signature(good.key_id, "not base64 é")),
        (KEY, VALUE, Signature(good.key_id, "")),
    ]:
        with pytest.raises(SignatureError, match="not signed by key"):
            trusted.verify(record_key, value, signature)


def test_no_key_but_the_trusted_ones(key: SigningKey) -> None:
    trusted, other = TrustedKeys([key.public]), SigningKey.generate()

    with pytest.raises(SignatureError, match=f"{other.public.key_id} is not trusted"):
        trusted.verify(KEY, VALUE, other.sign(KEY, VALUE))
    with pytest.raises(SignatureError, match="not signed by key"):
        # The other key's signature under the trusted one's name.
        trusted.verify(KEY, VALUE, Signature(key.public.key_id, other.sign(KEY, VALUE).text))
    with pytest.raises(SignatureError, match="not signed"):
        trusted.verify(KEY, VALUE, None)
    with pytest.raises(SignatureError, match="not trusted"):
        TrustedKeys([]).verify(KEY, VALUE, key.sign(KEY, VALUE))


def test_the_headers_carry_it(key: SigningKey) -> None:
    signature = key.sign(KEY, VALUE)
    headers = (("tocsin-type", b"x"), *signature_headers(signature))

    assert read_signature(headers) == signature
    assert read_signature(headers[:2]) is None
    for bad in (b"\xff" * 16, b"\x1b[31m" + b"0" * 11, b"0" * 17, b""):
        assert read_signature((("tocsin-key-id", bad), headers[2])) is None


def test_the_pair_of_files(key: SigningKey, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "ana.key"

    key.write(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert SigningKey.read(path).public.key_id == key.public.key_id
    assert VerifyKey.read(path.with_suffix(".pub")).key_id == key.public.key_id
    with pytest.raises(FileExistsError):
        SigningKey.generate().write(path)
    assert SigningKey.read(path).public.key_id == key.public.key_id


def test_files_that_are_no_keys(key: SigningKey, tmp_path: Path) -> None:
    folder, text, rsa_key, rsa_public = (tmp_path / n for n in ("a.pub", "b", "c", "d.pub"))
    folder.mkdir()
    text.write_text("hello")
    other = rsa.generate_private_key(65537, 2048)
    rsa_key.write_bytes(
        other.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    rsa_public.write_bytes(
        other.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )

    for path in (folder, text, tmp_path / "absent"):
        with pytest.raises(ConfigurationError, match="not a readable private key"):
            SigningKey.read(path)
        with pytest.raises(ConfigurationError, match="not a readable public key"):
            VerifyKey.read(path)
    with pytest.raises(ConfigurationError, match="expected an Ed25519 private key"):
        SigningKey.read(rsa_key)
    with pytest.raises(ConfigurationError, match="expected an Ed25519 public key"):
        VerifyKey.read(rsa_public)
    with pytest.raises(ConfigurationError, match="not a readable public key"):
        TrustedKeys.read([tmp_path])


def test_a_folder_of_trusted_keys(tmp_path: Path) -> None:
    keys = [SigningKey.generate() for _ in range(3)]
    folder, single = tmp_path / "trusted", tmp_path / "other" / "c.key"
    keys[0].write(folder / "a.key")
    keys[1].write(folder / "b.key")
    keys[2].write(single)
    # What `own_key` of another process has half written, and what is no key at all.
    (folder / ".actions-0123456789abcdef.pub").write_text("")
    (folder / "README").write_text("the keys of the team")

    trusted = TrustedKeys.read([folder, single.with_suffix(".pub"), tmp_path / "absent"])

    assert len(trusted) == 3
    for key in keys:
        trusted.verify(KEY, VALUE, key.sign(KEY, VALUE))


def test_an_unreadable_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)

    with pytest.raises(ConfigurationError, match="cannot be read"):
        TrustedKeys.read([tmp_path])
