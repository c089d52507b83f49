"""The thread that sends: it encodes, numbers, publishes, tries again, and never holds training up.

The training thread only appends to the outbox. This thread has an event loop and a bus of its own;
it starts with the first record. Step scalars wait 20 ms for company, urgent records do not wait.

While the bus is away the outbox fills up to its bounds and then drops (`tocsin.emitter.outbox`);
publishing is tried again with growing pauses. That is said once on stderr, and once when it is
over.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tocsin.bus.port import Bus, Outgoing, Partition, Producer, UnknownTopic
from tocsin.emitter.daemon_pool import DaemonPool
from tocsin.emitter.outbox import Item, Outbox, Said, StepRow, Worth, pack
from tocsin.schemas.errors import ConfigurationError, RecordTooLarge
from tocsin.schemas.events import Data, Event
from tocsin.schemas.identity import new_id
from tocsin.schemas.runs import CheckpointWritten, Heartbeat, PhaseMark
from tocsin.schemas.telemetry import Frame, Mode, Speaker, SystemFrame, TensorFrame
from tocsin.schemas.topics import Topics, telemetry_partition
from tocsin.schemas.wire import meta_of

COALESCE_S: Final = 0.02
PUBLISH_S: Final = 15.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
FLUSH_S: Final = 5.0
FLUSH_WITHOUT_BUS_S: Final = 1.0
"""How long an exit waits while the bus has been failing: it probably will go on."""

CLOSE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where records go, and who says them. `source` is the CloudEvents source."""

    topics: Topics
    speaker: Speaker
    source: str
    create_topics: bool = False


