"""`tocsin serve` for tests: as a process, or as a thread of the test over a bus of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

from support.processes.forking import Forked
from support.waiting import HANGS_S
from tocsin.console.context import read_context
from tocsin.console.page.server import Page, ServeOptions

PAGE_AT = re.compile(r"the page is at (http://\S+)/")


@dataclass
class Served:
    """A page that runs: where it is, and what it printed."""

    base: str
    process: subprocess.Popen[str] | None = None
    page: Page | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def csrf(self) -> str:
        """What its forms repeat."""
        assert self.page is not None
        return self.page.site.access.csrf

    def ask(
        self,
        path: str = "/",
        *,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str, Message]:
        """Status, body and headers of a request; redirects are not followed."""
        data = None if form is None else urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(
            self.base + path, data=data, headers={**self.headers, **(headers or {})}
        )
        try:
            with _OPENER.open(request, timeout=HANGS_S) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), error.headers


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """Say what the server said."""
        return


_OPENER = urllib.request.build_opener(_Stay)


@contextmanager
def served_by_process(folder: Path, *options: str, environ: Mapping[str, str] | None = None
) -> Iterator[Served]:  # fmt: skip
    """`tocsin serve` in that folder, at any free port."""
    words = ["-m", "tocsin.console", "serve", "--http", "127.0.0.1:0", *options]
    process = Forked(
        [sys.executable, *words], cwd=folder, env={**os.environ, **(environ or {})}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = PAGE_AT.search(line)
        assert found is not None, line + process.stderr.read()
        yield Served(found[1], process)
    finally:
        process.terminate()
        assert process.wait(HANGS_S) in (0, -15), process.stderr.read()
        process.stderr.close()


@contextmanager
def served_here(
    bus_file: Path, *, token_file: Path | None = None, bus: str | None = None, prefix: str = ""
) -> Iterator[Served]:
    """The page of an embedded bus in a thread of this process; of `bus`, where that is another."""
    environ = {"XDG_CONFIG_HOME": str(bus_file.parent / "config")}
    config = None
    if prefix:
        config = bus_file.parent / "tocsin.yaml"
        config.write_text(f"version: 1\nbus: {{url: '{bus}', prefix: {prefix}}}\n")
    url = bus or f"embedded:{bus_file}"
    context = read_context(config, url, environ=environ)
    options = ServeOptions.parse("127.0.0.1:0", token_file=token_file, by="ana@node-1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        started = threading.Event()
        found: list[tuple[Page, asyncio.AbstractEventLoop, asyncio.Event]] = []

        async def serve() -> None:
            page = Page(context, options.access(options.address), environ)
            stopping = asyncio.Event()
            found.append((page, asyncio.get_running_loop(), stopping))
            started.set()
            await page.run(listener, stopping)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="page", daemon=True)
        thread.start()
        assert started.wait(HANGS_S)
        page, loop, stopping = found[0]
        try:
            yield Served(f"http://127.0.0.1:{port}", page=page)
        finally:
            loop.call_soon_threadsafe(stopping.set)
            thread.join(HANGS_S)
            assert not thread.is_alive()
