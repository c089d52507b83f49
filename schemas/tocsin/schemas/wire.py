"""From values to bus records and back: headers, and which reader reads what.

Headers (UTF-8): `tocsin-type`, `tocsin-version`, `tocsin-rank`, `tocsin-boot`, `tocsin-seq`;
commands add `tocsin-key-id` and `tocsin-signature`; dead letters have their own. Filtering and
de-duplication need no decoding of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import tocsin.schemas.control
import tocsin.schemas.deliveries
import tocsin.schemas.issues
import tocsin.schemas.runs  # noqa: F401  (importing these registers their event types)
from tocsin.schemas.errors import MalformedRecord, UnknownRecord
from tocsin.schemas.events import EVENT_TYPES, Data, Event
from tocsin.schemas.signing import Signature
from tocsin.schemas.state import Snapshot
from tocsin.schemas.telemetry import Frame, StepFrame, SystemFrame, TensorFrame

TYPE: Final = "tocsin-type"
VERSION: Final = "tocsin-version"
RANK: Final = "tocsin-rank"
BOOT: Final = "tocsin-boot"
SEQ: Final = "tocsin-seq"
KEY_ID: Final = "tocsin-key-id"
SIGNATURE: Final = "tocsin-signature"

Headers = tuple[tuple[str, bytes], ...]

_FRAMES: Final[dict[str, type[TensorFrame] | type[StepFrame] | type[SystemFrame]]] = {
    TensorFrame.type: TensorFrame,
    StepFrame.type: StepFrame,
    SystemFrame.type: SystemFrame,
}


class Encodable(Protocol):
    """Something with a wire form."""

    def encode(self) -> bytes:
        """The value of the bus record."""
        ...


@dataclass(frozen=True, slots=True)
class Meta:
    """What the headers of a record say. `boot` is a uuid per sending process, `seq` its counter."""

    type: str
    version: int = 1
    rank: int = 0
    boot: str = ""
    seq: int = 0

    def headers(self) -> Headers:
        """As bus headers."""
        return (
            (TYPE, self.type.encode()),
            (VERSION, b"%d" % self.version),
            (RANK, b"%d" % self.rank),
            (BOOT, self.boot.encode()),
            (SEQ, b"%d" % self.seq),
        )


def meta_of(
    value: Frame | Event[Data] | Snapshot, *, rank: int = 0, boot: str = "", seq: int = 0
) -> Meta:
    """The headers' values for a record that carries `value`."""
    if isinstance(value, Event):
        return Meta(value.type, value.data.version, rank, boot, seq)
    return Meta(value.type, value.version, rank, boot, seq)


def read_meta(headers: Sequence[tuple[str, bytes]]) -> Meta:
    """Raises MalformedRecord: a header is missing or not what it should be."""
    found = dict(headers)
    try:
        return Meta(
            type=found[TYPE].decode(),
            version=_number(found[VERSION]),
            rank=_number(found.get(RANK, b"0")),
            boot=found.get(BOOT, b"").decode(),
            seq=_number(found.get(SEQ, b"0")),
        )
    except KeyError as error:
        raise MalformedRecord(f"record has no header {error.args[0]!r}") from error
    except ValueError as error:
        raise MalformedRecord(f"record header: {error}") from error


def read_signature(headers: Sequence[tuple[str, bytes]]) -> Signature | None:
    """The signature of a command; None if it has none that could be one."""
    found = dict(headers)
    try:
        return Signature(found[KEY_ID].decode("ascii"), found[SIGNATURE].decode("ascii"))
    except (KeyError, UnicodeDecodeError):
        return None


def signature_headers(signature: Signature) -> Headers:
    """The other way round."""
    return ((KEY_ID, signature.key_id.encode()), (SIGNATURE, signature.text.encode()))


def decode(meta: Meta, value: bytes) -> Frame | Event[Data] | Snapshot:
    """Read a record of any topic by its type.

    Raises:
        UnknownRecord: a type or major version that this release does not read.
        MalformedRecord: the value is not what the type says.
    """
    if meta.version != 1:
        raise UnknownRecord(
            f"record type {meta.type!r} version {meta.version}: this release reads version 1"
        )
    if meta.type in _FRAMES:
        return _FRAMES[meta.type].decode(value)
    if meta.type == Snapshot.type:
        return Snapshot.decode(value)
    event = EVENT_TYPES.decode(value)
    if event.type != meta.type:
        raise MalformedRecord(f"header says {meta.type!r}, the event {event.type!r}")
    return event


def _number(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 19:
        raise ValueError(f"expected digits, found {raw[:32]!r}")
    return int(raw)
