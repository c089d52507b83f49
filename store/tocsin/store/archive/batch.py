"""What is to be written of one run: records sorted out against its manifest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import Frame, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import RunEnded, RunStarted
from tocsin.schemas.records.saved_tensors import TensorsSaved
from tocsin.schemas.records.wire import Meta
from tocsin.store.known_records import Mark, Senders
from tocsin.store.manifest import WHOLE_RUN, Covered, Kind, Manifest, Training
from tocsin.store.parquet.tables import (
    Arrival,
    EventRow,
    Table,
    event_table,
    step_tables,
    system_tables,
    tensor_tables,
)
from tocsin.store.reading.live import last_step


@dataclass(frozen=True, slots=True)
class Taken:
    """A record that is to be archived, decoded.

    Attributes:
        event: its text, if it is not numbers.
        key: of the record.
        size_bytes: of its value.
    """

    topic: str
    offset: int
    append_ms: int
    meta: Meta
    value: Frame | Event[Data]
    key: str
    event: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Which files rows belong to."""

    kind: Kind
    incarnation: str
    collection: str = ""


@dataclass(slots=True)
class Batch:
    """The rows of one flush by place, and the manifest once they are written."""

    covered: Mapping[str, Covered]
    senders: Mapping[str, int]
    trainings: Mapping[str, Training]
    steps: dict[Place, list[tuple[Arrival, StepFrame]]] = field(default_factory=dict)
    system: dict[Place, list[tuple[Arrival, SystemFrame]]] = field(default_factory=dict)
    tensors: dict[Place, list[tuple[Arrival, TensorFrame]]] = field(default_factory=dict)
    events: dict[Place, list[EventRow]] = field(default_factory=dict)

    def tables(self) -> Iterable[tuple[Place, list[Table]]]:
        """What goes into a file each; tables of many statistics go apart."""
        for place, steps in self.steps.items():
            yield place, step_tables(steps)
        for place, samples in self.system.items():
            yield place, system_tables(samples)
        for place, tensors in self.tensors.items():
            yield place, tensor_tables(tensors)
        for place, events in self.events.items():
            yield place, [event_table(events)]


def sort_out(
    records: Iterable[Taken],
    manifest: Manifest,
    *,
    newest_views: str,
    holds: Callable[[TensorsSaved], bool],
) -> Batch:
    """The records that the manifest does not cover and that are no repeats.

    Args:
        newest_views: the topic of runs: of an incarnation's views only the last one is kept.
        holds: whether tensors that were saved in full are in this store.
    """
    marks = {topic: Mark(one.next_offset, one.append_ms) for topic, one in manifest.covered.items()}
    senders = Senders.from_last(manifest.senders)
    trainings = dict(manifest.trainings)
    batch = Batch({}, {}, {})
    views: dict[str, EventRow] = {}
    for one in records:
        mark = marks.get(one.topic, Mark())
        if mark.covers(one.offset, one.append_ms):
            continue
        marks[one.topic] = Mark(one.offset + 1, max(mark.append_ms, one.append_ms))
        # The ledger does not count what it sends: each state of a delivery has the same number.
        ledger = isinstance(one.value, Event) and isinstance(one.value.data, Delivery)
        if not ledger and not senders.admit(one.meta):
            continue
        _learn(trainings, one, holds)
        if not isinstance(one.value, Event):
            _frame(batch, Arrival(one.offset, one.append_ms), one.value)
            continue
        row = EventRow(
            topic=one.topic,
            offset=one.offset,
            append_ms=one.append_ms,
            key=one.key,
            type=one.meta.type,
            version=one.meta.version,
            rank=one.meta.rank,
            value=one.event,
        )
        if one.topic == newest_views and isinstance(one.value.data, RunView):
            views[one.value.data.incarnation] = row
        else:
            batch.events.setdefault(Place("events", WHOLE_RUN), []).append(row)
    if views:
        batch.events.setdefault(Place("events", WHOLE_RUN), []).extend(views.values())
    batch.covered = {
        topic: Covered(next_offset=mark.next_offset, append_ms=mark.append_ms)
        for topic, mark in marks.items()
    }
    batch.senders = senders.last
    batch.trainings = dict(sorted(trainings.items(), key=lambda item: item[1].started_ms))
    return batch


def _frame(batch: Batch, arrival: Arrival, frame: Frame) -> None:
    incarnation = frame.origin.incarnation
    match frame:
        case StepFrame():
            if frame.values.size:
                place = Place("steps", incarnation)
                batch.steps.setdefault(place, []).append((arrival, frame))
        case SystemFrame():
            if frame.values.size:
                place = Place("system", incarnation)
                batch.system.setdefault(place, []).append((arrival, frame))
        case TensorFrame():
            if frame.rows:
                place = Place("tensors", incarnation, frame.collection)
                batch.tensors.setdefault(place, []).append((arrival, frame))


def _learn(
    trainings: dict[str, Training], one: Taken, holds: Callable[[TensorsSaved], bool]
) -> None:
    """What a record holds of its incarnation as a whole."""
    if not isinstance(one.value, Event):
        # A node's sampler may speak in the name of a training that does not come.
        if isinstance(one.value, SystemFrame):
            return
        incarnation = one.value.origin.incarnation
        known = trainings.get(incarnation) or Training(started_ms=one.append_ms)
        step = last_step(one.value)
        last = known.last_step if step is None else max(step, known.last_step or 0)
        trainings[incarnation] = known.model_copy(update={"last_step": last})
        return
    data = one.value.data
    if not isinstance(data, TensorsSaved) or holds(data):
        _learn_from(trainings, data, one.append_ms)


def _learn_from(trainings: dict[str, Training], data: Data, append_ms: int) -> None:
    changes: dict[str, object]
    if isinstance(data, RunView):
        view = trainings.get(data.incarnation) or Training(started_ms=data.started_ms)
        changes = {
            "started_ms": data.started_ms or view.started_ms,
            "ended_ms": data.ended_ms,
            "state": data.state,
            "outcome": data.outcome or "",
            "labels": dict(data.labels),
        }
        if data.last_step is not None:
            changes["last_step"] = max(data.last_step, view.last_step or 0)
        trainings[data.incarnation] = view.model_copy(update=changes)
    elif isinstance(data, RunStarted):
        known = trainings.get(data.incarnation)
        if known is None and data.role == "trainer":
            known = Training(started_ms=append_ms)
        if known is not None and not known.labels:
            trainings[data.incarnation] = known.model_copy(update={"labels": dict(data.labels)})
    elif isinstance(data, TensorsSaved):
        saving = trainings.get(data.incarnation) or Training(started_ms=append_ms)
        changes = {"saved_bytes": saving.saved_bytes + data.size_bytes}
        trainings[data.incarnation] = saving.model_copy(update=changes)
    elif isinstance(data, RunEnded) and data.role == "launcher":
        known = trainings.get(data.incarnation)
        if known is not None and known.ended_ms is None:
            changes = {"ended_ms": append_ms, "outcome": data.outcome}
            trainings[data.incarnation] = known.model_copy(update=changes)
