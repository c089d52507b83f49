"""Whether a stop command is obeyed: decided purely, by the listener and again by each rank."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from tocsin.emitter.stop import datagrams
from tocsin.schemas.errors import ConfigurationError, RecordError, SignatureError
from tocsin.schemas.key_folder import keys_folder
from tocsin.schemas.records.events import EVENT_TYPES, clip
from tocsin.schemas.records.stops.commands import StopExpired, StopRefused, StopRequested
from tocsin.schemas.signing import Signature, TrustedKeys, why_untrusted

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

NO_STOP: Final = "the run was started with --no-stop"

SKEW_MS: Final = 86_400_000
"""So far the clocks of sender and reader may be apart where it is known how long a command lay."""

UNKNOWN_MS: Final = 2**62
"""As `waited_ms`: it is not known; clocks alone decide."""

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

    def message(self) -> datagrams.Message:
        """The command as a datagram of kind `stop`."""
        signature = self.signature or Signature("", "")
        return {
            "kind": "stop",
            "key": base64.b64encode(self.key).decode(),
            "value": base64.b64encode(self.value).decode(),
            "key_id": signature.key_id,
            "signature": signature.text,
        }

    @classmethod
    def from_message(cls, message: datagrams.Message) -> SignedCommand | None:
        """Read a command from a datagram; None if it has none."""
        try:
            key = base64.b64decode(datagrams.text(message, "key"), validate=True)
            value = base64.b64decode(datagrams.text(message, "value"), validate=True)
        except ValueError:  # text that is not ASCII among them
            return None
        signature = Signature(
            datagrams.text(message, "key_id"), datagrams.text(message, "signature")
        )
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
    """What is known where it is decided. `stops_off` is why nothing is stopped, and `over` why
    nothing is left to stop; each is empty otherwise."""

    run_id: str
    incarnation: str
    keys: TrustedKeys
    stops_off: str = ""
    over: str = ""


@dataclass(frozen=True, slots=True)
class CommandVerdict:
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


def decide(
    signed: SignedCommand, facts: Facts, memory: Memory, now_ms: int, *, waited_ms: int = 0
) -> CommandVerdict:
    """Judge a command. Reads `memory`, never writes it.

    `obey` is given at most once per incarnation; the same bytes again are `repeated`, which is what
    a sender does that died before it knew: they take no effect and are no attack.

    `waited_ms` is how long at most it lay on the bus unread. That, not the clocks of two machines,
    decides whether it came in time: a command is worth something once, to one incarnation, so a
    clock that is wrong by up to `SKEW_MS` can do no harm.
    """
    claimed = _command_id(signed.value)
    try:
        facts.keys.verify(signed.key, signed.value, signed.signature)
    except SignatureError as error:
        known = signed.signature is None or facts.keys.trusts(signed.signature.key_id)
        why: Why = "bad_signature" if known else "untrusted_key"
        return CommandVerdict(why, str(error), command_id=claimed)
    try:
        command = EVENT_TYPES.decode(signed.value).data
    except RecordError as error:
        return CommandVerdict("malformed", str(error), command_id=claimed)
    if not isinstance(command, StopRequested):
        text = f"expected {StopRequested.event_type}, found {command.event_type}"
        return CommandVerdict("malformed", text, command_id=claimed)

    def verdict(reason: Reason, text: str = "") -> CommandVerdict:
        return CommandVerdict(reason, text, command, command.command_id)

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
    if (expired := _expired(command, now_ms, waited_ms)) is not None:
        return verdict("expired", expired)
    if facts.stops_off:
        return verdict("stops_off", facts.stops_off)
    if command.incarnation in memory.obeyed:
        return verdict("already_stopping")
    if facts.over:
        return verdict("already_ended", facts.over)
    return verdict("obey")


def refusal(verdict: CommandVerdict, who: Mapping[str, object]) -> StopRefused | StopExpired:
    """What a listener answers to a command that it does not obey; `who` are the answer's fields
    that name who answers.
    """
    command = verdict.command
    answer = {
        **who,
        "command_id": verdict.command_id,
        "issue_id": None if command is None else command.issue_id,
        "reason": clip(verdict.text, 500),
    }
    if verdict.why == "expired" and command is not None:
        return StopExpired.model_validate({**answer, "not_after_ms": command.not_after_ms})
    return StopRefused.model_validate({**answer, "why": verdict.why})


def _expired(command: StopRequested, now_ms: int, waited_ms: int) -> str | None:
    """Why a command is not valid any more; None if it still is."""
    late_ms = now_ms - command.not_after_ms
    in_time = waited_ms <= max(0, command.not_after_ms - command.requested_ms)
    if late_ms <= 0 or (in_time and late_ms <= SKEW_MS):
        return None
    return (
        f"read {late_ms / 1000:,.1f} s after it had expired: the clock here says "
        f"{_utc(now_ms)}, and it was valid until {_utc(command.not_after_ms)} by the sender's "
        "clock; if it was sent just now, one of the two clocks is wrong"
    )


def _utc(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"


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
        try:
            files = sorted(path.glob("*.pub")) if path.is_dir() else [path]
        except OSError:
            continue
        if why_untrusted(path) is not None:
            continue
        for file in files:
            try:
                TrustedKeys.read([file])
            except (ConfigurationError, OSError):
                continue
            trusted.append(file)
    return TrustedKeys.read(trusted)


def untrusted_places(paths: list[Path]) -> list[str]:
    """The sentences about those of the files and folders to which others can write."""
    return [why for path in paths if (why := why_untrusted(path)) is not None]


def _command_id(value: bytes) -> str:
    """What an unverified command calls itself, so that its refusal can be matched."""
    try:
        data = EVENT_TYPES.decode(value).data
    except RecordError:
        return ""
    return data.command_id if isinstance(data, StopRequested) else ""
