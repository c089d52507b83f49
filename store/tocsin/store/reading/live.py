"""Reading a run from a live bus: all that is kept of it, or what came after the store's files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Final, TypeVar

from tocsin.bus.port import EARLIEST, Bus, From, Partition, Reader, Record
from tocsin.bus.reading import read_to_end
from tocsin.bus.urls import open_bus
from tocsin.schemas.errors import RecordError
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.frames import Frame, StepFrame, TensorFrame
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition
from tocsin.store.known_records import Mark, Senders
from tocsin.store.reading.frame_source import FrameSource

T = TypeVar("T")

BusSource = str | Path | Callable[[], Bus]
"""A bus URL, the path of an embedded bus, or what makes a bus that is still to be entered."""

_POLL_S: Final = 0.5


class LiveRun:
    """What a bus holds of one run, as far as it was read.

    Args:
        covered: by topic, what is known from elsewhere and not read again.
        senders: the last record of each that is covered.
        view: the runs, issues and deliveries known from elsewhere; more is folded into it.
    """

    def __init__(
        self,
        source: BusSource,
        run_id: str,
        *,
        topics: Topics,
        view: RunsView,
        covered: Mapping[str, Mark] | None = None,
        senders: Mapping[str, int] | None = None,
    ) -> None:
        self.run_id = run_id
        self.view = view
        self.frames: dict[str, FrameSource] = {}
        """By incarnation, in the order in which they were heard of."""
        self.events: list[tuple[int, int, Event[Data]]] = []
        """What telemetry has that is not numbers: offset, append time, event."""
        self.last_step: dict[str, int] = {}
        self.heard = False
        """Whether the bus has anything of the run."""
        self._source = source
        self.url = "a bus" if callable(source) else str(source)
        self._key = run_id.encode()
        number, issues = telemetry_partition(run_id), issue_partition(run_id)
        self._telemetry = Partition(topics.telemetry, number)
        self._others = [
            Partition(topics.runs, number),
            Partition(topics.issues, issues),
            Partition(topics.actions, issues),
            Partition(topics.control, issues),
        ]
        self._marks = dict(covered or {})
        self._senders = Senders.from_last(senders or {})
        self._stored = Mark()

    def drop(self, covered: Mapping[str, Mark]) -> None:
        """Drop the numbers and events that are in files by now, also those that are still to be
        read: of these only the view learns."""
        self._stored = mark = covered.get(self._telemetry.topic, Mark())
        for frames in self.frames.values():
            frames.drop(mark)
        self.events = [event for event in self.events if not mark.covers(event[0], event[1])]

    def read(self) -> None:
        """Read what has come. Blocks.

        Raises:
            UnusableBus, UnknownTopic: the bus was never set up. BusUnavailable: it does not answer.
        """
        run_apart(self._read())

    def follow(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Read what comes until `done`, which is asked after each batch, or the time is up; what
        `done` said last. Blocks. Raises as `read` does."""
        return run_apart(self._follow(done, timeout_s))

    async def _read(self) -> None:
        async with self._open() as bus:
            self.url = bus.url
            # Views first: they show from when on there is telemetry of the run.
            for partitions in (self._others, [self._telemetry]):
                reader = await bus.reader(self._starts(partitions))
                try:
                    ends = await reader.ends(partitions)
                    async for records in read_to_end(reader, ends):
                        for record in records:
                            self._apply(record)
                finally:
                    await reader.close()

    async def _follow(self, done: Callable[[], bool], timeout_s: float) -> bool:
        await self._read()
        async with self._open() as bus:
            reader = await bus.reader(self._starts([*self._others, self._telemetry]))
            try:
                return await _until(reader, self._apply, done, timeout_s)
            finally:
                await reader.close()

    def _open(self) -> Bus:
        if callable(self._source):
            return self._source()
        text = str(self._source)
        return open_bus(text if ":" in text else f"embedded:{text}", create=False)

    def _starts(self, partitions: list[Partition]) -> dict[Partition, From]:
        starts: dict[Partition, From] = {}
        for partition in partitions:
            # By time: an offset of another log, which was there before, means nothing.
            mark = self._marks.get(partition.topic)
            starts[partition] = EARLIEST if mark is None else From.time(mark.append_ms)
        return starts

    def _apply(self, record: Record) -> None:
        topic = record.partition.topic
        mark = self._marks.get(topic, Mark())
        if mark.covers(record.offset, record.append_ms):
            return
        self._marks[topic] = mark.after(record)
        if topic != self._telemetry.topic:
            # Of the ledger keys begin with an issue, so all of the partition is looked at.
            self.view.apply(record)
            self.heard = self.heard or self.run_id in self.view.seen
            return
        if record.key != self._key or record.value is None:
            return
        try:
            meta = read_meta(record.headers)
            value = decode(meta, record.value)
        except RecordError:
            self.view.unread += 1
            return
        if not self._senders.admit(meta):
            return
        self.heard = True
        if isinstance(value, Event):
            self.view.apply(record)
            if not self._stored.covers(record.offset, record.append_ms):
                self.events.append((record.offset, record.append_ms, value))
        elif isinstance(value, Frame):
            self._frame(value, record)

    def _frame(self, frame: Frame, record: Record) -> None:
        incarnation = frame.origin.incarnation
        self.view.accepts(self.run_id, incarnation, record.offset, record.append_ms)
        if not self._stored.covers(record.offset, record.append_ms):
            self.frames.setdefault(incarnation, FrameSource()).add(
                frame, record.offset, record.append_ms
            )
        if (step := last_step(frame)) is not None:
            self.last_step[incarnation] = max(step, self.last_step.get(incarnation, -1))


def last_step(frame: Frame) -> int | None:
    """The last step that a frame is about; None: none."""
    if isinstance(frame, TensorFrame):
        return frame.step
    return int(frame.steps.max()) if isinstance(frame, StepFrame) and frame.steps.size else None


async def _until(
    reader: Reader, apply: Callable[[Record], None], done: Callable[[], bool], timeout_s: float
) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (ready := done()):
        left = deadline - loop.time()
        if left <= 0:
            break
        for record in await reader.poll(timeout_s=min(_POLL_S, left)):
            apply(record)
    return ready


def run_apart(work: Coroutine[None, None, T]) -> T:
    """Run a coroutine to its end in a loop and a thread of its own: the caller may be in one (a
    notebook is)."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="tocsin-store", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
