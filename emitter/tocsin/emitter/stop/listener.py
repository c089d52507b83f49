"""One listener per node for the commands to a run: reads the control topic, judges, hands over.

A listener reads its run's control partition from the start. What it finds there from before its own
time was for a predecessor, unless it names the present incarnation; it is not answered, since the
predecessor's own listener did. Everything else is obeyed or answered with a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from tocsin.bus.port import EARLIEST, Bus, BusError, Partition, Reader, Record, RunBus
from tocsin.emitter.process.process_group import process_lives
from tocsin.emitter.process.stderr import print_line
from tocsin.emitter.stop import before_update, datagrams
from tocsin.emitter.stop.detail_requests import DetailRequests
from tocsin.emitter.stop.leave_report import Emit
from tocsin.emitter.stop.processes import Members, Trainer
from tocsin.emitter.stop.unwatched import LINES
from tocsin.emitter.stop.verification import (
    NO_STOP,
    STOP,
    UNKNOWN_MS,
    CommandVerdict,
    Facts,
    Memory,
    SignedCommand,
    decide,
    read_keys,
    refusal,
    trusted_paths,
)
from tocsin.schemas.errors import RecordError, SignatureError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.frames import RecordOrigin, Who
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopRequested
from tocsin.schemas.records.wire import read_signature
from tocsin.schemas.stops_switch import StopsSwitch
from tocsin.schemas.topics import Topics, issue_partition

logger = logging.getLogger(__name__)

ANSWERED: Final = 100
"""Refusals that one listener answers on the bus; further ones are counted only."""

READY_S: Final = 2.0
_POLL_S: Final = 5.0
_PAUSE_S: Final = 0.5


class StopHandler(Protocol):
    """Does what the listener decides; called on its loop, must not wait."""

    def facts(self) -> Facts:
        """What the decision is taken by, now."""
        ...

    def obey(self, signed: SignedCommand, command: StopRequested) -> None:
        """Stop: the one effect of this incarnation."""
        ...

    def join(self, command: StopRequested) -> None:
        """Another good command while a stop of this incarnation is under way or done."""
        ...

    def missed(self, command: StopRequested, why: str) -> None:
        """A good command, but what it was to stop has ended."""
        ...

    def refuse(self, verdict: CommandVerdict) -> None:
        """Answer with a refusal to the command that it names. Called at most `ANSWERED` times."""
        ...


class Listener:
    """Reads and judges commands to one run."""

    def __init__(
        self,
        topics: Topics,
        run_id: str,
        handler: StopHandler,
        *,
        detail_requests: DetailRequests | None = None,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        """`detail_requests` receives what rules request besides stops."""
        self.counts: Final[Counter[str]] = Counter()
        self.ready: Final = threading.Event()
        self._partition = Partition(topics.control, issue_partition(run_id))
        self._prefix = f"{run_id}/".encode()
        self._handler = handler
        self._detail_requests = detail_requests
        self._now_ms = now_ms
        self._memory = Memory()
        self._switch = StopsSwitch()
        self._refused = 0

    @property
    def stops_off(self) -> str:
        """Why no stop of this bus takes effect now (`tocsin stops off`); empty if they do."""
        return self._switch.off

    async def listen(self, bus: RunBus) -> None:
        """Read for ever. Sets `ready` once it knows what was there before. Raises UnknownTopic."""
        reader = await bus.reader({self._partition: EARLIEST})
        try:
            before = (await reader.ends([self._partition]))[self._partition]
            self.ready.set()
            await self._read(reader, before)
        finally:
            await reader.close()

    async def keep_listening(self, bus: RunBus) -> None:
        """Listen, and start again whenever the bus fails. On a bus that is open."""
        away = False
        while True:
            try:
                await self.listen(bus)
            except Exception as error:
                # The listener's isolation: a run that nobody can stop is worse than one more line.
                _log_outage("the bus cannot be read for stops now", error, again=away)
                away = True
                await asyncio.sleep(_PAUSE_S)

    async def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait, within a bound, until new records are distinguished from those that were there."""
        await asyncio.to_thread(self.ready.wait, timeout_s)

    async def _read(self, reader: Reader, before: int) -> None:
        away = False
        emptied_s = time.monotonic()
        while True:
            try:
                asked_s = time.monotonic()
                records = await reader.poll(timeout_s=_POLL_S)
            except BusError as error:
                _log_outage("the control topic cannot be read now", error, again=away)
                away = True
                await asyncio.sleep(_PAUSE_S)
                continue
            away = False
            for record in records:
                earlier = record.offset < before
                waited_ms = UNKNOWN_MS if earlier else round(1000 * (time.monotonic() - emptied_s))
                try:
                    self.apply(record, earlier=earlier, waited_ms=waited_ms)
                except Exception:
                    # The listener's isolation: whoever may write here must not deafen it.
                    self._log_failure(record)

            # What is not among these came later than the bus was asked for them.
            emptied_s = asked_s

    def _log_failure(self, record: Record) -> None:
        self.counts["failed"] += 1
        level = logging.WARNING if self.counts["failed"] == 1 else logging.DEBUG
        logger.log(
            level, "a record of the control topic was left aside", exc_info=True,
            extra={"offset": record.offset},
        )  # fmt: skip

    def apply(
        self, record: Record, *, earlier: bool = False, waited_ms: int = 0
    ) -> CommandVerdict | None:
        """Judge one record and act on it; None if it is not a stop command to this run.

        It was there before this listener if `earlier`, and lay unread for at most `waited_ms`.
        """
        try:
            if self._switch.apply(record, lambda: self._handler.facts().keys):
                return None
        except (SignatureError, RecordError):
            self.counts["switch_refused"] += 1
            return None
        if record.value is None or not record.key.startswith(self._prefix):
            return None
        if self._detail_requests is not None and record.key == self._detail_requests.key:
            self._detail_requests.apply(record, earlier=earlier)
        if not record.key.endswith(b"/stop"):
            return None
        signed = SignedCommand(record.key, record.value, read_signature(record.headers))
        facts = self._handler.facts()
        facts = replace(facts, stops_off=facts.stops_off or self._switch.off)
        verdict = decide(signed, facts, self._memory, self._now_ms(), waited_ms=waited_ms)
        self.counts[verdict.reason] += 1
        command = verdict.command
        if verdict.why is not None:
            # One without the id of its command has nobody who waits for an answer.
            if verdict.command_id and not earlier and self._refused < ANSWERED:
                self._refused += 1
                self._handler.refuse(verdict)
        elif command is not None:
            self._act(verdict.reason, verdict.text, signed, command)
        if command is not None and verdict.reason != "repeated":
            # Last: what could not be obeyed is not used up.
            self._memory.note(signed, command)
        return verdict

    def _act(self, reason: str, text: str, signed: SignedCommand, command: StopRequested) -> None:
        if reason == "obey":
            self._handler.obey(signed, command)
            self._memory.obey(command)
        elif reason == "already_stopping":
            self._handler.join(command)
        elif reason == "already_ended":
            self._handler.missed(command, text)


