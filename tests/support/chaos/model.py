"""What must be on the bus, from the telemetry that is there: a small model with nothing of tocsin
in it but how a record is decoded.

The model reads the telemetry in the order of its offsets. Of each sender it takes a number once and
never an older one; a training that is over says nothing any more.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tocsin.bus.port import Headers, Partition, Record
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import StepFrame
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import RunData
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.stops.commands import StopRequested
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics

NAMESPACE = uuid.UUID("5f0c1a52-6f0e-5d6c-9f0b-7e1d2c3b4a59")
MODULUS, EVERY, FATAL = (1 << 61) - 1, 5, 999

Letter = tuple[bytes, bytes]
"""Key and value of a record that cannot be used."""

Bad = tuple[bytes, bytes, Headers]
"""The same with its headers, which may be all that is wrong with it."""


def an_id(*parts: str) -> str:
    """The id that follows from these words."""
    return str(uuid.uuid5(NAMESPACE, "\x1f".join(parts)))


@dataclass
class RunModel:
    """One run: who has spoken, and the fold of its newest training."""

    incarnation: str = ""
    past: set[str] = field(default_factory=set)
    last: dict[str, int] = field(default_factory=dict)
    value: int = 1
    count: int = 0


@dataclass(frozen=True)
class Expected:
    """An issue that must be there."""

    run: str
    incarnation: str
    reason: str
    fatal: bool


class Model:
    """All runs. `poison` is what was sent of records that cannot be used; `versions` are those of
    the rule, of which either may have found an issue."""

    def __init__(self, versions: Sequence[str] = ("1",)) -> None:
        self.versions = versions
        self.runs: dict[str, RunModel] = {}
        self.issues: dict[str, Expected] = {}
        self.same: dict[str, str] = {}
        """Each id that an issue may have, and the one that it has in `issues`."""
        self.steps: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self.poison: set[Bad] = set()

    def forget(self) -> None:
        """The states of all runs are lost."""
        self.runs.clear()

    def read(self, record: Record) -> None:
        """The next record of its partition."""
        if (record.key, record.value or b"", record.headers) in self.poison:
            return
        assert record.value is not None
        meta = read_meta(record.headers)
        value = decode(meta, record.value)
        name = record.key.decode()
        run = self.runs.setdefault(name, RunModel())
        if meta.boot:
            if meta.seq <= run.last.get(meta.boot, -1):
                return
            run.last[meta.boot] = meta.seq
        if isinstance(value, Event):
            assert isinstance(value.data, RunData)
            if value.data.role != "launcher":
                self._is_of(run, value.data.incarnation)
            return
        assert isinstance(value, StepFrame)
        if self._is_of(run, value.origin.incarnation):
            numbers = value.column("loss")
            assert numbers is not None
            for step, number in zip(value.steps.tolist(), numbers.tolist(), strict=True):
                self._take(name, run, step, int(number))

    def _is_of(self, run: RunModel, incarnation: str) -> bool:
        """Whether the run's newest training says it; one that is new is that from now on."""
        if incarnation in run.past:
            return False
        if incarnation != run.incarnation:
            if run.incarnation:
                run.past.add(run.incarnation)
            run.incarnation, run.value, run.count = incarnation, 1, 0
        return True

    def _take(self, name: str, run: RunModel, step: int, number: int) -> None:
        self.steps.setdefault((name, run.incarnation), []).append((step, number))
        run.value = (run.value * 31 + number + 1) % MODULUS
        run.count += 1
        if number == FATAL or run.count % EVERY == 0:
            episode = f"step {step}||{step}|None|loss"
            words = ("issue", name, run.incarnation, "fold")
            ids = [an_id(*words, version, episode) for version in self.versions]
            issue = ids[0]
            self.same.update(dict.fromkeys(ids, issue))
            reason = f"{run.value} after {run.count}"
            self.issues[issue] = Expected(name, run.incarnation, reason, number == FATAL)


@dataclass(frozen=True)
class Saved:
    """A saved state: the offset up to which it goes, and what it says."""

    next_offset: int
    incarnation: str
    value: int
    count: int


