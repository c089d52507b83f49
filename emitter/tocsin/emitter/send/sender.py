"""The thread that sends: it encodes, numbers, publishes, tries again, and never holds training up.

The training's thread only appends to a deque, which takes no lock: one that the sender holds would
stop the training for as long as the sender waits for the interpreter, and one that the training
holds would never be free again in a signal's handler that has something to send. This thread has an
event loop and a bus of its own. How long it waits for company is `tocsin.emitter.send.pace`'s
decision.

While the bus is away the outbox fills up to its bounds and then drops
(`tocsin.emitter.send.outbox`); publishing is tried again with growing pauses, reported once on
stderr for each kind of failure, and once when it is over. The numbers of what was dropped are left
out, so that a reader knows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from tocsin.bus.port import Outgoing, Outlet
from tocsin.emitter.process.forks import forks
from tocsin.emitter.process.isolation import from_signal
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.send.bus_connection import CLOSE_S, BusLink, advice
from tocsin.emitter.send.daemon_pool import DaemonPool, check_descriptors
from tocsin.emitter.send.encoding import Address, Encoder
from tocsin.emitter.send.outbox import (
    MAX_BYTES,
    MAX_ITEMS,
    Item,
    Outbox,
    Priority,
    QueuedEvent,
    StepRow,
    priority_of,
    size_of,
)
from tocsin.emitter.send.pace import COALESCE_S, SPACING_S, Pace
from tocsin.schemas.errors import RecordTooLarge
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.checkpoints import CheckpointWritten
from tocsin.schemas.records.events import Data, clip
from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.runs import CaptureDegraded, Heartbeat, PhaseMark

PUBLISH_S: Final = 15.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
FLUSH_S: Final = 5.0
FLUSH_WITHOUT_BUS_S: Final = 1.0
"""How long an exit waits while the bus has been failing: it probably will go on."""

DRAIN_S: Final = 1.0
"""How often the bounds are kept while a publish takes its time."""

TURN_S: Final = FLUSH_S + CLOSE_S
"""How long the sender of the training before may take to end."""

_TURN_POLL_S: Final = 0.02

_SCALARS: Final = Priority.SCALARS
"""The class finds its members slowly, and this one is asked for at each step."""

RESTARTS: Final = 8
"""Failures of the loop itself in a row, with pauses as after those of the bus: half a minute."""


class Sender:
    """Sends records of one origin on the telemetry topic, for any thread and signal's handler.

    No method but `flush` and `close` ever waits. A forked child lacks the thread: it sends nothing.
    """

    def __init__(
        self,
        open_bus: Callable[[], Outlet],
        address: Address,
        *,
        outbox: Outbox | None = None,
        heartbeat: Callable[[], Data] | None = None,
        heartbeat_s: float = 10.0,
        report: Callable[[str], None] = print_line,
        after: Sequence[threading.Thread] = (),
    ) -> None:
        """It publishes nothing while one of `after` lives, for `TURN_S` at most."""
        self._open_bus = open_bus
        self._address = address
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._report = report
        self._after = tuple(after)
        self._forks = forks.watched()
        self._inbox: deque[tuple[Item, Priority]] = deque()
        self._inbox_bytes = 0  # about: two threads may count at once
        self._flushes: deque[Future[bool]] = deque()
        self._asleep = False
        """Nothing will be looked at before somebody wakes the loop."""
        self._full = 0
        self._urgent = False
        self._hurry = False
        """A flush waits: a bus that is away is tried once more at once."""
        self._closing = False
        self._over = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        # The rest belongs to the sender's thread.
        self._outbox = outbox if outbox is not None else Outbox()
        self._pace = Pace()
        self._encoder = Encoder(
            address, lambda what, error: self._degrade(f"sending {what}", error)
        )
        self._hand: list[Outgoing] = []
        """What is being published; another loop begins with it should this one fail."""
        self._busy = 0
        self._lost = 0
        self._failing = False
        self._reported: set[type[Exception]] = set()
        self._degraded: set[str] = set()
        self.records = 0
        self.failed: str | None = None

    @property
    def dropped(self) -> int:
        """Records that were dropped: the queue was full, or one could not be sent."""
        return self._dropped_before + self._lost + self._encoder.refused

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system refuses one."""
        self._thread = threading.Thread(target=self._run, name="tocsin-sender", daemon=True)
        self._thread.start()

    def publish(self, data: Data) -> None:
        """Send an event; all but marks at once."""
        event = QueuedEvent(data, unix_ms())
        if isinstance(data, PhaseMark | CheckpointWritten):
            self._put(event, Priority.MARKS, False)
        else:
            self._put(event, Priority.LIFECYCLE, True)

    def row(self, row: StepRow, *, urgent: bool = False) -> None:
        """Send the scalars of one step."""
        # As `_put` does it, without its call: each short step passes here.
        inbox = self._inbox
        if (
            urgent
            or self._over
            or self._forks != forks.count
            or len(inbox) > MAX_ITEMS
            or self._inbox_bytes > MAX_BYTES
        ):
            self._put(row, Priority.ANOMALY if urgent else Priority.SCALARS, urgent)
            return
        inbox.append((row, _SCALARS))
        if self._asleep:
            self._notify()

    def frame(self, frame: TensorFrame, *, urgent: bool = False) -> None:
        """Send a tensor summary."""
        self._inbox_bytes += size_of(frame)
        self._put(frame, Priority.ANOMALY if urgent else priority_of(frame.collection), urgent)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all that was handed in is acknowledged; False if the time was too short.

        Raises only what a signal handler of the user's has raised.
        """
        if self._forks != forks.count:
            return False
        thread = self._thread
        if thread is None or not thread.is_alive():
            return not self._waiting
        flushed: Future[bool] = Future()
        self._flushes.append(flushed)
        self._hurry = True
        self._notify()
        if self._over:
            return not self._waiting
        began = time.monotonic()
        while (waited := time.monotonic() - began) < timeout_s:
            if self._failing and waited >= FLUSH_WITHOUT_BUS_S:
                return False
            try:
                return flushed.result(min(timeout_s - waited, FLUSH_WITHOUT_BUS_S / 4))
            except TimeoutError as error:
                if from_signal(error):
                    raise
                continue
        return False

    def end_heartbeats(self) -> None:
        """Send no more of them: the rank has ended."""
        self._heartbeat = None

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Flush, then end the thread and close the bus. Waits for at most `timeout_s` and 2 s;
        whether all was acknowledged. Raises as `flush` does.
        """
        if self._forks != forks.count:
            return False
        try:
            return self.flush(timeout_s)
        finally:
            self._closing = True
            self._notify()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(CLOSE_S)

    def _put(self, item: Item, priority: Priority, urgent: bool) -> None:
        """On the training's thread: about 0.5 µs, unless the loop has to be woken."""
        if self._forks != forks.count:
            return
        inbox = self._inbox
        full = len(inbox) > MAX_ITEMS or self._inbox_bytes > MAX_BYTES
        # Full: the loop hangs, and keeps no bounds.
        if self._over or (full and priority is not Priority.LIFECYCLE):
            self._full += 1
            return
        inbox.append((item, priority))
        if urgent:
            if not self._urgent:
                self._urgent = True
                self._notify()
        elif self._asleep:
            self._notify()

    def _notify(self) -> None:
        """Let the loop look. 25 µs and more: the interpreter changes hands."""
        self._asleep = False
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake.set)

    @property
    def _dropped_before(self) -> int:
        """Items that were dropped before they were given a number."""
        return self._outbox.dropped + self._full

    @property
    def _waiting(self) -> int:
        return len(self._inbox) + len(self._outbox) + self._busy

    def _run(self) -> None:
        """The thread: the loop, and another one should it fail."""
        failures, records, pause_s = 0, 0, FIRST_PAUSE_S
        while not self._closing:
            try:
                check_descriptors()
                asyncio.run(self._work())
            # The isolation of this thread: whatever is wrong in here, the training goes on.
            except Exception as error:
                self._loop = None
                if self.records > records:
                    failures, records, pause_s = 0, self.records, FIRST_PAUSE_S
                failures += 1
                self._failing = True
                if not self._hand:
                    self._lost += self._busy
                    self._busy = 0
                reason = f"{type(error).__name__}: {error}"
                if failures > RESTARTS:
                    self.failed = reason
                    self._report(
                        f"sending has failed ({reason}); the training continues unmonitored"
                    )
                    break
                # What cannot be reported must not end the thread, which goes on sending.
                with suppress(Exception):
                    self._degrade("sending", error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._over = True
        self._loop = None
        # Still the isolation; who waits for an answer does so for some seconds only.
        with suppress(Exception):
            self._answer(list(self._flushes), False)

    async def _work(self) -> None:
        wake = asyncio.Event()
        self._wake, self._loop = wake, asyncio.get_running_loop()
        self._loop.set_default_executor(DaemonPool())
        tasks = [
            asyncio.create_task(self._beat(), name="tocsin-heartbeat"),
            asyncio.create_task(self._keep_bounds(), name="tocsin-bounds"),
        ]
        link = BusLink(self._open_bus, self._address.topics, create=self._address.create_topics)
        try:
            while True:
                await self._rest(wake)
                if not await self._send_all(link):
                    return
        finally:
            for task in tasks:
                task.cancel()
            await link.drop()

    async def _rest(self, wake: asyncio.Event) -> None:
        """Until it is time to look into the inbox."""
        pause_s = SPACING_S
        if not self._pace.steady(time.monotonic()):
            pause_s = COALESCE_S
            self._asleep = True
            # In this order: what comes after the look finds the flag, and wakes.
            if not self._inbox and not self._flushes and not self._closing:
                await wake.wait()
            self._asleep = False
        await self._pause(wake, pause_s, self._hurried)

    def _hurried(self) -> bool:
        if self._flushes or self._closing:
            return True
        return self._urgent and self._pace.hurry(time.monotonic())

    async def _pause(self, wake: asyncio.Event, pause_s: float, over: Callable[[], bool]) -> None:
        """Wait so long; less if it is `over`, which is asked at each awakening."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                # In this order: what comes after the question sets the event again.
                wake.clear()
                while not over():
                    await wake.wait()
                    wake.clear()

    async def _send_all(self, link: BusLink) -> bool:
        """Send what was handed in so far; False once closing."""
        flushes = [self._flushes.popleft() for _ in range(len(self._flushes))]
        closing, self._urgent = self._closing, False
        self._drain()
        self._pace.checked(time.monotonic(), found=len(self._outbox) > 0)
        sent = True
        try:
            while sent:
                if not self._hand:
                    items = self._outbox.drain()
                    if not items:
                        break
                    self._busy = len(items)
                    self._hand = self._encoder.encode(items, dropped=self._dropped_before)
                sent = not self._hand or await self._publish(link, self._hand)
                if sent:
                    self._hand, self._busy = [], 0
            return sent and not closing
        finally:
            self._answer(flushes, sent and self._busy == 0)

    def _answer(self, flushes: Sequence[Future[bool]], sent: bool) -> None:
        for flush in (flush for flush in flushes if not flush.done()):
            flush.set_result(sent)

    def _drain(self) -> None:
        """Move what was handed in to the outbox, where the bounds hold."""
        self._inbox_bytes = 0
        inbox, put = self._inbox, self._outbox.put
        for _ in range(len(inbox)):
            item, priority = inbox.popleft()
            is_beat = isinstance(item, QueuedEvent) and isinstance(item.data, Heartbeat)
            put(item, priority, replaces=Heartbeat if is_beat else None)

    async def _keep_bounds(self) -> None:
        while True:
            await asyncio.sleep(DRAIN_S)
            if not self._busy:
                continue
            try:
                self._drain()
            # Isolated: without this task nothing is bounded while a bus is slow.
            except Exception:
                self._lost += 1

    async def _publish(self, link: BusLink, records: Sequence[Outgoing]) -> bool:
        """Publish, again and again; False if it was given up because of closing."""
        await self._wait_for_turn()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(PUBLISH_S):
                    producer = await link.up()
                    await producer.publish(records)
            except RecordTooLarge as error:
                if len(records) > 1:
                    return all([await self._publish(link, [record]) for record in records])
                self._lost += 1
                self._report(f"a record was not sent: {error}")
                return True
            # The isolation of this loop: whatever a bus raises, training goes on.
            except Exception as error:
                await link.drop()
                self._failing = True
                if type(error) not in self._reported:
                    self._reported.add(type(error))
                    self._report(advice(error, PUBLISH_S))
                if self._closing:
                    return False
                if self._wake is not None:
                    # A flush has it tried once more at once.
                    await self._pause(self._wake, pause_s, lambda: self._closing or self._hurry)
                self._hurry = False
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.records += len(records)
                if self._failing:
                    self._failing = False
                    if self._reported:
                        self._reported.clear()
                        self._report(
                            f"the bus answers again; {self.dropped:,} records were dropped"
                        )
                return True

    async def _wait_for_turn(self) -> None:
        # Records of a training that follow those of the next one are late, and left out.
        until = time.monotonic() + TURN_S
        while any(each.is_alive() for each in self._after):
            if self._closing or time.monotonic() > until:
                break
            await asyncio.sleep(_TURN_POLL_S)
        self._after = ()

    def _degrade(self, probe: str, error: Exception) -> None:
        """Say once that records of a kind are lost."""
        if probe in self._degraded:
            return
        self._degraded.add(probe)
        reason = clip(f"{type(error).__name__}: {error}", 500)
        self._report(f"{probe} has failed ({reason}); the training continues")
        who = self._address.origin.fields
        self.publish(CaptureDegraded(**who, probe=clip(probe, 100), reason=reason))

    async def _beat(self) -> None:
        while (heartbeat := self._heartbeat) is not None:
            await asyncio.sleep(self._heartbeat_s)
            if self._heartbeat is None:
                return
            try:
                self.publish(heartbeat())
            # An emitter hook's isolation: it reads what the training thread changes meanwhile, and
            # one that is left out does no harm; all of them would look like a dead rank.
            except Exception:
                continue
