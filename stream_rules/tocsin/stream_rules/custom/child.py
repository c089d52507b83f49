"""The process of the custom rules: loads them, runs them over what it is given, and sends what they
found. `python -m tocsin.stream_rules.custom.child SOCKET PAGE PARENT`, started by `child_process`.

It ends when the worker does: with the socket's end, and by the kernel where that can be asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tocsin.schemas.process.own_python import append_users_modules
from tocsin.stream_rules.custom.call_guard import OutOfMemory
from tocsin.stream_rules.custom.child_engine import ChildEngine
from tocsin.stream_rules.custom.current_call import Marker
from tocsin.stream_rules.custom.protocol import Hello, Message, OutOfMemoryNotice, Unpacker, pack

NICE: Final = 10
_PR_SET_PDEATHSIG: Final = 1


def main(argv: Sequence[str]) -> None:
    """Settle in, load, and work until the worker has gone."""
    channel, page, parent = (int(word) for word in argv)
    _settle(parent)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # What a rule prints must not be taken for somebody's output.
    os.dup2(2, 1)
    sys.dont_write_bytecode = True
    link = socket.socket(fileno=channel)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, inbox), daemon=True).start()
    hello = inbox.get()
    assert isinstance(hello, Hello)

    # The rules are the user's, and may import what is his.
    append_users_modules(os.environ)

    def send(message: Message) -> None:
        link.sendall(pack(message))

    child = ChildEngine(hello, Marker(page), send)
    send(child.loaded)
    _limit_memory(hello.memory_bytes)
    try:
        while True:
            child.apply(inbox.get())
    except OutOfMemory as error:
        _report_memory(link, error.culprit)
    except MemoryError:
        _report_memory(link, None)


def _listen(link: socket.socket, inbox: queue.SimpleQueue[Message]) -> None:
    """Read what the worker sends; end the process, whatever a rule is at, when he is gone."""
    unpacker = Unpacker()
    with contextlib.suppress(OSError):
        while data := link.recv(1 << 20):
            for message in unpacker.feed(data):
                inbox.put(message)
    os._exit(0)


def _settle(parent: int) -> None:
    """Be quiet, and end with the worker."""
    with contextlib.suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, NICE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit_memory(more_bytes: int) -> None:
    """Let the address space grow by that much from now on. Where it cannot be read, not at all."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _report_memory(link: socket.socket, culprit: tuple[str, str] | None) -> None:
    """Say who has taken the memory; for that there must be some."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    run_id, rule = culprit or (None, None)
    link.sendall(pack(OutOfMemoryNotice(run_id=run_id, rule=rule)))
    os._exit(70)


if __name__ == "__main__":
    main(sys.argv[1:])
