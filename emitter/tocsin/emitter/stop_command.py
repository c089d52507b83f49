"""Whether a stop command is obeyed: decided purely, by the listener and again by each rank."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tocsin.emitter import link
from tocsin.schemas.control import StopRequested
from tocsin.schemas.errors import ConfigurationError, RecordError, SignatureError
from tocsin.schemas.events import EVENT_TYPES
from tocsin.schemas.signing import Signature, TrustedKeys, keys_folder

Why = Literal[
    "bad_signature",
    "untrusted_key",
    "other_run",
    "other_incarnation",
    "expired",
    "replayed",
    "stops_off",
    "malformed",
]
Reason = Literal["obey", "repeated", "already_stopping", "already_ended"] | Why

STOP_KEYS: Final = "TOCSIN_STOP_KEYS"
STOP: Final = "TOCSIN_STOP"

_REMEMBERED: Final = 1_000


@dataclass(frozen=True, slots=True)
class SignedCommand:
    """A command as it was on the bus: the record's key and exact value bytes, and its signature."""

    key: bytes
    value: bytes
    signature: Signature | None

    @property
    def digest(self) -> bytes:
        """Names these bytes."""
        return hashlib.sha256(len(self.key).to_bytes(4, "little") + self.key + self.value).digest()

    def message(self) -> link.Message:
        """As a datagram of kind `stop`."""
        signature = self.signature or Signature("", "")
        return {
            "kind": "stop",
            "key": base64.b64encode(self.key).decode(),
            "value": base64.b64encode(self.value).decode(),
            "key_id": signature.key_id,
            "signature": signature.text,
        }

    @classmethod
    def of(cls, message: link.Message) -> SignedCommand | None:
        """The other way round; None if the datagram holds no command."""
        try:
            key = base64.b64decode(link.text(message, "key"), validate=True)
            value = base64.b64decode(link.text(message, "value"), validate=True)
        except binascii.Error:
            return None
        signature = Signature(link.text(message, "key_id"), link.text(message, "signature"))
        return cls(key, value, signature)


@dataclass(slots=True)
class Memory:
    """What a listener has obeyed and seen; bounded, the oldest nonces are forgotten."""

    nonces: dict[str, bytes] = field(default_factory=dict)
    obeyed: dict[str, str] = field(default_factory=dict)

    def note(self, signed: SignedCommand, command: StopRequested) -> None:
        """A command was verified: its nonce is used up."""
        self.nonces[command.nonce] = signed.digest
        while len(self.nonces) > _REMEMBERED:
            del self.nonces[next(iter(self.nonces))]

    def obey(self, command: StopRequested) -> None:
        """A command takes effect: the one effect of its incarnation."""
        self.obeyed[command.incarnation] = command.command_id


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known where it is decided. `over` says why nothing is left to stop, or is empty."""

    run_id: str
    incarnation: str
    keys: TrustedKeys
    stops_off: bool = False
    over: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a command. `command_id` is as claimed, even where the claim is refused."""

    reason: Reason
    text: str = ""
    command: StopRequested | None = None
    command_id: str = ""

    @property
    def why(self) -> Why | None:
        """The refusal's reason; None unless it is refused."""
        match self.reason:
            case "obey" | "repeated" | "already_stopping" | "already_ended":
                return None
            case why:
                return why


def decide(signed: SignedCommand, facts: Facts, memory: Memory, now_ms: int) -> Verdict:
    """Judge a command. Reads `memory`, never writes it.

    `obey` is given at most once per incarnation; the same bytes again are `repeated`, which is what
    a sender does that died before it knew: they take no effect and are no attack.
    """
    claimed = _command_id(signed.value)
    try:
        facts.keys.verify(signed.key, signed.value, signed.signature)
    except SignatureError as error:
        known = signed.signature is None or facts.keys.trusts(signed.signature.key_id)
        why: Why = "bad_signature" if known else "untrusted_key"
        return Verdict(why, str(error), command_id=claimed)
    try:
        command = EVENT_TYPES.decode(signed.value).data
    except RecordError as error:
        return Verdict("malformed", str(error), command_id=claimed)
    if not isinstance(command, StopRequested):
        text = f"expected {StopRequested.event_type}, found {command.event_type}"
        return Verdict("malformed", text, command_id=claimed)

    def verdict(reason: Reason, text: str = "") -> Verdict:
        return Verdict(reason, text, command, command.command_id)

    if signed.key != command.key.encode():
        return verdict("malformed", "the record's key is not the command's")
    if command.run_id != facts.run_id:
        return verdict("other_run", f"this is run {facts.run_id}")
    seen = memory.nonces.get(command.nonce)
    if seen == signed.digest:
        return verdict("repeated")
    if seen is not None:
        return verdict("replayed", "its nonce was used by another command")
    if command.incarnation != facts.incarnation:
        return verdict("other_incarnation", f"the incarnation is now {facts.incarnation}")
    if now_ms > command.not_after_ms:
        late_s = (now_ms - command.not_after_ms) / 1000
        return verdict("expired", f"read {late_s:.1f} s after it had expired")
    if facts.stops_off:
        return verdict("stops_off", "the run was started with --no-stop")
    if command.incarnation in memory.obeyed:
        return verdict("already_stopping")
    if facts.over:
        return verdict("already_ended", facts.over)
    return verdict("obey")


def trusted_paths(environ: Mapping[str, str], configured: tuple[Path, ...] = ()) -> list[Path]:
    """Files and folders of keys: `TOCSIN_STOP_KEYS`, else the configured, else the user's."""
    listed = environ.get(STOP_KEYS, "")
    if listed:
        return [Path(part) for part in listed.split(os.pathsep) if part]
    return list(configured) or [keys_folder(dict(environ))]


def read_keys(paths: list[Path]) -> TrustedKeys:
    """Read now, for a key may have been added or withdrawn. What cannot be read is not trusted."""
    trusted: list[Path] = []
    for path in paths:
        files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
        for file in files:
            try:
                TrustedKeys.read([file])
            except (ConfigurationError, OSError):
                continue
            trusted.append(file)
    return TrustedKeys.read(trusted)


def _command_id(value: bytes) -> str:
    """What an unverified command calls itself, so that its refusal can be matched."""
    try:
        data = EVENT_TYPES.decode(value).data
    except RecordError:
        return ""
    return data.command_id if isinstance(data, StopRequested) else ""
