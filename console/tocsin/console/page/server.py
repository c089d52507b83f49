"""`tocsin serve`: composes the page and serves it until a signal. uvicorn is known here alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tocsin.console.context import CommandContext
from tocsin.console.page.addresses import DEFAULT, Address, read_address, read_name
from tocsin.console.page.guard import Access, Guard
from tocsin.console.page.sessions import read_token, readable_by_others
from tocsin.console.person import person_named
from tocsin.schemas.errors import ConfigurationError, first_error, require_extra

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SHUTDOWN_S: Final = 2
_BACKLOG: Final = 128
_AT_ONCE: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `tocsin serve` was told."""

    address: Address
    token_file: Path | None = None
    names: Sequence[str] = ()
    person: str = ""

    @classmethod
    def parse(
        cls,
        http: str = DEFAULT,
        *,
        token_file: Path | None = None,
        names: Sequence[str] = (),
        by: str | None = None,
    ) -> ServeOptions:
        """Check what was typed.

        Raises:
            ConfigurationError: an address or a name is none, or other machines could reach a page
                that asks nobody for a token.
        """
        address = read_address(http)
        if not address.loopback and token_file is None:
            raise ConfigurationError(
                f"--http {http}: other machines reach this address, and whoever opens the page can "
                "stop runs. Add --token-file, or listen on 127.0.0.1 and forward the port: "
                f"ssh -L {address.port or 8470}:127.0.0.1:{address.port or 8470} HOST"
            )
        return cls(
            address=address,
            token_file=token_file,
            names=[read_name(name) for name in names],
            person=person_named(by),
        )

    def access(self, address: Address) -> Access:
        """Who may use a page at that address. Raises ConfigurationError: of the token's file."""
        token = None if self.token_file is None else read_token(self.token_file)
        names = set(self.names)
        if not address.loopback:
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        return Access(address=address, token=token, names=names, person=self.person)


def serve(
    context: CommandContext,
    options: ServeOptions,
    environ: Mapping[str, str],
    print_line: Callable[[str], None],
) -> None:
    """Serve the page until a signal. `print_line` gets the lines for the person who started it.

    Raises:
        MissingExtra: what the page is made with is not installed.
        ConfigurationError: the address cannot be listened on, or the token's file is unusable.
        UnusableBus, UnknownTopic: the bus was never set up, and will not be by waiting.
    """
    require_extra("page", "tocsin serve", "starlette", "uvicorn", "jinja2", "plotly")
    with _listening(options.address) as listener:
        address = replace(options.address, port=listener.getsockname()[1])
        access = options.access(address)
        for line in lines_of(access):
            print_line(line)
        if options.token_file is not None and readable_by_others(options.token_file):
            print_line(
                f"other users of this machine can read the token; try chmod 600 "
                f"{options.token_file}"
            )
        failure: ConfigurationError | None = None
        try:
            asyncio.run(_serve(context, access, environ, listener))
        except* ConfigurationError as group:
            failure = first_error(group)
        if failure is not None:
            raise failure


def lines_of(access: Access) -> Sequence[str]:
    """The lines that the command prints once the page can be opened. Pure."""
    lines = [f"the page is at {access.address.url}"]
    if not access.address.loopback:
        lines.append(
            "it speaks plain HTTP: put TLS in front of it (a reverse proxy), or the token and the "
            "cookies can be read on their way"
        )
    return lines


class Page:
    """One page as an ASGI application behind its guard, and what keeps it up to date."""

    def __init__(self, context: CommandContext, access: Access, environ: Mapping[str, str]) -> None:
        from starlette.applications import Starlette

        from tocsin.console.page.composition import Site
        from tocsin.console.page.routes import Routes

        self.site = Site(context, access, environ)
        routes = Routes(self.site)
        self.app: ASGIApp = Guard(Starlette(routes=routes.all()), access, routes.ask_to_log_in)

    async def run(self, listener: socket.socket, stopping: asyncio.Event) -> None:
        """Serve on a listening socket until `stopping` is set.

        Raises:
            UnusableBus, UnknownTopic: the bus was never set up, and will not be by waiting.
        """
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                # Signals are ours: it would raise them once more at its end.
                yield

        server = Server(
            uvicorn.Config(
                self.app,
                access_log=False,
                lifespan="off",
                limit_concurrency=_AT_ONCE,
                log_config=None,
                # Who connects is asked of the system, never of a header that anybody can send.
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
                ws="none",
            )
        )

        async def end() -> None:
            await stopping.wait()
            await self.site.hub.close()
            server.should_exit = True

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self.site.run(), name="tocsin-page-site")
            ending = group.create_task(end(), name="tocsin-page-end")
            await server.serve(sockets=[listener])
            reading.cancel()
            ending.cancel()


async def _serve(
    context: CommandContext, access: Access, environ: Mapping[str, str], listener: socket.socket
) -> None:
    # aiokafka reports each lost connection; the page shows that once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    await Page(context, access, environ).run(listener, stopping)


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, place = found[0]
        listener = socket.create_server(
            (str(place[0]), int(place[1])), family=family, backlog=_BACKLOG
        )
    except OSError as error:
        port = address.port
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        hint = f"; try another port: --http {address.host}:{port + 1}" if port else ""
        raise ConfigurationError(
            f"--http {address.host}:{port}: cannot listen there ({reason}){hint}"
        ) from error
    with listener:
        yield listener
