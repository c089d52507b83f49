"""`tocsin heartbeat check`: hears the pings of workers and runs, and notifies when they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from tocsin.console.context import CommandContext
from tocsin.console.services.heartbeat_senders import Change, Senders, TooManySenders
from tocsin.console.services.private_delivery import private_delivery
from tocsin.console.services.workers import http_address
from tocsin.runtime.shutdown import stop_signals
from tocsin.schemas.configuration.values import parse_duration
from tocsin.schemas.errors import ConfigurationError, require_extra
from tocsin.schemas.exit_codes import FAILED
from tocsin.schemas.ids import check_run_id, incarnation_id, issue_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.records.issues import IssueFiring, IssueResolved, Subject

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

RULE: Final = "heartbeat"
"""What a notice calls its rule: silences of it match `{rule: heartbeat}`."""

_SHORTEST: Final = timedelta(seconds=2)
_LONGEST_BODY: Final = 4096


async def check_heartbeats(
    context: CommandContext,
    receivers: Sequence[str],
    *,
    http: str,
    after: str,
    expect: Sequence[str] = (),
    notify: Sequence[str] = (),
    allow_cidr: Sequence[str] = (),
    allow_command: Sequence[str] = (),
) -> int:
    """Listen and notify until SIGTERM or SIGINT. The exit code.

    Raises:
        ConfigurationError: an option or a receiver cannot be used.
        MissingExtra: what a receiver, or listening, needs is not installed.
    """
    require_extra("actions", "tocsin heartbeat check", "aiohttp")
    host, port = http_address(http)
    after_ms = _after(after) // timedelta(milliseconds=1)
    for name in expect:
        _sender(name)
    changes: asyncio.Queue[Change] = asyncio.Queue()
    stopping = asyncio.Event()
    with stop_signals(stopping):
        async with private_delivery(
            context,
            receivers,
            rule=RULE,
            notify=notify,
            allow_cidr=allow_cidr,
            allow_command=allow_command,
        ) as delivery:
            senders = Senders(after_ms=after_ms, expect=expect, now_ms=unix_ms())
            async with listening(host, port, senders, changes.put_nowait) as url:
                message = "listening for heartbeats at %s"
                logger.info(message, url, extra={"action": "start"})
                while not (stopping.is_set() or delivery.worker.done()):
                    for change in senders.check(unix_ms()):
                        changes.put_nowait(change)
                    while not changes.empty():
                        change = changes.get_nowait()
                        logger.warning("%s", change.reason, extra={"action": "heartbeat"})
                        await delivery.publish(issue_of(change, unix_ms()))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(1.0, after_ms / 4000)):
                            await stopping.wait()
    return 0 if stopping.is_set() else FAILED


@asynccontextmanager
async def listening(
    host: str, port: int, senders: Senders, changed: Callable[[Change], None]
) -> AsyncIterator[str]:
    """Hear pings: requests whose path is the name of their sender. Gives the URL for senders.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """
    from aiohttp import web

    async def ping(request: web.Request) -> web.Response:
        try:
            name = _sender(request.match_info["sender"])
            change = senders.pinged(name, unix_ms(), ending=await _ending(request))
        except ConfigurationError as error:
            return web.Response(text=f"{error}\n", status=400)
        except TooManySenders as error:
            return web.Response(text=f"{error}\n", status=429)
        if change is not None:
            changed(change)
        return web.Response(text="ok\n")

    app = web.Application(client_max_size=_LONGEST_BODY)
    app.add_routes([web.get("/{sender}", ping), web.post("/{sender}", ping)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigurationError(
                f"--http {host}:{port}: cannot listen there ({error.strerror})"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}/{{sender}}"
    finally:
        await runner.cleanup()


def issue_of(change: Change, now_ms: int) -> IssueFiring | IssueResolved:
    """The issue whose notice is sent. Both states of one outage have one id. Pure."""
    incarnation = incarnation_id(change.sender, RULE, 0, 0)
    model = IssueFiring if change.state == "silent" else IssueResolved
    return model(
        run_id=change.sender,
        incarnation=incarnation,
        issue_id=issue_id(change.sender, incarnation, RULE, 1, str(change.since_ms)),
        rule=RULE,
        use=RULE,
        rule_version=1,
        severity="critical",
        subject=Subject(kind="run", name=change.sender),
        reason=change.reason,
        remedy="Check the process, its machine and its network. Until it works again, nobody is "
        "alerted of what it was watching.",
        onset_ms=change.since_ms,
        at_ms=now_ms,
    )


async def _ending(request: web.Request) -> bool:
    """Whether a ping says that it is the last one, on purpose. Anybody may ping without a body."""
    from aiohttp import web

    try:
        found = json.loads(await request.text() or "{}")
    except (ValueError, RecursionError, LookupError, web.HTTPRequestEntityTooLarge):
        return False
    return isinstance(found, dict) and found.get("ending") is True


def _sender(name: str) -> str:
    try:
        return check_run_id(name)
    except ConfigurationError:
        raise ConfigurationError(
            f"sender {name[:200]!r}: expected 1 to 200 letters, digits or . _ : @ + = - "
            "that start with a letter or digit, for example 'rules@node-1'"
        ) from None


def _after(text: str) -> timedelta:
    try:
        after = parse_duration(text)
    except ValueError as error:
        raise ConfigurationError(f"--after {text}: {error}") from None
    if after < _SHORTEST:
        raise ConfigurationError(f"--after {text}: expected at least 2s, for example 90s")
    return after
