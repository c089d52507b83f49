"""Where one rank hears: its datagram socket, and the thread that sleeps on it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tocsin.emitter.stop import datagrams
from tocsin.schemas.records.frames import RecordOrigin

logger = logging.getLogger(__name__)


class RankSocket:
    """The socket of one rank, and the way back to who listens on this node (the launcher)."""

    def __init__(self, origin: RecordOrigin, take: Callable[[datagrams.Message], object]) -> None:
        """Bind the socket; `take` gets each message, on the thread that `listen` starts."""
        self._origin = origin
        self._take = take
        self._closed = False
        self._launcher = os.environ.get("TOCSIN_LAUNCHER", "")
        self._endpoint = self._open()

    @property
    def path(self) -> Path | None:
        """Where this rank listens; None if it could not."""
        return None if self._endpoint is None else self._endpoint.path

    @property
    def has_listener(self) -> bool:
        """Whether somebody on this node reads commands for the ranks."""
        return bool(self._launcher)

    def listen(self, local_rank: int, restart_count: int, training: int) -> None:
        """Say hello, and begin to listen."""
        if self._endpoint is None:
            return
        self.send(
            {
                "kind": "hello", "role": "trainer", "local_rank": local_rank,
                "world_size": self._origin.world_size, "restart_count": restart_count,
                "training": training, "socket": str(self.path),
            }
        )  # fmt: skip
        threading.Thread(target=self._listen, name="tocsin-stop", daemon=True).start()

    def send(self, message: datagrams.Message) -> bool:
        """Send this, with its origin, to who listens on this node; False if it did not arrive."""
        if not self._launcher:
            return False
        who: datagrams.Message = {
            "pid": os.getpid(),
            "rank": self._origin.rank,
            "incarnation": self._origin.incarnation,
        }
        return datagrams.send(self._launcher, {**message, **who})

    def close(self, step: int) -> None:
        """Say that this training is over after that step, and stop listening."""
        self._closed = True
        if self._endpoint is not None:
            self.send({"kind": "finished", "step": step})
            # Wakes the thread, which closes its socket itself.
            datagrams.send(self._endpoint.path, {"kind": "close"})

    def _open(self) -> datagrams.Endpoint | None:
        folder = os.environ.get("TOCSIN_RUNTIME_DIR")
        if not folder:
            return None  # neither a launcher nor `start()`: nobody would know where
        try:
            name = f"r{self._origin.rank}-{os.getpid()}.sock"
            endpoint = datagrams.Endpoint(Path(folder) / name)
        except OSError as error:
            logger.warning("no stop can reach this rank: %s", error)
            return None
        endpoint.set_blocking()
        return endpoint

    def _listen(self) -> None:
        endpoint = self._endpoint
        assert endpoint is not None
        while not self._closed:
            try:
                message = endpoint.receive()
            except OSError:
                break
            if message is None:
                continue
            try:
                self._take(message)
            except Exception:
                # The isolation of this thread: one bad message must not end the listening.
                logger.warning("a message was not understood", exc_info=True)
        endpoint.close()
