"""Datagrams between the processes of one job on one node: who is there, and "stop".

Standard library and one module of ours that needs no more, so that it can be used before anything
else is imported. A message is one JSON object of at most `MAX_BYTES` in one Unix datagram; nothing
here waits for a peer: a message that cannot be taken now is lost, and `send` returns False.

    process -> launcher   hello, saving, saved, left, finished, may_leave, restart_blocked
    launcher -> process   stop (signed bytes), look_closer, may_leave, no_restart

The sockets are in a folder of the job that only its user can enter (0700), with a short path: the
address of a Unix socket holds 107 bytes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from tocsin.schemas.process.private_folders import remove_socket

MAX_BYTES: Final = 60_000
"""Longest message; a Unix datagram of this size passes with the kernel's default buffers."""

LAUNCHER_SOCKET: Final = "launcher.sock"


Field = str | int | float | bool | None
Message = dict[str, Field]
"""The content of a datagram; the key `kind` shows how to read the rest."""


class Endpoint:
    """A bound datagram socket. Closed, it leaves no file; a copy in a forked child does nothing."""

    def __init__(self, path: Path) -> None:
        """Bind `path`, in place of what a dead process left there. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            remove_socket(str(path))
            sock.bind(str(path))
        except OSError:
            sock.close()
            raise
        self._hold(path, sock)

    @classmethod
    def inherited(cls, path: Path, descriptor: int) -> Self:
        """The one at `path` that another process has bound and handed over as `descriptor`."""
        endpoint = cls.__new__(cls)
        endpoint._hold(path, socket.socket(fileno=descriptor))
        return endpoint

    def _hold(self, path: Path, sock: socket.socket) -> None:
        self.path = path
        self._pid = os.getpid()
        self._socket = sock
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, for an event loop; -1 once closed."""
        return self._socket.fileno()

    def set_blocking(self) -> None:
        """From now on `receive` waits for a message; for a thread that does nothing else."""
        self._socket.setblocking(True)

    def receive(self) -> Message | None:
        """The next message that is one; None if there is none now, or a datagram was not a message.

        Raises:
            OSError: the socket was closed.
        """
        try:
            return decode(self._socket.recv(MAX_BYTES + 1))
        except (BlockingIOError, InterruptedError):
            return None

    def drain(self) -> list[Message]:
        """All messages that are there now; for a socket that does not block."""
        found: list[Message] = []
        while True:
            try:
                raw = self._socket.recv(MAX_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                return found
            message = decode(raw)
            if message is not None:
                found.append(message)

    def hand_over(self) -> None:
        """Close our copy only: another process has inherited it."""
        self._socket.close()

    def close(self) -> None:
        """Take the file away and close; a second time does nothing."""
        if self._socket.fileno() < 0:
            return
        if os.getpid() == self._pid:
            remove_socket(str(self.path))
        self._socket.close()


def encode(message: Mapping[str, Field]) -> bytes:
    """The datagram. Raises ValueError if it is over `MAX_BYTES`."""
    raw = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_BYTES:
        raise ValueError(f"a message of {len(raw):,} bytes is over the limit of {MAX_BYTES:,}")
    return raw


def decode(raw: bytes) -> Message | None:
    """The message, or None if this is not one: too long, not a flat JSON object, without `kind`."""
    if len(raw) > MAX_BYTES:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        return None
    flat = all(isinstance(value, (str, int, float, bool, type(None))) for value in found.values())
    return found if flat else None


def send(path: str | Path, message: Mapping[str, Field]) -> bool:
    """Send without waiting; False if nobody listens there, its queue is full, or it is too long."""
    try:
        raw = encode(message)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(raw, str(path))
    except (OSError, ValueError):
        return False
    return True


def text(message: Message, name: str) -> str:
    """A field if it is text, else ""."""
    value = message.get(name)
    return value if isinstance(value, str) else ""


def number(message: Message, name: str, default: int = 0) -> int:
    """A field if it is a whole number, else `default`."""
    value = message.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