def say(text: str) -> None:
    """One line on stderr, if there is one."""
    try:
        print(f"tocsin: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, gone, or None
        return


class Sender:
    """Sends records of one speaker on the telemetry topic. Safe to be called by any thread.

    No method but `flush` and `close` ever waits for the bus. In a forked child nothing is sent: the
    thread is not there, and the lock may be held for ever.
    """

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        address: Address,
        *,
        outbox: Outbox | None = None,
        heartbeat: Callable[[], Data] | None = None,
        heartbeat_s: float = 10.0,
        tell: Callable[[str], None] = say,
    ) -> None:
        self._open_bus = open_bus
        self._address = address
        self._outbox = outbox if outbox is not None else Outbox()
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._tell = tell
        self.boot: Final = new_id()
        self._seq = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._busy = 0
        self._urgent = False
        self._woken = False
        self._closing = False
        self._failing = False
        self._refused = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self.records = 0
        self.failed: str | None = None

    @property
    def dropped(self) -> int:
        """Records that were dropped: the queue was full, or one was too large."""
        return self._outbox.dropped + self._refused

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system refuses one."""
        self._thread = threading.Thread(target=self._run, name="tocsin-sender", daemon=True)
        self._thread.start()

    def say(self, data: Data, *, urgent: bool = True) -> None:
        """Send an event."""
        said = Said(data, time.time_ns() // 1_000_000)
        if isinstance(data, Heartbeat):
            self._put(said, Worth.LIFECYCLE, urgent=urgent, replaces=Heartbeat)
        elif isinstance(data, PhaseMark | CheckpointWritten):
            self._put(said, Worth.MARKS, urgent=urgent)
        else:
            self._put(said, Worth.LIFECYCLE, urgent=urgent)

    def row(self, row: StepRow, *, urgent: bool = False) -> None:
        """Send the scalars of one step."""
        self._put(row, Worth.SCALARS, urgent=urgent)

    def frame(self, frame: TensorFrame, *, urgent: bool = False) -> None:
        """Send a tensor summary."""
        self._put(frame, Worth.TENSORS, urgent=urgent)

    def system(self, frame: SystemFrame) -> None:
        """Send packed samples of the node."""
        self._put(frame, Worth.SCALARS, urgent=False)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all that was handed in is acknowledged; False if the time was too short."""
        if os.getpid() != self._pid:
            return False
        with self._settled:
            if self._thread is None or not self._thread.is_alive():
                return len(self._outbox) == 0
            self._urgent = True
            self._wake_up()
            limit = min(timeout_s, FLUSH_WITHOUT_BUS_S) if self._failing else timeout_s
            return self._settled.wait_for(
                lambda: len(self._outbox) == 0 and self._busy == 0, timeout=limit
            )

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Flush, then end the thread and close the bus. Bounded by `timeout_s` and 2 s."""
        if os.getpid() != self._pid:
            return False
        sent = self.flush(timeout_s)
        with self._lock:
            self._closing = True
            self._wake_up()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        return sent

    def _put(
        self, item: Item, worth: Worth, *, urgent: bool, replaces: type[Data] | None = None
    ) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._outbox.put(item, worth, replaces=replaces)
            if urgent and not self._urgent:
                self._urgent = True
                self._woken = False
            if not self._woken:
                self._wake_up()

    def _wake_up(self) -> None:
        """Under the lock: let the loop look, once until it has done so."""
        if self._loop is not None and self._wake is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
                self._woken = True
            except RuntimeError:  # the loop has ended
                return

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            self._tell(f"sending has failed ({self.failed}); the training goes on unwatched")
        finally:
            with self._settled:
                self._loop = None
                self._busy = 0
                self._settled.notify_all()

    async def _work(self) -> None:
        wake = asyncio.Event()
        with self._lock:
            self._loop, self._wake = asyncio.get_running_loop(), wake
        self._loop.set_default_executor(DaemonPool())
        wake.set()
        beat = asyncio.create_task(self._beat(), name="tocsin-heartbeat")
        link = _Link(self._open_bus, self._address)
        try:
            while True:
                await wake.wait()
                wake.clear()
                if not self._urgent and not self._closing:
                    # An urgent record sets the event again and ends the pause.
                    try:
                        async with asyncio.timeout(COALESCE_S):
                            await wake.wait()
                    except TimeoutError:
                        pass
                if not await self._send_all(link):
                    return
        finally:
            beat.cancel()
            await link.drop()

    async def _send_all(self, link: _Link) -> bool:
        """Send until nothing is left; False once closing."""
        while True:
            with self._settled:
                self._woken = False
                items = self._outbox.take()
                self._busy = len(items)
                if not items:
                    self._urgent = False
                    self._settled.notify_all()
                    return not self._closing
            records = self._encode(items)
            if records and not await self._publish(link, records):
                return False

    async def _publish(self, link: _Link, records: Sequence[Outgoing]) -> bool:
        """Publish, again and again; False if it was given up because of closing."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(PUBLISH_S):
                    producer = await link.up()
                    await producer.publish(records)
            except RecordTooLarge as error:
                if len(records) > 1:
                    return all([await self._publish(link, [record]) for record in records])
                self._refused += 1
                self._tell(f"a record was not sent: {error}")
                return True
            # The wall of this loop: whatever a bus raises, training goes on.
            except Exception as error:
                await link.drop()
                if not self._failing:
                    self._failing = True
                    self._tell(_sentence(error))
                if self._closing:
                    return False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.records += len(records)
                if self._failing:
                    self._failing = False
                    self._tell(f"the bus answers again; {self.dropped:,} records were dropped")
                return True

    def _encode(self, items: Sequence[Item]) -> list[Outgoing]:
        records: list[Outgoing] = []
        # Rows of a user's own scalars stand between those of the steps: each kind is one frame.
        rows: dict[tuple[tuple[str, ...], Mode], list[StepRow]] = {}
        for item in items:
            if isinstance(item, StepRow):
                rows.setdefault((item.columns, item.mode), []).append(item)
                continue
            records += self._packed(rows)
            if isinstance(item, Said):
                event = Event.of(
                    item.data,
                    id=f"{self.boot}/{self._seq}",
                    source=self._address.source,
                    time_ms=item.time_ms,
                )
                records.append(self._record(event))
            elif isinstance(item, TensorFrame):
                records += [self._record(part) for part in item.split()]
            else:
                records.append(self._record(item))
        return records + self._packed(rows)

    def _packed(self, rows: dict[tuple[tuple[str, ...], Mode], list[StepRow]]) -> list[Outgoing]:
        records = [self._record(pack(same, self._address.speaker)) for same in rows.values()]
        rows.clear()
        return records

    def _record(self, value: Frame | Event[Data]) -> Outgoing:
        speaker = self._address.speaker
        meta = meta_of(value, rank=speaker.rank, boot=self.boot, seq=self._seq)
        self._seq += 1
        partition = Partition(self._address.topics.telemetry, telemetry_partition(speaker.run_id))
        return Outgoing(partition, speaker.run_id.encode(), value.encode(), meta.headers())

    async def _beat(self) -> None:
        if self._heartbeat is None:
            return
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                self.say(self._heartbeat())
            # An emitter hook's wall: it reads what the training thread changes meanwhile, and one
            # that is left out does no harm; all of them would look like a dead rank.
            except Exception:
                continue


class _Link:
    """The bus and a producer on it, opened when needed and dropped when they fail."""

    def __init__(self, open_bus: Callable[[], Bus], address: Address) -> None:
        self._open = open_bus
        self._address = address
        self._bus: Bus | None = None
        self._producer: Producer | None = None

    async def up(self) -> Producer:
        if self._producer is None:
            bus = self._open()
            await bus.__aenter__()
            self._bus = bus
            if self._address.create_topics:
                await bus.init(self._address.topics.specs())
            self._producer = await bus.producer()
        return self._producer

    async def drop(self) -> None:
        bus, self._bus, self._producer = self._bus, None, None
        if bus is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await bus.__aexit__(None, None, None)
        # Whatever a broken bus raises while it closes, another is opened.
        except Exception:
            return


def _sentence(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, UnknownTopic):
        hint = "try `tocsin bus init`"
    elif isinstance(error, ConfigurationError):
        hint = "check the bus URL"
    else:
        hint = "trying again"
    return (
        f"the bus takes no records ({reason}); {hint}. The training goes on; what does not fit "
        "the queue is dropped and counted"
    )