class Seen:
    """What is on the bus beside telemetry."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self.issues: dict[str, set[str]] = {}
        self.states: dict[str, Saved] = {}
        self.keys: set[tuple[int, bytes]] = set()
        """The partition and the key of each state that was ever saved."""
        self.finals: dict[str, list[str]] = {}
        self.open: dict[str, str] = {}
        self.commands: dict[str, set[bytes]] = {}
        self.requests: dict[str, StopRequested] = {}
        self.letters: Counter[Letter] = Counter()
        self.unexpected: list[str] = []

    def read(self, record: Record) -> None:
        """A record of any other topic."""
        topic = record.partition.topic
        if topic == self._topics.state:
            self.keys.add((record.partition.number, record.key))
        if topic == self._topics.dlq:
            self.letters[record.key, record.value or b""] += 1
        elif record.value is not None:
            try:
                value = decode(read_meta(record.headers), record.value)
            except RecordError as error:
                self.unexpected.append(f"cannot be read: {topic}: {error}")
                return
            if isinstance(value, Snapshot):
                self._saved(value)
            elif isinstance(value, Event):
                self._event(value, record.value)

    def _saved(self, snapshot: Snapshot) -> None:
        if snapshot.rule != "fold":
            return
        (length,) = struct.unpack_from("<I", snapshot.payload)
        own = json.loads(snapshot.payload[4 + length :])
        known = self.states.get(snapshot.run_id)
        if known is None or snapshot.next_offset >= known.next_offset:
            self.states[snapshot.run_id] = Saved(
                snapshot.next_offset, snapshot.incarnation, own["value"], own["count"]
            )

    def _event(self, event: Event[Data], value: bytes) -> None:
        data = event.data
        if isinstance(data, IssueFiring):
            if data.rule == "fold":
                self.issues.setdefault(data.issue_id, set()).add(data.reason)
            else:
                self.unexpected.append(f"an issue of {data.rule}: {data.reason}")
        elif isinstance(data, Delivery):
            if data.final and data.redrives == 0:
                self.finals.setdefault(data.delivery_id, []).append(data.state)
            self.open[data.delivery_id] = data.state
        elif isinstance(data, StopRequested):
            self.commands.setdefault(data.command_id, set()).add(value)
            self.requests[data.command_id] = data


def differences(
    model: Model, seen: Seen, actions: Collection[str], attempted: Collection[str]
) -> Iterator[str]:
    """In sentences, how the bus and the receivers differ from what must be.

    Args:
        actions: the names of the receivers.
        attempted: the ids of the notices that they were sent.
    """
    yield from wrong_findings(model, seen)
    yield from _wrong_deliveries(model.issues, seen, actions, attempted)
    bad = {(key, value) for key, value, _ in model.poison}
    for letter in bad - seen.letters.keys():
        yield f"lost: a dead letter of {letter[0]!r}: {letter[1][:40]!r}"
    for letter in seen.letters.keys() - bad:
        yield f"invented: a dead letter of {letter[0]!r}: {letter[1][:40]!r}"


def wrong_findings(model: Model, seen: Seen) -> Iterator[str]:
    """In sentences, how the issues and the states differ from what must be."""
    found: dict[str, set[str]] = {}
    for issue, reasons in seen.issues.items():
        if issue in model.same:
            found.setdefault(model.same[issue], set()).update(reasons)
        else:
            yield f"invented: the issue {issue}: {sorted(reasons)}"
    for issue, expected in model.issues.items():
        if issue not in found:
            yield f"lost: the issue {issue} of {expected.run} ({expected.reason})"
        elif found[issue] != {expected.reason}:
            yield f"wrong: {expected.run}: {sorted(found[issue])}, not {expected.reason}"
    yield from seen.unexpected
    yield from _wrong_states(model, seen)


def _wrong_states(model: Model, seen: Seen) -> Iterator[str]:
    for name, run in model.runs.items():
        if run.count == 0:
            continue
        saved = seen.states.get(name)
        if saved is None:
            yield f"wrong state: {name} has none"
        elif (saved.incarnation, saved.value, saved.count) != (
            run.incarnation,
            run.value,
            run.count,
        ):
            yield f"wrong state: {name}: {saved.count} numbers, not {run.count}"


def _wrong_deliveries(
    issues: Mapping[str, Expected], seen: Seen, actions: Collection[str], attempted: Collection[str]
) -> Iterator[str]:
    notices = {
        an_id("delivery", issue, action, "firing"): issue for issue in issues for action in actions
    }
    stops = {
        an_id("delivery", issue, "stop", "firing"): issue
        for issue, expected in issues.items()
        if expected.fatal
    }
    for delivery, issue in {**notices, **stops}.items():
        finals = seen.finals.get(delivery, [])
        # Whoever wakes up with an attempt in its hands says once more what became of it, or that
        # it is to be made: what is final stays so.
        if set(finals) != {"delivered"}:
            state = seen.open.get(delivery, "not there")
            yield f"delivery of {issues[issue].run}: {finals or 'not final'}, at last {state}"
    for delivery in seen.open.keys() - notices.keys() - stops.keys():
        yield f"invented: the delivery {delivery}"
    for delivery in notices.keys() - set(attempted):
        yield f"lost: the notice {delivery}"
    for delivery in set(attempted) - notices.keys():
        yield f"invented: the notice {delivery}"
    for command in stops.keys() - seen.commands.keys():
        yield f"lost: the stop of {issues[stops[command]].run}"
    for command, texts in seen.commands.items():
        if command not in stops:
            yield f"wrong stop: {seen.requests[command].run_id}"
        elif len(texts) != 1:
            yield f"wrong stop: {len(texts)} commands with one id"


def partitions(topics: Topics) -> list[Partition]:
    """All that the model and `Seen` read."""
    read = (topics.telemetry, topics.state, topics.issues, topics.actions, topics.control)
    return [
        Partition(spec.name, number)
        for spec in topics.specs()
        if spec.name in (*read, topics.dlq)
        for number in range(spec.partitions)
    ]
