"""Reads the checkpoints that the ranks of a node report: in order, one at a time, apart.

On the event loop of the launcher, or of the listener where there is no launcher. Each checkpoint is
read by a child (`reader_process`) that is niced and killed when it takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import ValidationError

from tocsin.emitter.checkpoints.health import MAX_S
from tocsin.emitter.stop import datagrams
from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.schemas.records.checkpoints import Checkpoint, CheckpointRead
from tocsin.schemas.records.events import Data, clip

logger = logging.getLogger(__name__)

MODULE: Final = "tocsin.emitter.checkpoints.reader_process"

QUEUED: Final = 32
"""Checkpoints that wait to be read; beyond it the oldest is not read."""

KILL_S: Final = MAX_S + 30.0
"""A child that has not ended by then is killed, seconds."""


class CheckpointReader:
    """Takes the ranks' messages, and publishes a `CheckpointRead` for each checkpoint."""

    def __init__(
        self,
        run_id: str,
        publish: Callable[[Data], object],
        *,
        command: Callable[[str], tuple[str, ...]] = lambda path: python_command(MODULE, path),
    ) -> None:
        """`publish` is called on the loop of `run`, and must not wait."""
        self._run_id = run_id
        self._publish = publish
        self._command = command
        self._waiting: deque[datagrams.Message] = deque()
        self._more = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.skipped = 0
        """Checkpoints that were not read, as too many came at once."""

    @property
    def pid(self) -> int | None:
        """The child that reads now."""
        child = self._child
        return None if child is None else child.pid

    def receive(self, message: datagrams.Message) -> bool:
        """Take a message; whether it was one of a checkpoint. Never waits."""
        if message["kind"] != "saved":
            return False
        path = datagrams.text(message, "path")
        if not os.path.isabs(path) or datagrams.number(message, "rank") < 0:
            return True
        # Written again before it was read: only what is there now can be.
        self._waiting = deque(one for one in self._waiting if datagrams.text(one, "path") != path)
        self._waiting.append(message)
        if len(self._waiting) > QUEUED:
            self._waiting.popleft()
            self.skipped += 1
        self._idle.clear()
        self._more.set()
        return True

    async def run(self) -> None:
        """Read for ever. Cancelled, it ends the child."""
        try:
            while True:
                while not self._waiting:
                    self._idle.set()
                    self._more.clear()
                    await self._more.wait()
                message = self._waiting.popleft()
                found = await self._read(datagrams.text(message, "path"))
                try:
                    self._publish(self._record(message, found))
                except ValidationError as error:
                    logger.warning("a checkpoint was not understood: %s", error)
        finally:
            # The thread that waits for it ends with it.
            self._closed = True
            if (child := self._child) is not None:
                child.kill()

    async def settled(self, timeout_s: float) -> bool:
        """Wait until all reported checkpoints are read, for at most so long; whether they are."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    async def _read(self, path: str) -> Mapping[str, object]:
        try:
            found = json.loads(await asyncio.to_thread(self._output, path))
        except OSError as error:
            return {"unread": clip(str(error), 500)}
        except subprocess.TimeoutExpired:
            return {"unread": f"it took longer than {KILL_S:g} s"}
        except ValueError:
            return {"unread": "the reader failed"}
        return found if isinstance(found, dict) else {"unread": "the reader failed"}

    def _output(self, path: str) -> bytes:
        """What a child that reads it writes, which has ended then. In a thread.

        Raises OSError, TimeoutExpired.
        """
        with subprocess.Popen(
            self._command(path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=python_environment(os.environ),
            start_new_session=True,
        ) as child:
            self._child = child
            try:
                if self._closed:
                    raise OSError("nobody waits for it any more")
                return child.communicate(timeout=KILL_S)[0]
            finally:
                child.kill()
                self._child = None

    def _record(self, message: datagrams.Message, found: Mapping[str, object]) -> CheckpointRead:
        size = message.get("size_bytes")
        checkpoint = Checkpoint(
            path=clip(datagrams.text(message, "path")),
            step=datagrams.number(message, "step", -1),
            size_bytes=size if isinstance(size, int) else None,
        )
        # It speaks of the rank, in its training; a launcher may have gone on to another.
        return CheckpointRead.model_validate(
            {
                **{name: tuple(v) if isinstance(v, list) else v for name, v in found.items()},
                "run_id": self._run_id,
                "incarnation": datagrams.text(message, "incarnation"),
                "rank": datagrams.number(message, "rank"),
                "world_size": max(1, datagrams.number(message, "world_size", 1)),
                "checkpoint": checkpoint,
            }
        )
