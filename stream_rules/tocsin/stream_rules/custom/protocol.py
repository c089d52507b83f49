"""What a worker and its child process for custom rules say to each other, over a socket pair.

A message is `u32 length | u8 kind | u32 length of the head | head (JSON) | blobs`, each blob with a
`u32` length before it; little endian. The child answers in order, and counts what it has done.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, JsonValue

from tocsin.bus.port import Partition, Record
from tocsin.schemas.configuration.problems import Finding
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring, IssueOngoing, IssueResolved, Severity
from tocsin.schemas.records.runs import RuleStatus
from tocsin.stream_rules.engine.episodes import Reported

CUSTOM_KEY: Final = "_custom"
"""The rule part of the key under which a run's own state, as the child has it, is saved."""

_LENGTH: Final = struct.Struct("<I")
_START: Final = struct.Struct("<BI")

_ISSUES: Final[Mapping[str, type[IssueFiring]]] = {
    model.state: model for model in (IssueFiring, IssueOngoing, IssueResolved)
}


class Head(BaseModel):
    """The JSON part of a message."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)


class Verdict(Head):
    """A rule that must not be called again in a run, from a record on.

    `run_id` None: in no run. `offset`: of the record that it was given last; -1: from the next one.
    `crowded`: there is no room for what waits of that run.
    """

    rule: str
    run_id: str | None
    partition: int = 0
    offset: int = -1
    why: str
    crowded: bool = False


class Failing(Head):
    """The instance of `rule_failed` that says so."""

    name: str
    severity: Severity | None = None


class Hello(Head):
    """The first message to a child: what to load, what holds.

    Attributes:
        entries: those of the configuration that name custom rules.
        taken: names that are rules of tocsin's own.
        described: instance → what is known of its rule from an earlier child (see `description`).
        unloaded: why nothing is to be loaded; the rules then only say so.
    """

    entries: tuple[RuleEntry, ...]
    folder: str
    taken: tuple[str, ...] = ()
    software: str = ""
    failing: Failing | None = None
    memory_bytes: int
    verdicts: tuple[Verdict, ...] = ()
    described: Mapping[str, JsonValue] = {}
    unloaded: str = ""


class Loaded(Head):
    """What came of `Hello`: instance → description, and findings whose places begin with the number
    of the entry."""

    described: Mapping[str, JsonValue]
    findings: tuple[Finding, ...] = ()


class Records(Head):
    """Telemetry; blobs: key and value of each."""

    records: tuple[tuple[str, int, int, int, bool, tuple[tuple[str, str], ...]], ...]


class Advance(Head):
    """Nothing appended before `as_of_ms` is still to come."""

    partition: int
    as_of_ms: int
    since_ms: int


class Adopt(Head):
    """Go on with a run from its snapshots (the blobs).

    `begin_now`: rules of which nothing was saved begin where the run's own state stands.
    """

    partition: int
    run_id: str
    next_offset: int
    begin_now: bool = False


class Forget(Head):
    """Drop the state of partitions."""

    partitions: tuple[int, ...]


class Drop(Head):
    """Drop a run."""

    partition: int
    run_id: str


class Save(Head):
    """Answer with the states."""


class SavedRun(Head):
    """One run of a save; `snapshots` of its blobs follow one another.

    `over`: it has ended, or was lost.
    """

    partition: int
    run_id: str
    incarnation: str
    statuses: Mapping[str, RuleStatus]
    found: int
    over: bool
    failed: tuple[str, ...]
    snapshots: int


class Saved(Head):
    """All states that had changed; telemetry below `covers` of each partition is in them."""

    covers: Mapping[int, int]
    runs: tuple[SavedRun, ...]
    urgent: bool


class Used(Head):
    """What the calls of a rule in a run have used since the last answer."""

    run_id: str
    rule: str
    seconds: float


class Answer(Head):
    """What was found and saved; blobs: the issues, then the snapshots.

    Attributes:
        done: messages dealt with since the last answer.
        told: state and number of each issue.
        due_ms: when the next timer is due.
    """

    done: int
    told: tuple[tuple[str, int], ...] = ()
    used: tuple[Used, ...] = ()
    due_ms: int | None = None
    saved: Saved | None = None


class Farewell(Head):
    """The child ends, as its memory does; the rule of the run that has taken it, if one has."""

    run_id: str | None = None
    rule: str | None = None


_HEADS: Final[tuple[type[Head], ...]] = (
    Hello,
    Loaded,
    Records,
    Advance,
    Adopt,
    Forget,
    Drop,
    Save,
    Answer,
    Farewell,
)


@dataclass(frozen=True, slots=True)
class Message:
    """A head with its blobs."""

    head: Head
    blobs: Sequence[bytes] = ()


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    head = message.head.model_dump_json().encode()
    parts = [_START.pack(_HEADS.index(type(message.head)), len(head)), head]
    for blob in message.blobs:
        parts += [_LENGTH.pack(len(blob)), blob]
    body = b"".join(parts)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages from a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with these bytes. Raises ValueError: they are none."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _unpack(body)


def _unpack(body: bytes) -> Message:
    try:
        kind, size = _START.unpack_from(body)
        at = _START.size + size
        head = _HEADS[kind].model_validate_json(body[_START.size : at])
        blobs = []
        while at < len(body):
            (length,) = _LENGTH.unpack_from(body, at)
            at += _LENGTH.size
            blobs.append(body[at : at + length])
            at += length
    except (struct.error, IndexError) as error:
        raise ValueError(f"no message of the custom rules: {error}") from error
    return Message(head, blobs)


def pack_records(records: Iterable[Record]) -> Message:
    """Records as a message."""
    heads = []
    blobs = []
    for r in records:
        headers = tuple((name, value.decode("latin-1")) for name, value in r.headers)
        place = r.partition
        heads.append(
            (place.topic, place.number, r.offset, r.append_ms, r.value is not None, headers)
        )
        blobs += [r.key, r.value or b""]
    return Message(Records(records=tuple(heads)), blobs)


def records_of(message: Message) -> Iterator[Record]:
    """Read records from a message."""
    assert isinstance(message.head, Records)
    for i, (topic, number, offset, append_ms, whole, headers) in enumerate(message.head.records):
        yield Record(
            Partition(topic, number),
            offset,
            append_ms,
            message.blobs[2 * i],
            message.blobs[2 * i + 1] if whole else None,
            tuple((name, value.encode("latin-1")) for name, value in headers),
        )


def told_of(message: Message) -> list[Reported]:
    """The issues of an answer."""
    assert isinstance(message.head, Answer)
    return [
        Reported(_ISSUES[state].model_validate_json(blob), number)
        for (state, number), blob in zip(message.head.told, message.blobs, strict=False)
    ]
