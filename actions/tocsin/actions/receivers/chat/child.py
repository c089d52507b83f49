"""Sends one chat message with apprise: `python -m tocsin.actions.receivers.chat.child`, JSON in,
JSON out.

apprise knows many services, and each of its plugins makes connections of its own. So it runs in a
process in which every connection is checked at the moment it is made, whoever makes it, and in
which no program can be started. Its redirects, templates and retries are off: the ledger retries.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tocsin.actions.decision.retry import Failure
from tocsin.actions.receivers.address_guard import AddressGuard, AddressRefused, parse_networks
from tocsin.actions.receivers.chat.urls import SEVERAL_TARGETS

_PROGRAMS: Final = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn",
     "subprocess.Popen"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be sent where.

    Attributes:
        private, allow: which addresses may be reached, as for `AddressGuard`.
        connect_to: for tests: host → address and port to go to instead; the guard still decides.
    """

    url: str
    title: str
    body: str
    private: bool
    allow: Sequence[str] = ()
    timeout_s: float = 10.0
    connect_to: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """What came of it; `status` and `retry_after` are those of the last HTTP answer to it."""

    sent: bool = False
    status: int | None = None
    retry_after: str | None = None
    failure: Failure | None = None
    refused: str | None = None
    requests: int = 0


def guard_process(guard: AddressGuard, result: Result) -> None:
    """From now on this process connects only where the guard allows, and starts no program.

    It cannot be undone: an audit hook stays for the life of the process.
    """

    def check(address: object) -> None:
        host = str(address[0]) if isinstance(address, tuple) else ""
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            # A name here would be looked up after the check; a path would be a local service.
            why: str | None = "only connections to internet addresses are allowed"
        else:
            why = guard.why_refused(host)
        if why is not None:
            result.refused = result.refused or why
            raise AddressRefused(why)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            if arguments[1] is not None:
                check(arguments[1])
        elif event in _PROGRAMS:
            raise PermissionError("no program may be started here")

    sys.addaudithook(hook)


def send(task: Task, result: Result) -> None:
    """Make the attempt; what came of it goes into `result`."""
    import apprise
    import requests

    seen = Result()
    _watch_requests(requests, task, seen)
    asset = apprise.AppriseAsset(
        plugin_paths=[], storage_mode="memory", allow_templates=False,
        service_timeout=task.timeout_s,
    )  # fmt: skip
    # Not a word of its own about itself, and no pictures from its site.
    asset.app_id = asset.app_desc = "tocsin"
    asset.app_url = asset.image_url_mask = asset.image_url_logo = ""
    asset.http_redirects = False
    asset.default_service_retry = 0
    plugin = _plugin(task.url, asset)
    if plugin is None:
        return
    plugin.redirects = False
    plugin.retry = 0
    plugin.verify_certificate = True
    if len(plugin) > 1:
        result.refused = SEVERAL_TARGETS
        return
    result.sent = bool(
        plugin.notify(
            body=task.body,
            title=task.title,
            notify_type=apprise.NotifyType.WARNING,
            body_format=apprise.NotifyFormat.TEXT,
        )
    )
    # Some plugins log out when they are thrown away: how that goes does not concern the message.
    result.status, result.retry_after = seen.status, seen.retry_after
    result.failure, result.requests = seen.failure, seen.requests


_MODULES: Final = {
    "discord": ("discord", "NotifyDiscord"),
    "discord.com": ("discord", "NotifyDiscord"),
    "discordapp.com": ("discord", "NotifyDiscord"),
    "hooks.slack.com": ("slack", "NotifySlack"),
    "slack": ("slack", "NotifySlack"),
    "tgram": ("telegram", "NotifyTelegram"),
    "twilio": ("twilio", "NotifyTwilio"),
}
"""The services that most use: apprise takes 0.6 s of a core to import all that it knows."""


def _plugin(url: str, asset: Any) -> Any:
    """apprise's plugin for a URL; None if there is none, or the URL lacks something."""
    import apprise

    # As it does itself, lest the rest of the URL be left out as a fragment.
    url = url.replace("/#", "/%23")
    scheme, _, rest = url.partition("://")
    native = scheme.lower() == "https"
    module, name = _MODULES.get(rest.partition("/")[0] if native else scheme.lower(), ("", ""))
    if not module:
        return apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
    plugin = getattr(importlib.import_module(f"apprise.plugins.{module}"), name)
    given = plugin.parse_native_url(url) if native else plugin.parse_url(url)
    if given is None:
        return None
    try:
        return plugin(**{**given, "asset": asset})
    except TypeError:  # what apprise raises for a part that is missing or wrong
        return None


def _watch_requests(requests: Any, task: Task, result: Result) -> None:
    """apprise returns neither status nor Retry-After, so they are read where its requests pass."""
    original = requests.Session.send

    def watched(session: Any, request: Any, **options: Any) -> Any:
        options |= {"allow_redirects": False, "proxies": {}, "timeout": task.timeout_s}
        result.requests += 1
        result.status = result.retry_after = result.failure = None
        try:
            response = original(session, request, **options)
        except requests.RequestException as error:
            result.failure = _failure(requests, error)
            raise
        result.status = response.status_code
        result.retry_after = response.headers.get("Retry-After")
        return response

    requests.Session.send = watched


def _failure(requests: Any, error: Exception) -> Failure:
    """The kind of failure; its own words hold the URL."""
    if isinstance(error, requests.exceptions.SSLError):
        return "TLS certificate not accepted"
    if isinstance(error, requests.exceptions.Timeout):
        return "timeout"
    if not isinstance(error, requests.exceptions.ConnectionError):
        return "broken answer"
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            break
        if isinstance(cause, socket.gaierror) or type(cause).__name__ == "NameResolutionError":
            return "name not found"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        if isinstance(cause, ConnectionError):
            return "connection reset"
        reason = getattr(cause, "reason", None) or (cause.args[0] if cause.args else None)
        cause = (
            cause.__cause__
            or cause.__context__
            or (reason if isinstance(reason, BaseException) else None)
        )
    return "no connection"


def _redirect_connections(connect_to: Mapping[str, tuple[str, int]]) -> None:
    original = socket.getaddrinfo

    def lookup(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host in connect_to:
            host, port = connect_to[host]
        return original(host, port, *arguments, **options)

    socket.getaddrinfo = lookup


def main() -> int:
    """Read a task, send it, print the result."""
    out = os.fdopen(os.dup(1), "w")
    # Whatever apprise or its plugins print must not be taken for the result.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    given = json.loads(sys.stdin.read())
    given["connect_to"] = {host: tuple(to) for host, to in given["connect_to"].items()}
    task, result = Task(**given), Result()
    if task.connect_to:
        _redirect_connections(task.connect_to)
    guard_process(AddressGuard(private=task.private, allow=parse_networks(task.allow)), result)
    send(task, result)
    json.dump(asdict(result), out)
    out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
