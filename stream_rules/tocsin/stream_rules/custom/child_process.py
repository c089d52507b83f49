"""One process with custom rules, from its start to its end: what goes to it and comes back."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import psutil

from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.stream_rules.custom.current_call import Mark, Marker, new_page
from tocsin.stream_rules.custom.exit_cause import ProcessExit
from tocsin.stream_rules.custom.protocol import (
    Hello,
    LoadedRules,
    Message,
    OutOfMemoryNotice,
    Unpacker,
    pack,
)

logger = logging.getLogger(__name__)

_END_S: Final = 2.0
_CHUNK: Final = 1 << 20


@dataclass(slots=True)
class ChildProcess:
    """A process that was started; it has a session of its own, and no other descriptor of ours.

    Attributes:
        outgoing: bytes still to be sent.
        call: the call that was under way when somebody looked last, and since when it is.
    """

    process: subprocess.Popen[bytes]
    link: socket.socket
    marker: Marker
    unpacker: Unpacker = field(default_factory=Unpacker)
    outgoing: bytearray = field(default_factory=bytearray)
    loaded: LoadedRules | None = None
    out_of_memory: OutOfMemoryNotice | None = None
    call: Mark | None = None
    call_since_s: float = 0.0
    call_cpu_s: float = 0.0

    @classmethod
    def start(cls, hello: Hello) -> Self:
        """Start one. From a thread that lives as long as it shall. Raises OSError."""
        ours, theirs = socket.socketpair()
        page = -1
        try:
            page = new_page()
            words = [str(theirs.fileno()), str(page), str(os.getpid())]
            process = subprocess.Popen(
                python_command("tocsin.stream_rules.custom.child", *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), page),
                # No signal of a terminal is for it.
                start_new_session=True,
                # One thread is enough for it, and the training needs the cores.
                env={
                    **python_environment(os.environ),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
            marker = Marker(page)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            if page >= 0:
                os.close(page)
        ours.setblocking(False)
        child = cls(process, ours, marker)
        child.outgoing += pack(hello)
        return child

    def send(self) -> None:
        """Send what can be without waiting. Raises OSError: it is gone."""
        if self.outgoing:
            with contextlib.suppress(BlockingIOError):
                del self.outgoing[: self.link.send(self.outgoing)]

    def receive(self) -> Iterator[Message]:
        """What can be received without waiting. Raises OSError: it is gone, or talks nonsense."""
        while True:
            try:
                data = self.link.recv(_CHUNK)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("the process has ended")
            try:
                yield from self.unpacker.feed(data)
            except ValueError as error:
                self.process.kill()
                raise ConnectionAbortedError(f"not understood: {error}") from error

    def over(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def cpu_s(self) -> float:
        """CPU time so far; 0 if it cannot be known."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def memory_bytes(self) -> int:
        """Resident memory; 0 if it cannot be known."""
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self.process.pid).memory_info().rss)
        return 0

    def ended(self) -> ProcessExit:
        """How it came to its end, which has come or comes in a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        notice = self.out_of_memory
        if notice is not None:
            culprit = None
            if notice.run_id is not None and notice.rule is not None:
                culprit = (notice.run_id, notice.rule)
            return ProcessExit("memory", culprit=culprit)
        return ProcessExit("exit", self.marker.read(), returncode=self.process.returncode)

    def end(self) -> None:
        """End it, and what it has started; its own code may hang anywhere, so it is not asked."""
        self.link.close()
        if not self.over():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.marker.close()
