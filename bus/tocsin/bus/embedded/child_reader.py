"""An embedded bus as a launcher has it: a child process opens the file and reads for it.

A process that has SQLite's shared memory mapped is killed by SIGBUS when somebody truncates that
file. For those who wait for a job the end of its launcher is the end of the job. So the launcher
writes to a spool, as a training does, and its child reads. If that dies, another one goes on where
it was; until then the bus is unavailable.

The child is this module (`python -m`), or a fork that calls `main`. Its stdin is a socket: requests
`(number, method, arguments)` come in, answers `(number, succeeded, value)` go out, each a pickle
with its length before it. Both ends are processes of one program. It ends with the socket.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.reader import EmbeddedReader
from tocsin.bus.embedded.spool import SpooledBus, SpoolWriter
from tocsin.bus.port import (
    EARLIEST,
    BusClosed,
    BusUnavailable,
    From,
    Partition,
    Record,
    TopicState,
)
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.schemas.topics import TopicSpec

logger = logging.getLogger(__name__)

START_PAUSE_S: Final = 1.0
"""Between two starts of the child: a bus that kills each one must not take the training's cores."""

CLOSE_S: Final = 2.0

_SIZE: Final = struct.Struct("<I")


class Child:
    """The process that reads, and the socket to it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid: Final = pid
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.ended = False

    @classmethod
    def forked(cls, fork: Callable[[Callable[[], int], int], int]) -> Child:
        """As a fork of this process: `fork` runs a function in one, with that stdin; its pid."""
        here, there = socket.socketpair()
        with there:
            return cls(fork(main, there.fileno()), here)

    @classmethod
    def started(cls) -> Child:
        """As a Python started anew. Raises OSError."""
        here, there = socket.socketpair()
        with there:
            popen = subprocess.Popen(
                python_command(__name__),
                stdin=there.fileno(),
                env=python_environment(os.environ),
                start_new_session=True,
            )
        popen.returncode = 0  # whoever reaps all children takes its end
        return cls(popen.pid, here)

    async def call(self, method: str, *arguments: object) -> Any:
        """Have it done there. Raises what that raises; BusUnavailable: the child has ended."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._connection)
            self._listening = asyncio.create_task(self._listen(reader), name="bus-child")
        if self.ended:
            raise BusUnavailable("the process that reads the bus has ended")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_packed((number, method, arguments)))
            return await future
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Let it end; does not wait."""
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._connection.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (answer := await _received(reader)) is not None:
                number, succeeded, value = answer
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    if succeeded:
                        future.set_result(value)
                    else:
                        future.set_exception(value)
        finally:
            self.ended = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(BusUnavailable("the process that reads the bus has ended"))


_Polled = tuple[Sequence[Record], Mapping[Partition, int]]
"""Records, and where the next poll goes on."""


class UnmappedReader:
    """A reader in the child; its places are known here, so that another child can go on."""

    def __init__(self, bus: UnmappedBus, number: int, start: Mapping[Partition, From]) -> None:
        self.number: Final = number
        self.places: dict[Partition, From] = dict(start)
        self._bus = bus
        self._polling: asyncio.Future[_Polled] | None = None

    async def poll(self, *, timeout_s: float, max_records: int = 500) -> Sequence[Record]:
        """The next records, in order per partition; empty when none came within `timeout_s`."""
        if self._polling is None:
            places = tuple(self.places)
            call = self._bus.call("poll", self.number, places, timeout_s, max_records)
            self._polling = asyncio.ensure_future(call)
        # If this is cancelled, what the child has read by then is for the next poll.
        await asyncio.wait({self._polling})
        polling, self._polling = self._polling, None
        records, positions = polling.result()
        # Past holes, too: what was deleted at the end of a partition comes in no record.
        self.places |= {each: From.offset(offset) for each, offset in positions.items()}
        return records

    async def seek(self, partition: Partition, start: From) -> None:
        """Go on from `start` in that partition. Not while a poll is under way."""
        self.places[partition] = From.offset(
            await self._bus.call("seek", self.number, partition, start)
        )

    async def position(self, partition: Partition) -> int:
        """The offset of the next record that `poll` would return."""
        return self.places[partition].value

    async def ends(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        """The offset that the next appended record will get, per partition: lag = end -
        position."""
        found: Mapping[Partition, int] = await self._bus.call("ends", self.number, partitions)
        return found

    async def close(self) -> None:
        """Let go of resources."""
        if self._polling is not None:
            self._polling.cancel()
        await self._bus.close_reader(self)


class UnmappedBus:
    """An embedded bus of which this process opens no file. It writes, and reads without groups."""

    def __init__(
        self, path: Path, *, notice: str | None = None, child: Child | None = None
    ) -> None:
        """`child` is one that was forked before; without it, one is started with the bus."""
        self.path: Final = path
        self.notice: Final = notice
        self._spool = SpooledBus(path, unix_ms)
        self._child = child
        self._ready = False
        self._started_s = float("-inf")
        self._starting = asyncio.Lock()
        self._readers: dict[int, UnmappedReader] = {}
        self._numbers = itertools.count()
        self._closed = False

    @property
    def url(self) -> str:
        """How to reach it, without secrets: `embedded:PATH` or `kafka://HOST:PORT`."""
        return f"embedded:{self.path}"

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return None if self._child is None else self._child.pid

    async def __aenter__(self) -> Self:
        """Open it. Raises UnusableBus or BusUnavailable."""
        try:
            await self._up()
            await self._spool.__aenter__()
        except BaseException:
            if self._child is not None:
                self._child.close()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the spool, and the child process that reads."""
        self._closed = True
        await self._spool.__aexit__(exc_type, exc, traceback)
        child, self._child = self._child, None
        if child is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await child.call("close")
            except (TimeoutError, TocsinError):
                pass
            finally:
                child.close()

    async def init(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        """Create the topics that are missing; never change one that exists."""
        await self._spool.init(specs)
        states: Sequence[TopicState] = await self.call("init", specs)
        return states

    async def producer(self) -> SpoolWriter:
        """A spool. Its records are on the bus a moment later."""
        return await self._spool.producer()

    async def reader(self, start: Mapping[Partition, From]) -> UnmappedReader:
        """A reader of these partitions from these places."""
        reader = UnmappedReader(self, next(self._numbers), start)
        reader.places = await self.call("reader", reader.number, reader.places)
        self._readers[reader.number] = reader
        return reader

    async def close_reader(self, reader: UnmappedReader) -> None:
        """Close a reader; raises nothing for a child that has ended."""
        if self._readers.pop(reader.number, None) is not None and not self._closed:
            try:
                await self.call("close_reader", reader.number)
            except TocsinError:
                logger.debug("a reader was not closed", exc_info=True)

    async def call(self, method: str, *arguments: object) -> Any:
        """Have the child do it; start one if there is none. Raises as that does."""
        return await (await self._up()).call(method, *arguments)

    async def _up(self) -> Child:
        async with self._starting:
            if self._closed:
                raise BusClosed(f"the bus {self.url} is closed")
            if self._child is not None and self._child.ended:
                self._child.close()
                self._child, self._ready = None, False
            if self._child is None:
                now_s = time.monotonic()
                if now_s - self._started_s < START_PAUSE_S:
                    raise BusUnavailable("the process that reads the bus has ended")
                self._started_s = now_s
                try:
                    self._child = Child.started()
                except OSError as error:
                    raise BusUnavailable(f"cannot start a process: {error}") from error
            if not self._ready:
                await self._child.call("open", self.path)
                for reader in self._readers.values():
                    reader.places = await self._child.call("reader", reader.number, reader.places)
                self._ready = True
            return self._child


class _Server:
    """The child's side: what can be asked of it."""

    def __init__(self) -> None:
        self._bus: EmbeddedBus | None = None
        self._readers: dict[int, EmbeddedReader] = {}

    async def open(self, path: Path) -> None:
        bus = EmbeddedBus(path)
        await bus.__aenter__()
        self._bus = bus

    async def init(self, specs: Sequence[TopicSpec]) -> Sequence[TopicState]:
        return await self._opened().init(specs)

    async def reader(
        self, number: int, start: Mapping[Partition, From]
    ) -> Mapping[Partition, From]:
        reader = self._readers[number] = await self._opened().reader(start)
        ends = await reader.ends(list(start))
        for partition, place in start.items():
            if place.kind == "offset" and place.value > ends[partition]:
                # It is another file than the last child had.
                await reader.seek(partition, EARLIEST)
        return {each: From.offset(await reader.position(each)) for each in start}

    async def poll(
        self, number: int, places: Sequence[Partition], timeout_s: float, max_records: int
    ) -> _Polled:
        reader = self._readers[number]
        records = await reader.poll(timeout_s=timeout_s, max_records=max_records)
        return records, {each: await reader.position(each) for each in places}

    async def seek(self, number: int, partition: Partition, start: From) -> int:
        await self._readers[number].seek(partition, start)
        return await self._readers[number].position(partition)

    async def ends(self, number: int, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        return await self._readers[number].ends(partitions)

    async def close_reader(self, number: int) -> None:
        await self._readers.pop(number).close()

    async def close(self) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.__aexit__(None, None, None)

    def _opened(self) -> EmbeddedBus:
        if self._bus is None:
            raise BusClosed("the bus is not open")
        return self._bus


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    server = _Server()
    under_way: set[asyncio.Task[None]] = set()

    async def answer(number: int, method: str, arguments: Sequence[object]) -> None:
        try:
            value, succeeded = await getattr(server, method)(*arguments), True
        # The border of the process: what it raises is raised on the other side.
        except Exception as error:
            value, succeeded = _portable(error), False
        writer.write(_packed((number, succeeded, value)))

    try:
        while (request := await _received(reader)) is not None:
            task = asyncio.create_task(answer(*request))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    finally:
        for task in under_way:
            task.cancel()
        await server.close()


def _portable(error: Exception) -> Exception:
    """The error, as one that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BusUnavailable(str(error) or type(error).__name__)
    return error


def _packed(value: object) -> bytes:
    data = pickle.dumps(value)
    return _SIZE.pack(len(data)) + data


async def _received(reader: asyncio.StreamReader) -> Any:
    """The next message, or None at the end."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def main() -> int:
    """Serve the socket that is stdin, until its other end is closed."""
    # What ends a job ends us after its launcher, which closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=os.dup(0))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
