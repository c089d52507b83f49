"""The doorbell: how a writer wakes the readers that sleep.

Each reader binds a Unix datagram socket in a small folder beside the bus file; after a commit a
writer sends one empty datagram to each that reads one of the topics written. The name of a socket
says which topics: a mask of 64 bits in hexadecimal, one bit per topic name, so that a reader of
issues sleeps through telemetry. A lost datagram costs time only: readers look by themselves now and
then.

The folder is used through a descriptor, once it is known to be one that only this user can write
to: another's folder or link of that name is left alone, and the readers look by themselves.

Platform facts: the path of a Unix socket holds at most 107 bytes on Linux (103 on macOS); through
`/proc/self/fd` the path of the folder does not count. A socket file outlives its process; sending
to it then says "connection refused", and the writer removes it. Sending to a file that is no socket
says the same, so only sockets are removed. A full queue means that a wake-up is pending.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tocsin.schemas.process.private_folders import make_private, open_private, remove_socket

ALL_TOPICS: Final = (1 << 64) - 1

_DESCRIPTORS: Final = "/proc/self/fd"
_NAME: Final = re.compile(r"[0-9a-f]{1,8}-[0-9a-f]{1,8}-([0-9a-f]{1,16})")
"""Process, number, topics."""

_numbers = itertools.count()


def topic_mask(topics: Iterable[str]) -> int:
    """The bits of these topics."""
    mask = 0
    for topic in topics:
        mask |= 1 << zlib.crc32(topic.encode()) % 64
    return mask


def bell_folder(path: Path) -> Path:
    """Where the sockets of that bus file are; the same for each process."""
    real = Path(os.path.realpath(path))
    return real.with_name(real.name + ".bells")


def _address(folder: Path, fd: int, name: str) -> str:
    """A path to that socket, as short as can be."""
    return f"{_DESCRIPTORS}/{fd}/{name}" if os.path.isdir(_DESCRIPTORS) else str(folder / name)


class Doorbell:
    """Rings the readers of a bus. `ring` may be called in any thread; it never blocks and never
    raises.
    """

    def __init__(self, path: Path) -> None:
        self._folder = bell_folder(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self, mask: int) -> None:
        """Wake the readers of these topics."""
        with suppress(OSError):
            # Opened each time: the bus may be deleted and made again.
            fd = open_private(self._folder)
            try:
                self._ring(fd, mask)
            finally:
                os.close(fd)

    def _ring(self, fd: int, mask: int) -> None:
        for name in os.listdir(fd):
            match = _NAME.fullmatch(name)
            if match is None or not int(match[1], 16) & mask:
                continue
            try:
                self._socket.sendto(b"", _address(self._folder, fd, name))
            except ConnectionRefusedError:
                with suppress(OSError):
                    remove_socket(name, dir_fd=fd)
            except OSError:
                # Gone meanwhile, or its queue is full, which will wake it just as well.
                continue

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class Bell:
    """The socket on which one reader sleeps, registered with the running event loop.

    `fd` is of its folder, and is closed with it.
    """

    def __init__(self, path: Path, fd: int, sock: socket.socket | None) -> None:
        self._path = path
        self._fd = fd
        self._socket = sock
        self._rung = asyncio.Event()
        if sock is not None:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._receive)

    @classmethod
    def hang(cls, path: Path, topics: Iterable[str]) -> Self:
        """One for the readers of these topics of the bus file `path`.

        Where no socket can be bound it never rings (`works` is False), and the reader has to look
        by itself.
        """
        folder = bell_folder(path)
        name = f"{os.getpid():x}-{next(_numbers):x}-{topic_mask(topics):x}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        fd = -1
        try:
            fd = open_private(make_private(folder))
            sock.setblocking(False)
            # The name of a process that is gone may be left from an earlier one with this pid.
            remove_socket(name, dir_fd=fd)
            sock.bind(_address(folder, fd, name))
        except OSError:
            sock.close()
            if fd >= 0:
                os.close(fd)
            return cls(folder / name, -1, None)
        return cls(folder / name, fd, sock)

    @property
    def works(self) -> bool:
        """Whether a writer can ring it: False too when its file was removed together with the
        bus.
        """
        return self._socket is not None and self._path.exists()

    def pop(self) -> bool:
        """Whether it rang since the last `pop`."""
        rung = self._rung.is_set()
        self._rung.clear()
        return rung

    def touch(self) -> None:
        """Wake the waiter as if the bell had rung."""
        self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        """Sleep until it rings, or for that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()

    def close(self) -> None:
        """Take it down."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        with suppress(OSError):
            remove_socket(self._path.name, dir_fd=self._fd)
        os.close(self._fd)

    def _receive(self) -> None:
        if self._socket is not None:
            with suppress(BlockingIOError):
                while True:
                    self._socket.recv(1)
        self._rung.set()
