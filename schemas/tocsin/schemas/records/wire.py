"""From values to bus records and back: headers, and which reader reads what.

Headers (UTF-8): `tocsin-type`, `tocsin-version`, `tocsin-rank`, `tocsin-boot`, `tocsin-seq`;
commands add `tocsin-key-id` and `tocsin-signature`; dead letters have their own. Filtering and
de-duplication need no decoding of the value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tocsin.schemas.errors import MalformedRecord, RecordError, UnknownRecord
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.fields import MAX_INT
from tocsin.schemas.records.frames import Frame, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.signing import Signature

TYPE: Final = "tocsin-type"
VERSION: Final = "tocsin-version"
RANK: Final = "tocsin-rank"
BOOT: Final = "tocsin-boot"
SEQ: Final = "tocsin-seq"
KEY_ID: Final = "tocsin-key-id"
SIGNATURE: Final = "tocsin-signature"

_KEY_ID: Final = re.compile(rb"[0-9a-f]{16}")
_SIGNATURE: Final = re.compile(rb"[A-Za-z0-9+/]{86}==")

Headers = tuple[tuple[str, bytes], ...]

_FRAMES: Final[dict[str, type[TensorFrame] | type[StepFrame] | type[SystemFrame]]] = {
    TensorFrame.type: TensorFrame,
    StepFrame.type: StepFrame,
    SystemFrame.type: SystemFrame,
}


class ReceivedRecord(Protocol):
    """A record as a bus gives it to its readers: `tocsin.bus.port.Record`."""

    @property
    def offset(self) -> int: ...
    @property
    def append_ms(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


@dataclass(frozen=True, slots=True)
class Meta:
    """The headers of a record. `boot` is a uuid per sending process, `seq` its counter."""

    type: str
    version: int = 1
    rank: int = 0
    boot: str = ""
    seq: int = 0

    def headers(self) -> Headers:
        """The metadata as bus headers."""
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
    found = _first(headers)
    try:
        return Meta(
            type=_name(found[TYPE]),
            version=read_number(found[VERSION]),
            rank=read_number(found.get(RANK, b"0")),
            boot=_name(found.get(BOOT, b"")),
            seq=read_number(found.get(SEQ, b"0")),
        )
    except KeyError as error:
        raise MalformedRecord(f"record has no header {error.args[0]!r}") from error


def read_signature(headers: Sequence[tuple[str, bytes]]) -> Signature | None:
    """The signature of a command; None if it has none that could be one."""
    found = _first(headers)
    key_id, text = found.get(KEY_ID, b""), found.get(SIGNATURE, b"")
    # Checked here, since both are shown to people when a command is refused.
    if not _KEY_ID.fullmatch(key_id) or not _SIGNATURE.fullmatch(text):
        return None
    return Signature(key_id.decode(), text.decode())


def signature_headers(signature: Signature) -> Headers:
    """The headers of a signature, from its parts."""
    return ((KEY_ID, signature.key_id.encode()), (SIGNATURE, signature.text.encode()))


def decode(meta: Meta, value: bytes) -> Frame | Event[Data] | Snapshot:
    """Read a record of any topic by its type.

    Raises:
        UnknownRecord: a type or major version that this release does not read.
        MalformedRecord: the value is not of the type.
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


def read_event(record: ReceivedRecord) -> Event[Data] | None:
    """The event in a record of any topic; None for a tombstone, and for what is not an event:
    numbers, which are most of telemetry and are not decoded, and snapshots.

    Raises:
        RecordError: as `decode` does, or a header is missing or wrong.
    """
    if record.value is None:
        return None
    meta = read_meta(record.headers)
    if meta.type in _FRAMES or meta.type == Snapshot.type:
        return None
    event = decode(meta, record.value)
    return event if isinstance(event, Event) else None


def event_data(record: ReceivedRecord) -> Data | None:
    """The data of a record's event, without the envelope; None, too, for a record that this release
    cannot read."""
    try:
        event = read_event(record)
    except RecordError:
        return None
    return None if event is None else event.data


def read_number(raw: bytes) -> int:
    """A whole number of a header.

    Raises:
        MalformedRecord: it is not decimal digits, or does not fit an int64.
    """
    if not raw.isdigit() or len(raw) > 19 or int(raw) > MAX_INT:
        raise MalformedRecord(f"record header: expected a whole number, found {raw[:32]!r}")
    return int(raw)


def _name(raw: bytes) -> str:
    if len(raw) > 100:
        raise MalformedRecord(f"record header of {len(raw):,} bytes: expected at most 100")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise MalformedRecord(f"record header {raw[:32]!r}: expected UTF-8") from error


def _first(headers: Sequence[tuple[str, bytes]]) -> dict[str, bytes]:
    # As `Record.header` of the bus port: of two with one name, the first counts.
    return dict(reversed(headers))
