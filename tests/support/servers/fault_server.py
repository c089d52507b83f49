"""A real HTTP server on loopback that answers each path with the fault that the path names.

`/status/429?after=2` answers 429 with `Retry-After: 2`; `/then/503,200` answers in that order, and
with the last from then on; `/cycle/503,reset,200` begins again after the last. `/reset` cuts the
connection, `/timeout` never answers, `/drip` sends its head byte by byte, `/half` a part of it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote


@dataclass(frozen=True)
class Seen:
    """One request, header names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FaultServer:
    """What came in, and where it listens."""

    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """Set from the beginning; while it is cleared, no request is answered."""

    scheme: str = "http"
    body: Callable[[Seen], str] = lambda _: "the body says: SECRET-IN-BODY"
    """What is answered to a request, beside its status."""

    def url(self, path: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{path}"

    def ids(self) -> list[str]:
        return [request.headers["webhook-id"] for request in self.seen]


@asynccontextmanager
async def fault_server(context: ssl.SSLContext | None = None) -> AsyncIterator[FaultServer]:
    """Listen on a free port of 127.0.0.1; with a context, encrypted."""
    state = FaultServer(scheme="http" if context is None else "https")
    state.answers.set()
    counts: dict[str, int] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split(" ")[1]
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        seen = Seen(path, headers, body)
        state.seen.append(seen)
        state.arrived.set()
        await state.answers.wait()
        what, _, query = path.partition("?")
        parts = what.strip("/").split("/")
        # An Alertmanager is posted to a path behind its URL.
        status = parts[1] if parts[0] == "status" else parts[-1]
        if parts[0] in ("then", "cycle"):
            statuses = status.split(",")
            turn = counts.get(path, 0)
            counts[path] = turn + 1
            last = len(statuses) - 1
            status = statuses[turn % len(statuses) if parts[0] == "cycle" else min(turn, last)]
        if status == "reset":
            writer.transport.abort()
            return False
        if status == "timeout":
            await asyncio.sleep(60)
            return False
        if status == "half":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Le")
            await writer.drain()
            return False
        if status == "drip":
            for byte in b"HTTP/1.1 200 OK\r\nx-slow: " + b"x" * 10_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
            return False
        extra = ""
        if query.startswith("after="):
            extra += f"Retry-After: {unquote(query.removeprefix('after='))}\r\n"
        if status.startswith("3"):
            extra += f"Location: {state.url('/status/200')}\r\n"
        text = "" if status == "204" else state.body(seen)
        length = "" if status == "204" else f"Content-Length: {len(text.encode())}\r\n"
        writer.write(f"HTTP/1.1 {status} whatever\r\n{extra}{length}\r\n{text}".encode())
        await writer.drain()
        return True

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
