"""A proxy on loopback that cuts, holds, delays or refuses connections when it is told to."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

_CHUNK = 64 * 1024


class TcpProxy:
    """Carries bytes between its own port and that of a server on this machine.

    Attributes:
        port: where it listens, once it is entered.
        target: the server's port; may be set later.
        refuses: whether connections are ended as soon as they come.
        delay_s: how long each piece is kept before it goes on, in either direction.
        connections: how many there were.
    """

    def __init__(self, target: int = 0) -> None:
        self.port = 0
        self.target = target
        self.refuses = False
        self.delay_s = 0.0
        self.connections = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End all connections at once, as a firewall does that forgets them."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        """Keep all bytes from now on: the connections stay, and nothing comes."""
        self._flowing.clear()

    def release(self) -> None:
        """Let them go on."""
        self._flowing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            if self.refuses:
                return
            back, there = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(there)
            pumps = (self._pump(reader, there), self._pump(back, writer))
            tasks = [asyncio.create_task(pump) for pump in pumps]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            return
        finally:
            for each in (writer, there):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
