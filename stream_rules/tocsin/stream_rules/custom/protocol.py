"""The messages between a worker and its child process for custom rules, over a socket pair.

A message is `u32 length | u8 kind | JSON`, little endian; bytes are in base64. The child answers in
order, and counts what it has done.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict, JsonValue

from tocsin.bus.port import Record
from tocsin.schemas.configuration.problems import Problem
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring, IssueOngoing, IssueResolved, Severity
from tocsin.schemas.records.run_view import RuleStatus
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.stream_rules.engine.episodes import Reported

CUSTOM_KEY: Final = "_custom"
"""The rule part of the key under which a run's own state, as the child has it, is saved."""

_START: Final = struct.Struct("<IB")

_ISSUES: Final[Mapping[str, type[IssueFiring]]] = {
    model.state: model for model in (IssueFiring, IssueOngoing, IssueResolved)
}


class Message(BaseModel):
    """What goes over the socket."""

    model_config = ConfigDict(
        frozen=True,
        hide_input_in_errors=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    )


class DisabledRule(Message):
    """A rule that must not be called again in a run, from a record on.

    `run_id` None: in no run. `offset`: of the record that it was given last; -1: from the next one.
    `no_room`: there is no room for what waits of that run.
    """

    rule: str
    run_id: str | None
    offset: int = -1
    why: str
    no_room: bool = False


class Hello(Message):
    """The first message to a child: what to load, what holds.

    Attributes:
        entries: those of the configuration that name custom rules.
        taken: names that are rules of tocsin's own.
        described: instance → what is known of its rule from an earlier child (see `description`).
        failing: name and severity of the instance of `rule_failed`; None: it is off.
        unloaded: why nothing is to be loaded; the rules then only report that.
    """

    entries: tuple[RuleEntry, ...]
    folder: str
    taken: tuple[str, ...] = ()
    software: str = ""
    failing: tuple[str, Severity | None] | None = None
    memory_bytes: int
    disabled: tuple[DisabledRule, ...] = ()
    described: Mapping[str, JsonValue] = {}
    unloaded: str = ""


class LoadedRules(Message):
    """What came of `Hello`: instance → description, and problems whose places begin with the number
    of the entry."""

    described: Mapping[str, JsonValue]
    problems: tuple[Problem, ...] = ()


class Records(Message):
    """Telemetry, in order per partition."""

    records: tuple[Record, ...]


class Advance(Message):
    """Nothing appended before `as_of_ms` is still to come."""

    partition: int
    as_of_ms: int
    since_ms: int


class Adopt(Message):
    """Go on with a run from its snapshots.

    `begin_now`: rules of which nothing was saved begin where the run's own state stands.
    """

    partition: int
    run_id: str
    snapshots: tuple[Snapshot, ...]
    next_offset: int
    begin_now: bool = False


class Forget(Message):
    """Drop the state of partitions."""

    partitions: tuple[int, ...]


class Drop(Message):
    """Drop a run."""

    partition: int
    run_id: str


class Save(Message):
    """Answer with the states."""


class SavedRun(Message):
    """One run of a save.

    `over`: it has ended, or was lost.
    """

    partition: int
    run_id: str
    incarnation: str
    statuses: Mapping[str, RuleStatus]
    found: int
    over: bool
    failed: tuple[str, ...]
    snapshots: tuple[Snapshot, ...]

    def seen_by_readers(self) -> tuple[object, ...]:
        """What is in the view of the run."""
        return self.incarnation, self.statuses, self.found, self.over


class Saved(Message):
    """All states that had changed; telemetry below `covers` of each partition is in them."""

    covers: Mapping[int, int]
    runs: tuple[SavedRun, ...]
    urgent: bool


class Used(Message):
    """What the calls of a rule in a run have used since the last answer."""

    run_id: str
    rule: str
    seconds: float


class Answer(Message):
    """What was found and saved.

    Attributes:
        done: messages dealt with since the last answer.
        told: state, number and JSON of each issue.
        due_ms: when the next timer is due.
    """

    done: int
    told: tuple[tuple[str, int, str], ...] = ()
    used: tuple[Used, ...] = ()
    due_ms: int | None = None
    saved: Saved | None = None

    def reported(self) -> list[Reported]:
        """The issues."""
        return [
            Reported(_ISSUES[state].model_validate_json(issue), number)
            for state, number, issue in self.told
        ]


class OutOfMemoryNotice(Message):
    """The child ends, as its memory does; the rule of the run that has taken it, if one has."""

    run_id: str | None = None
    rule: str | None = None


_KINDS: Final[tuple[type[Message], ...]] = (
    Hello,
    LoadedRules,
    Records,
    Advance,
    Adopt,
    Forget,
    Drop,
    Save,
    Answer,
    OutOfMemoryNotice,
)


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    body = message.model_dump_json().encode()
    return _START.pack(len(body), _KINDS.index(type(message))) + body


class Unpacker:
    """Messages from a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with these bytes. Raises ValueError: they are none."""
        self._buffer += data
        while len(self._buffer) >= _START.size:
            length, kind = _START.unpack_from(self._buffer)
            if kind >= len(_KINDS):
                raise ValueError(f"no message of the custom rules: kind {kind}")
            end = _START.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_START.size : end])
            del self._buffer[:end]
            yield _KINDS[kind].model_validate_json(body)
