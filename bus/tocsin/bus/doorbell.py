"""The doorbell: how a writer wakes the readers that sleep.

Each reader binds a Unix datagram socket in a small folder beside the bus file; after a commit a
writer sends one empty datagram to each that reads one of the topics written. The name of a socket
says which topics: a mask of 64 bits in hexadecimal, one bit per topic name, so that a reader of
issues sleeps through telemetry. A lost datagram costs time only: readers look by themselves now and
then.

Platform facts: the path of a Unix socket holds at most 107 bytes on Linux (103 on macOS), so a bus
with a long path has its sockets below /tmp. A socket file outlives its process; sending to it then
says "connection refused", and the writer removes it. A full queue means that a wake-up is pending.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import socket
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tocsin.bus.place import own_folder

ALL_TOPICS: Final = (1 << 64) - 1

_PATH_LIMIT: Final = 103
_NAME_ROOM: Final = 40
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
    beside = real.with_name(real.name + ".bells")
    if len(os.fsencode(beside)) + _NAME_ROOM <= _PATH_LIMIT:
        return beside
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    return Path("/tmp") / f"tocsin-{os.getuid()}" / f"{digest}.bells"


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
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in names:
            try:
                wanted = int(name.rpartition("-")[2], 16)
            except ValueError:
                continue
            if not wanted & mask:
                continue
            target = self._folder / name
            try:
                self._socket.sendto(b"", str(target))
            except ConnectionRefusedError:
                with suppress(OSError):
                    target.unlink()
            except OSError:
                # Gone meanwhile, or its queue is full, which will wake it just as well.
                continue

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class Bell:
    """The socket on which one reader sleeps, registered with the running event loop."""

    def __init__(self, path: Path, sock: socket.socket | None) -> None:
        self._path = path
        self._socket = sock
        self._rung = asyncio.Event()
        if sock is not None:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._hear)

    @classmethod
    def hang(cls, path: Path, topics: Iterable[str]) -> Self:
        """One for the readers of these topics of the bus file `path`.

        Where no socket can be bound it never rings (`works` is False), and the reader has to look
        by itself.
        """
        folder = bell_folder(path)
        target = folder / f"{os.getpid():x}-{next(_numbers):x}-{topic_mask(topics):x}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            if folder.parent.name.startswith("tocsin-") and folder.parent.parent == Path("/tmp"):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                if not own_folder(folder.parent):
                    raise PermissionError(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            sock.setblocking(False)
            # The name of a process that is gone may be left from an earlier one with this pid.
            target.unlink(missing_ok=True)
            sock.bind(str(target))
        except OSError:
            sock.close()
            return cls(target, None)
        return cls(target, sock)

    @property
    def works(self) -> bool:
        """Whether a writer can ring it: False too when its file was removed together with the
        bus.
        """
        return self._socket is not None and self._path.exists()

    def take(self) -> bool:
        """Whether it rang since the last `take`."""
        rung = self._rung.is_set()
        self._rung.clear()
        return rung

    def touch(self) -> None:
        """As if it had rung."""
        self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        """Sleep until it rings, or for so long."""
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
            self._path.unlink()
            # Beside the bus it goes with the bus; below /tmp nobody else would remove it. Who binds
            # in this very moment fails, and hangs its bell again when it next looks.
            if self._path.parent.parent.parent == Path("/tmp"):
                self._path.parent.rmdir()

    def _hear(self) -> None:
        if self._socket is not None:
            with suppress(BlockingIOError):
                while True:
                    self._socket.recv(1)
        self._rung.set()