class ThreadListener:
    """The listener of a node without a launcher (`start()`): a daemon thread of local rank 0, or on
    an embedded bus of a process that local rank 0 has started.

    It hands commands to the ranks of its node that signed on to `endpoint`. It never
    escalates: `on_obeyed` reports each rank to somebody who can, `on_left` that the rank of that
    pid has left its loop, `on_saving` that it begins to write a checkpoint or has ended that, and
    `on_saved` what ranks report of their checkpoints; all are called on its thread. Ranks answer
    for themselves; refusals go through `emit`.
    """

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        topics: Topics,
        origin: RecordOrigin,
        emit: Emit,
        endpoint: datagrams.Endpoint,
        *,
        environ: Mapping[str, str] = os.environ,
        on_obeyed: Callable[[Trainer, StopRequested], None] | None = None,
        on_left: Callable[[int], None] | None = None,
        on_saved: Callable[[datagrams.Message], object] | None = None,
        on_saving: Callable[[int, bool], None] | None = None,
        beside: Callable[[Bus], Coroutine[None, None, None]] | None = None,
    ) -> None:
        """`endpoint` is closed with the listener. `beside` runs on the same bus."""
        self.members: Final = Members(origin.incarnation, process_lives)
        detail_requests = DetailRequests(origin.run_id, self.members)
        self.listener: Final = Listener(
            topics, origin.run_id, self, detail_requests=detail_requests
        )
        self._endpoint = endpoint
        self._open_bus = open_bus
        self._origin = origin
        self._emit = emit
        self._environ = environ
        self._on_obeyed = on_obeyed
        self._on_left = on_left
        self._on_saved = on_saved
        self._on_saving = on_saving
        self._beside = beside
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tocsin-listener", daemon=True)

    @property
    def socket(self) -> Path:
        """Where ranks sign on: the value of TOCSIN_LAUNCHER for them."""
        return self._endpoint.path

    def start(self) -> None:
        """Begin to listen; does not wait."""
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening; waits for at most `timeout_s`."""
        self._closed.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._endpoint.close()

    def facts(self) -> Facts:
        """What the decision is taken by, now."""
        return Facts(
            self._origin.run_id,
            self.members.incarnation,
            read_keys(trusted_paths(self._environ)),
            stops_off=NO_STOP if self._environ.get(STOP) == "off" else "",
        )

    def obey(self, signed: SignedCommand, command: StopRequested) -> None:
        """Stop: the one effect of this incarnation."""
        for trainer in self.members.living(command.incarnation):
            datagrams.send(trainer.socket, signed.message())
            if self._on_obeyed is not None and not trainer.early:
                self._on_obeyed(trainer, command)

    def join(self, command: StopRequested) -> None:
        """Another good command while a stop of this incarnation is under way or done. The stop
        under way is the one effect, of which the ranks speak themselves."""
        who = self._who(command.incarnation)
        self._emit(
            StopAcknowledged(**who, command_id=command.command_id, issue_id=command.issue_id)
        )

    def missed(self, command: StopRequested, why: str) -> None:
        """A good command, but what it was to stop has ended. It listens only while its training
        runs."""

    def refuse(self, verdict: CommandVerdict) -> None:
        """Answer with a refusal to the command that it names."""
        if verdict.why is not None:
            self._emit(refusal(verdict, self._who(self.members.incarnation)))

    def _may_leave(self) -> bool:
        """Whether a rank may leave before an update now."""
        facts, asked = self.facts(), before_update.policy_of(self._environ) is not None
        heard = self.listener.ready.is_set() and not self.listener.stops_off
        return asked and heard and not facts.stops_off and bool(len(facts.keys))

    def _who(self, incarnation: str) -> Who:
        return {**self._origin.fields, "incarnation": incarnation}

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except Exception:
            # Without an event loop: the training goes on; no stop reaches it any more.
            logger.warning("no stop can reach this run from now on", exc_info=True)

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._loop.add_reader(self._endpoint.fileno(), self._hellos)
        away = False
        try:
            while not self._closed.is_set():
                try:
                    async with self._open_bus() as bus, _running(self._beside, bus):
                        await self.listener.listen(bus)
                except Exception as error:
                    # The isolation of this thread, which tries again.
                    _log_outage("the bus cannot be read for stops now", error, again=away)
                    away = True
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._loop.remove_reader(self._endpoint.fileno())

    def _hellos(self) -> None:
        for message in self._endpoint.drain():
            before = len(self.members.unwatched)
            if not self.members.receive(message):
                continue
            asking = before_update.who_asks(message, self.members)
            if asking is not None:
                before_update.answer(asking, self._may_leave())
            if self._on_saved is not None and message["kind"] == "saved":
                self._on_saved(message)
            if self._on_saving is not None and message["kind"] == "saving":
                self._on_saving(datagrams.number(message, "pid"), message.get("on") is True)
            if len(self.members.unwatched) > before:
                print_line(LINES[datagrams.text(message, "what")])
            if self._on_left is not None and message["kind"] in ("left", "finished"):
                self._on_left(datagrams.number(message, "pid"))


@contextlib.asynccontextmanager
async def _running(
    beside: Callable[[Bus], Coroutine[None, None, None]] | None, bus: Bus
) -> AsyncIterator[None]:
    """Inside of the block `beside` runs; a failure of it is logged and ends nothing else."""
    if beside is None:
        yield
        return
    task = asyncio.create_task(beside(bus), name="beside")
    try:
        yield
    finally:
        task.cancel()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(end, Exception):
            logger.warning("what ran beside the listener has failed", exc_info=end)


def _log_outage(what: str, error: Exception, *, again: bool) -> None:
    """Once per outage: stderr is the job's."""
    logger.log(logging.DEBUG if again else logging.WARNING, "%s: %s", what, error)
